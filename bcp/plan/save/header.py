"""The head of a data file: a safetensors header, so that any safetensors reader can open what bcp writes.

Eight bytes of length (little-endian), then JSON, padded with spaces so that the data section starts at a
multiple of 4096.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bcp.plan.box import Box, flat_boxes
from bcp.plan.shards import TensorMeta

__all__ = ["ALIGNMENT", "DTYPE_CODES", "Entry", "entry", "entry_name", "header"]

ALIGNMENT = 4096
"""Bytes; the data section starts at a multiple of it, so that blocks of it can be written with O_DIRECT."""

DTYPE_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
"""What safetensors calls torch's dtypes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file.

    Attributes:
        name: what it is found by.
        dtype: torch's name without the ``torch.``.
        shape: its shape in this file.
        nbytes: its size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Return everything that comes before the data section.

    Entries are packed in the given order. A dtype that safetensors has no code for is stored as bytes (``U8``, one
    dimension) and noted in ``__metadata__`` under ``bcp.dtype.<entry name>``. An entry whose name is
    taken is renamed ``<name>#2``, ``#3`` ...
    """
    notes = dict(metadata)
    table: dict[str, object] = {"__metadata__": notes}  # an entry of that name is renamed as well
    offset = 0
    for one in entries:
        name = _free_name(one.name, table)
        code, shape = DTYPE_CODES.get(one.dtype), one.shape
        if code is None:
            code, shape = "U8", (one.nbytes,)
            notes[f"bcp.dtype.{name}"] = one.dtype
        table[name] = {"dtype": code, "shape": shape, "data_offsets": (offset, offset + one.nbytes)}
        offset += one.nbytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def entry(tensor: TensorMeta, box: Box, start: int, stop: int) -> Entry:
    """Return the entry of the elements [start, stop) of a box of a tensor."""
    block = _block(box, start, stop)
    return Entry(
        name=_name(tensor.fqn, tensor.shape, box, block, f"{start}:{stop}"),
        dtype=tensor.dtype,
        shape=(stop - start,) if block is None else block.lengths,
        nbytes=(stop - start) * tensor.itemsize,
    )


def entry_name(fqn: str, shape: tuple[int, ...], box: Box, start: int, stop: int) -> str:
    """Name the elements [start, stop) of a box of a tensor of that global shape.

    ``fqn`` for the whole tensor, ``fqn[0:4,8:16]`` for a block of it (also one that is a flat interval of the box),
    and ``fqn[0:4,8:16]{5:17}``, the box and the flat interval inside it, for anything else.
    """
    return _name(fqn, shape, box, _block(box, start, stop), f"{start}:{stop}")


def _name(fqn: str, shape: tuple[int, ...], box: Box, block: Box | None, flat: str) -> str:
    """Name a flat interval of a box that is ``block``, if it is one."""
    if block == Box.whole(shape):
        return fqn
    return f"{fqn}{_slices(box)}{{{flat}}}" if block is None else fqn + _slices(block)


def _block(box: Box, start: int, stop: int) -> Box | None:
    """Return the flat interval as a block in global coordinates, or None where it is not one."""
    if (start, stop) == (0, box.numel):
        return box
    blocks = [block for _, block in flat_boxes(box.lengths, start, stop)]
    if len(blocks) != 1:
        return None
    offsets = tuple(low + inner for low, inner in zip(box.offsets, blocks[0].offsets, strict=True))
    return Box(offsets, blocks[0].lengths)


def _slices(box: Box) -> str:
    """Write a box as slices."""
    ranges = (f"{low}:{low + n}" for low, n in zip(box.offsets, box.lengths, strict=True))
    return f"[{','.join(ranges)}]"


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    """Return the name, numbered if it is taken."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name}#{number}", number + 1
    return free
