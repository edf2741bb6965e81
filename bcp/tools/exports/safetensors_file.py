"""A safetensors file of whole tensors, laid out before it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bcp.errors import InputError
from bcp.interop.safetensors_files import CODES, LENGTH_BYTES, MOST_HEADER_BYTES
from bcp.plan.write.files import framed
from bcp.tools.exports.chosen import Chosen
from bcp.tools.exports.streamed import TargetFile

__all__ = ["check_storable", "safetensors_file"]

ALIGNMENT = 64
NOTES = "__metadata__"


def check_storable(tensors: Sequence[Chosen]) -> None:
    """Raise InputError for tensors of two kinds, and for a dtype or a name unknown to safetensors."""
    if len({tensor.kind for tensor in tensors}) > 1:
        raise InputError("kind=None: names of model and optimizer may be equal; pass kind='model' or kind='optimizer'")
    for tensor in tensors:
        if tensor.dtype not in CODES:
            raise InputError(
                f"{tensor}: safetensors has no dtype {tensor.dtype}; leave the tensor out by glob=, or export to "
                "another format"
            )
        if tensor.name == NOTES:
            raise InputError(f"{tensor}: the name is reserved in safetensors files; pass rename=")


def safetensors_file(key: str, tensors: Sequence[Chosen], notes: Mapping[str, str] | None = None) -> TargetFile:
    """Lay out a file: larger elements first, so that each is aligned to its size, and otherwise in the given order.

    Args:
        key: name of the file.
        tensors: all of them have dtypes and names of safetensors, and no name comes twice.
        notes: more pairs for its ``__metadata__``.

    Raises:
        InputError: the header is longer than readers take.

    """
    ordered = sorted(tensors, key=lambda tensor: -tensor.itemsize)
    table: dict[str, object] = {NOTES: {**(notes or {}), "format": "pt"}}
    offset = 0
    for tensor in ordered:
        table[tensor.name] = {
            "dtype": CODES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (offset, offset + tensor.nbytes),
        }
        offset += tensor.nbytes
    header = framed(table, ALIGNMENT)
    nbytes = len(header) - LENGTH_BYTES
    if nbytes > MOST_HEADER_BYTES:
        raise InputError(
            f"{key}: the header for {len(tensors)} tensors has {nbytes} bytes, and {MOST_HEADER_BYTES} is the most "
            "of safetensors; export fewer tensors by glob=, or choose a smaller shard_bytes="
        )
    file = TargetFile(key)
    file.fixed(header)
    for tensor in ordered:
        file.elements(tensor.row, tensor.box, tensor.dtype, tensor.itemsize)
    return file
