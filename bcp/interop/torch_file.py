"""Files of ``torch.save`` by reference: contiguous tensors are ranges of the zip."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from bcp.errors import CheckpointError, CorruptError
from bcp.interop.catalogue import DTYPES, Catalogue, Piece
from bcp.interop.optimizer_numbers import is_packed, packed_entries
from bcp.interop.reading import Opened
from bcp.interop.torch_pickle import Stored, leaves, torch_value, value_text
from bcp.interop.torch_zip import Zip
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["torch_file"]

BATCH = 1024
MOST_PICKLE_BYTES = 1 << 30
Name = tuple[str, str]


async def torch_file(opened: Opened, key: str) -> Catalogue:
    """List the tensors and values of a file of ``torch.save``.

    A dict with the key ``"model"`` and tensors below it has bcp's kinds: the model, and the optimizer if there is one.
    Anything else is the state of a model.

    Raises:
        CheckpointError: the pickle has unknown classes, or a tensor is strided or overlaps another one.
        CorruptError: the file is damaged, or a tensor lies outside of its storage.

    """
    where, nbytes = f"{opened.path}/{key}", opened.sizes[key]
    archive = await Zip.of(opened, key, 0, nbytes)
    if "byteorder" in archive.entries and await archive.read("byteorder", 16) != b"little":
        raise CheckpointError(f"{where} was saved by a big-endian host; save it anew on a little-endian one")
    pickle = await archive.read("data.pkl", MOST_PICKLE_BYTES)
    tensors, values = await in_thread_gc_paused(_contents, pickle, where)
    firsts, tied = _shared(tensors, where)
    start_of = await _starts(archive, {tensors[name].key for name in firsts})
    pieces = []
    for name in firsts:
        tensor, entry = tensors[name], archive.entries[f"data/{tensors[name].key}"]
        first = tensor.offset * DTYPES[tensor.dtype]
        if first + tensor.nbytes > entry.nbytes:
            raise CorruptError(
                f"{where}: {name[0]} tensor {name[1]!r} is said to end with byte {first + tensor.nbytes} of a storage "
                f"of {entry.nbytes} bytes; get the file again"
            )
        pieces.append(Piece.whole(*name, tensor.dtype, tensor.shape, key, start_of[tensor.key] + first))
    return Catalogue("torch.save", pieces, opened.sizes, values, tied, is_file=opened.is_file)


async def _starts(archive: Zip, storages: Iterable[str]) -> dict[str, int]:
    """Return the first byte of each storage."""
    ordered = sorted(storages, key=lambda storage: (len(storage), storage))  # by number, as they lie in the file
    found: dict[str, int] = {}
    for first in range(0, len(ordered), BATCH):
        some = ordered[first : first + BATCH]
        ahead = await archive.looked_ahead(f"data/{storage}" for storage in some)
        found |= {storage: await ahead.data_start(f"data/{storage}") for storage in some}
    return found


def _contents(pickle: bytes, where: str) -> tuple[dict[Name, Stored], dict[Name, str]]:
    """Return the tensors of a pickle, and the JSON text of all other leaves. Slow: a million leaves take seconds."""
    named, most = _named(torch_value(pickle, where), where, len(pickle)), len(pickle)
    tensors = {name: leaf for name, leaf in named.items() if isinstance(leaf, Stored)}
    return tensors, {name: value_text(leaf, most, where) for name, leaf in named.items() if name not in tensors}


def _named(value: Any, where: str, most: int) -> dict[Name, Any]:
    """Return all leaves by kind and name."""
    if not isinstance(value, Mapping | list | tuple):
        raise CheckpointError(f"{where} has a {type(value).__name__} and no dict of tensors; save a state_dict()")
    found: dict[Name, Any] = {}

    def add(kind: str, items: Iterable[tuple[str, Any]]) -> None:
        for name, leaf in items:
            if (kind, name) in found:
                raise CheckpointError(f"{where} has two entries named {name!r}; rename a key, and save it anew")
            found[kind, name] = leaf

    if not isinstance(value, Mapping) or not _has_tensors(value.get("model"), where, most):
        add("model", _dotted(value, where, most))
        return found
    add("model", _dotted(value["model"], where, most))
    model = [(name, leaf) for (_, name), leaf in found.items() if isinstance(leaf, Stored)]
    optimizer = value.get("optimizer", {})
    if is_packed(optimizer):
        add("optimizer", packed_entries(optimizer, _untied(model), where))
    else:
        add("optimizer", _dotted(optimizer, where, most))
    add("model", _dotted({key: value[key] for key in value if key not in ("model", "optimizer")}, where, most))
    return found


def _dotted(value: Any, where: str, most: int) -> Iterator[tuple[str, Any]]:
    return ((".".join(map(str, path)), leaf) for path, leaf in leaves(value, where, most))


def _untied(model: Iterable[tuple[str, Stored]]) -> list[tuple[str, Stored]]:
    """Return each tensor once, by its first name."""
    seen: dict[Stored, str] = {}
    return [(name, tensor) for name, tensor in model if seen.setdefault(tensor, name) == name or not tensor.nbytes]


def _has_tensors(value: Any, where: str, most: int) -> bool:
    return isinstance(value, Mapping) and any(isinstance(leaf, Stored) for _, leaf in leaves(value, where, most))


def _shared(tensors: Mapping[Name, Stored], where: str) -> tuple[list[Name], dict[Name, str]]:
    """Return the tensors with data of their own, and the tied ones.

    Raises CheckpointError for a strided tensor, and for two tensors with common memory.
    """
    firsts: dict[tuple[str, Stored], str] = {}
    tied: dict[Name, str] = {}
    own: list[Name] = []
    for name in sorted(tensors):
        tensor = tensors[name]
        if not tensor.is_contiguous:
            raise CheckpointError(
                f"{where}: {name[0]} tensor {name[1]!r} of shape {list(tensor.shape)} has strides "
                f"{list(tensor.stride)}, and bcp reads contiguous tensors by reference; save it with .contiguous()"
            )
        first = firsts.setdefault((name[0], tensor), name[1]) if tensor.nbytes else name[1]
        if first == name[1]:
            own.append(name)
        else:
            tied[name] = first
    _check_apart(own, tensors, where)
    return own, tied


def _check_apart(own: Iterable[Name], tensors: Mapping[Name, Stored], where: str) -> None:
    """Refuse overlapping tensors."""
    spans = sorted(
        (tensor.key, tensor.offset * DTYPES[tensor.dtype], tensor.nbytes, name)
        for name in own
        if (tensor := tensors[name]).nbytes
    )
    for (key, start, nbytes, name), (other_key, other_start, _, other) in pairwise(spans):
        if key == other_key and other_start < start + nbytes:
            raise CheckpointError(
                f"{where}: {name[0]} tensor {name[1]!r} and {other[0]} tensor {other[1]!r} share a part of their "
                "memory, and would not after a load; save them with .clone()"
            )
