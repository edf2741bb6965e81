"""Folders of torchsnapshot by reference: a manifest in JSON, and files with the elements of tensors alone."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any
from urllib.parse import unquote

from bcp.errors import CheckpointError, CorruptError
from bcp.interop.catalogue import DTYPES, Catalogue, Piece, check_dtype, check_shape
from bcp.interop.facts import facts_of
from bcp.interop.found import Found
from bcp.interop.optimizer_part import Part, add_states, unwrapped
from bcp.interop.reading import Opened
from bcp.interop.torch_content import torch_content
from bcp.interop.torch_pickle import Stored, value_text

__all__ = ["MANIFEST", "torchsnapshot_folder"]

NAME = "torchsnapshot"
MANIFEST = ".snapshot_metadata"
OPTIMIZERS = ("optimizer", "optim")
GROUPS = "param_groups"
CONTAINERS = ("dict", "OrderedDict", "list")
BOXES = {"ShardedTensor": "shards", "ChunkedTensor": "chunks"}
PLAIN = "buffer_protocol"
Shape = tuple[int, ...]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


PRIMITIVES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "str": str,
    "bool": {"True": True, "False": False}.__getitem__,
    "bytes": _bytes,
    "float": lambda text: struct.unpack("<d", _bytes(text))[0],
}
"""Values in the manifest itself, by their types."""


async def torchsnapshot_folder(opened: Opened) -> Catalogue:
    """List the tensors and values of a folder.

    Raises:
        CheckpointError: the manifest is none of version 0.1.0, or a tensor is quantized or belongs to one rank.
        CorruptError: a file is missing or damaged, or does not have what the manifest says.

    """
    manifest = await _manifest(opened)
    parts, left_out = await _parts(opened, _by_path(manifest["manifest"]))
    model = parts.pop("model", Part())
    places = {name: place for place, name in enumerate(_ordered(manifest["manifest"], "0/model"))}
    model.order.sort(key=lambda name: places.get(name, len(places)))
    found, names = Found(most=opened.sizes[MANIFEST]), unwrapped(model)
    found.pieces.extend(replace(piece, kind="model", name=names[piece.name]) for piece in model.pieces)
    for name, value in model.values.items():
        found.values["model", names[name]] = value_text(value, found.most, f"{opened.path}: {name!r}")
    optimizer = next((parts.pop(name) for name in OPTIMIZERS if name in parts), None)
    if optimizer is not None:
        optimizer.values = _with_groups(optimizer.values)
        shapes = model.shapes
        add_states(found, optimizer, [(names[name], shapes[name]) for name in model.order], opened.path)
    for name, part in parts.items():
        found.pieces.extend(replace(piece, kind="model", name=f"{name}.{piece.name}") for piece in part.pieces)
    facts = {f"{name}.{key}": value for name, part in parts.items() for key, value in part.values.items()}
    ranks = manifest.get("world_size")
    return Catalogue(
        NAME,
        found.pieces,
        opened.sizes,
        found.values,
        found.tied,
        ranks=ranks if type(ranks) is int and ranks > 0 else 1,
        user=facts_of(NAME, facts, (), left_out),
    )


async def _manifest(opened: Opened) -> Mapping[str, Any]:
    """Read the manifest."""
    head = await opened.read(MANIFEST, 0, min(opened.sizes[MANIFEST], 1))
    if head != b"{":
        raise CheckpointError(
            f"{opened.path}/{MANIFEST} is no JSON, as torchsnapshot 0.1.0 writes it: restore it with torchsnapshot, "
            "and save it with bcp.save"
        )
    manifest = await opened.read_json(MANIFEST)
    entries = manifest.get("manifest")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise CorruptError(f"{opened.path}/{MANIFEST} has no table of entries; get it again")
    return dict(manifest)


def _by_path(entries: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the entries of all ranks by the path behind the rank, without containers."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path, entry in entries.items():
        if entry.get("type") not in CONTAINERS:
            found.setdefault(path.partition("/")[2], []).append(entry)
    return found


def _ordered(entries: Mapping[str, Any], path: str, name: str = "") -> Iterator[str]:
    """Yield the names below a container in the order of its keys."""
    for key in dict.fromkeys(map(str, entries.get(path, {}).get("keys") or ())):
        inside = f"{path}/{key.replace('%', '%25').replace('/', '%2F')}"
        if entries.get(inside, {}).get("type") in CONTAINERS:
            yield from _ordered(entries, inside, f"{name}{key}.")
        else:
            yield f"{name}{key}"


async def _parts(opened: Opened, entries: Mapping[str, Sequence[dict[str, Any]]]) -> tuple[dict[str, Part], list[str]]:
    """Return all parts by their names, and the values that ranks do not agree about."""
    parts: dict[str, Part] = {}
    left_out: list[str] = []
    for path, of_ranks in entries.items():
        first, *segments = map(unquote, path.split("/"))
        part, name = parts.setdefault(first, Part()), ".".join(segments)
        words = f"{opened.path}/{MANIFEST}: {path!r:.80}"
        kind = of_ranks[0].get("type")
        if kind == "Tensor" or kind in BOXES:
            part.pieces.extend([piece async for piece in _pieces(opened, name, of_ranks, words)])
            part.order.append(name)
        elif kind == "object" or kind in PRIMITIVES:
            values = [await _value(opened, entry, words) for entry in of_ranks]
            if len({value_text(value, opened.sizes[MANIFEST], "") for value in values}) == 1:
                part.values[name] = values[0]
            else:
                left_out.append(path)
        else:
            raise CheckpointError(f"{words} has type {kind!r:.40}, which torchsnapshot 0.1.0 does not write")
    return parts, left_out


async def _pieces(opened: Opened, name: str, of_ranks: Sequence[dict[str, Any]], words: str) -> AsyncIterator[Piece]:
    """Yield the boxes of a tensor, each once."""
    kind = of_ranks[0]["type"]
    if kind == "Tensor":
        if len(of_ranks) > 1 and not all(entry.get("replicated") is True for entry in of_ranks):
            raise CheckpointError(
                f"{words} is a tensor of its own on each of {len(of_ranks)} ranks, and no part of one: take the "
                "snapshot with replicated=, or of sharded tensors"
            )
        shape = check_shape(of_ranks[0].get("shape"), words)
        yield await _piece(opened, name, of_ranks[0], (shape, (0,) * len(shape), shape), words)
        return
    boxes: dict[tuple[Shape, Shape], dict[str, Any]] = {}
    for entry in of_ranks:
        for box in entry.get(BOXES[kind]) or ():
            place = check_shape(box.get("offsets"), words), check_shape(box.get("sizes"), words)
            boxes.setdefault(place, box["tensor"])
    corners = [tuple(map(sum, zip(*place, strict=True))) for place in boxes]
    shape = tuple(map(max, zip(*corners, strict=True)))
    for (offset, length), entry in boxes.items():
        yield await _piece(opened, name, entry, (shape, offset, length), words)


async def _piece(
    opened: Opened, name: str, entry: Mapping[str, Any], box: tuple[Shape, Shape, Shape], words: str
) -> Piece:
    """Return a box of a tensor: ``box`` has global shape, offset and length."""
    key, serializer = entry.get("location"), entry.get("serializer")
    if not isinstance(key, str):
        raise CorruptError(f"{words} has no location; get the files again")
    size = opened.size(key, MANIFEST)
    start, stop = entry.get("byte_range") or (0, size)
    dtype = check_dtype(str(entry.get("dtype")).removeprefix("torch."), f"{words} has dtype {entry.get('dtype')!r:.40}")
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= size:
        raise CorruptError(
            f"{words} is said to lie in bytes {start} to {stop} of {key}, which has {size}; get it again"
        )
    if serializer == PLAIN:
        wanted = prod(box[2]) * DTYPES[dtype]
        if check_shape(entry.get("shape"), words) != box[2] or wanted != stop - start:
            raise CorruptError(f"{words} is said to have {wanted} bytes, and {stop - start} of {key}; get it again")
        return Piece("", name, dtype, *box, key, start)
    if serializer != "torch_save":
        raise CheckpointError(f"{words} was written as {serializer!r:.40}, which bcp does not read; dequantize it")
    content = await torch_content(opened, key, span=(start, stop))
    stored = content.value
    if not isinstance(stored, Stored) or (stored.dtype, stored.shape) != (dtype, box[2]):
        raise CorruptError(f"{words} is another tensor in {key} than the manifest says; get the files again")
    places = await content.places({("", name): stored})
    return Piece("", name, dtype, *box, key, places["", name])


async def _value(opened: Opened, entry: Mapping[str, Any], words: str) -> Any:
    """Return a value. Raises CorruptError for a damaged one."""
    kind, text = entry["type"], entry.get("serialized_value")
    if kind == "object":
        key = entry.get("location")
        if not isinstance(key, str):
            raise CorruptError(f"{words} has no location; get the files again")
        opened.size(key, MANIFEST)
        return (await torch_content(opened, key)).value
    try:
        return PRIMITIVES[kind](str(text))
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise CorruptError(f"{words} is no {kind}: {text!r:.40}; get the file again") from error


def _with_groups(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of an optimizer with the groups in one list, as torch has them."""
    groups: dict[int, dict[str, Any]] = {}
    others: dict[str, Any] = {}
    for name, value in values.items():
        section, _, inside = name.partition(".")
        number, _, key = inside.partition(".")
        if section != GROUPS or not number.isdecimal():
            others[name] = value
        elif key.startswith("params."):
            groups.setdefault(int(number), {}).setdefault("params", {})[int(key[7:])] = value
        else:
            groups.setdefault(int(number), {})[key] = value
    for group in groups.values():
        members = group.get("params", {})
        group["params"] = [members[place] for place in sorted(members)]
    return {**others, GROUPS: [groups[number] for number in sorted(groups)]}
