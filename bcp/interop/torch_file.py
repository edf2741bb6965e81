"""Files of ``torch.save`` by reference: contiguous tensors are ranges of the zip."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from bcp.errors import CheckpointError
from bcp.interop.catalogue import DTYPES, Catalogue, Piece
from bcp.interop.optimizer_numbers import is_packed, packed_entries
from bcp.interop.reading import Opened
from bcp.interop.torch_content import Name, TorchContent, check_contiguous, torch_content
from bcp.interop.torch_pickle import Stored, leaves, value_text
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["shared", "torch_file", "untied"]


async def torch_file(opened: Opened, key: str) -> Catalogue:
    """List the tensors and values of a file of ``torch.save``.

    A dict with the key ``"model"`` and tensors below it has bcp's kinds: the model, and the optimizer if there is one.
    Anything else is the state of a model.

    Raises:
        CheckpointError: the pickle has unknown classes, or a tensor is strided or overlaps another one.
        CorruptError: the file is damaged, or a tensor lies outside of its storage.

    """
    content = await torch_content(opened, key)
    tensors, values = await in_thread_gc_paused(_contents, content)
    own, tied = shared(tensors, content.where)
    places = await content.places({name: tensors[name] for name in own})
    pieces = [Piece.whole(*name, tensors[name].dtype, tensors[name].shape, key, places[name]) for name in own]
    return Catalogue("torch.save", pieces, opened.sizes, values, tied, is_file=opened.is_file)


def _contents(content: TorchContent) -> tuple[dict[Name, Stored], dict[Name, str]]:
    """Return the tensors of a file, and the JSON text of all other leaves. Slow: a million leaves take seconds."""
    where, most = content.where, content.pickle_nbytes
    named = _named(content.value, where, most)
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
        add("optimizer", packed_entries(optimizer, untied(model), where))
    else:
        add("optimizer", _dotted(optimizer, where, most))
    add("model", _dotted({key: value[key] for key in value if key not in ("model", "optimizer")}, where, most))
    return found


def _dotted(value: Any, where: str, most: int) -> Iterator[tuple[str, Any]]:
    return ((".".join(map(str, path)), leaf) for path, leaf in leaves(value, where, most))


def untied(model: Iterable[tuple[str, Stored]]) -> list[tuple[str, Stored]]:
    """Return each tensor once, by its first name."""
    seen: dict[Stored, str] = {}
    return [(name, tensor) for name, tensor in model if seen.setdefault(tensor, name) == name or not tensor.nbytes]


def _has_tensors(value: Any, where: str, most: int) -> bool:
    return isinstance(value, Mapping) and any(isinstance(leaf, Stored) for _, leaf in leaves(value, where, most))


def shared(tensors: Mapping[Name, Stored], where: str) -> tuple[list[Name], dict[Name, str]]:
    """Return the tensors with data of their own, and the name with the data of each tied one.

    Raises CheckpointError for a strided tensor, and for two tensors with common memory.
    """
    firsts: dict[tuple[str, Stored], str] = {}
    tied: dict[Name, str] = {}
    own: list[Name] = []
    for name in sorted(tensors):
        tensor = tensors[name]
        check_contiguous(tensor, name, where)
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
