"""Safetensors files by reference: the header says where every tensor lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from bcp.errors import CorruptError
from bcp.interop.catalogue import DTYPES, Catalogue, Piece, check_dtype, check_shape
from bcp.interop.reading import Opened, at_once, from_json

__all__ = ["CODES", "LENGTH_BYTES", "MOST_HEADER_BYTES", "NAMES", "SUFFIX", "pieces_of_files", "safetensors_file"]

SUFFIX = ".safetensors"
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""

NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
"""torch's names of the dtypes of safetensors. Those with elements of less than a byte are none of them."""

CODES = {dtype: code for code, dtype in NAMES.items()}
"""Safetensors' names of torch's dtypes. Only readers of 2026 know F8_E4M3FNUZ, F8_E5M2FNUZ and F8_E8M0."""

SHARDING = "DCP_SHARDING_INFO"
"""The key under which torch.distributed.checkpoint notes the boxes of a file."""


async def safetensors_file(opened: Opened, key: str) -> Catalogue:
    """List the tensors of one file. Raises CorruptError for a damaged header, CheckpointError for unknown dtypes."""
    return Catalogue("safetensors", await pieces_of_files(opened, [key]), opened.sizes, is_file=opened.is_file)


async def pieces_of_files(opened: Opened, keys: Sequence[str]) -> list[Piece]:
    """List the tensors of files, two small reads each.

    A tensor lies in several files only if torch.distributed.checkpoint has noted its boxes.

    Raises:
        CorruptError: a header is damaged, or points outside of its file; a tensor is in two files.
        CheckpointError: a dtype is unknown.

    """

    async def look(key: str) -> tuple[list[Piece], bool]:
        header, first = await _header(opened, key)
        return _pieces(header, f"{opened.path}/{key}", key, first, opened.sizes[key])

    found = await at_once(opened.backend, keys, look)
    cut = any(is_cut for _, is_cut in found)
    pieces = [piece for some, _ in found for piece in some]
    if cut:
        return _joined(pieces)
    where: dict[str, str] = {}
    for piece in pieces:
        if where.setdefault(piece.name, piece.key) != piece.key:
            raise CorruptError(
                f"{opened.path} has the tensor {piece.name!r} in {where[piece.name]} and in {piece.key}; pass one of "
                "the files, or add the index of the shards"
            )
    return pieces


async def _header(opened: Opened, key: str) -> tuple[dict[str, Any], int]:
    """Read the header of a file; also return the first byte of the data."""
    where, size = f"{opened.path}/{key}", opened.sizes[key]
    length = int.from_bytes(await opened.read(key, 0, min(LENGTH_BYTES, size)), "little")
    if size < LENGTH_BYTES or not 0 < length <= min(size - LENGTH_BYTES, MOST_HEADER_BYTES):
        raise CorruptError(
            f"{where} has {size} bytes, and its header is said to have {length}: it is truncated, or no safetensors "
            "file; get it again"
        )
    header = from_json(await opened.read(key, LENGTH_BYTES, length), f"the header of {where}")
    if not isinstance(header, dict):
        raise CorruptError(f"the header of {where} is a {type(header).__name__} and no object; get the file again")
    return header, LENGTH_BYTES + length


def _pieces(header: Mapping[str, Any], where: str, key: str, first: int, size: int) -> tuple[list[Piece], bool]:
    """Return the tensors of a header, and whether they may be boxes of larger ones.

    ``first`` is the first byte of the data, ``size`` the size of the file.

    Raises:
        CorruptError: an entry is damaged, or the tensors do not fill the file from ``first`` to its end.
        CheckpointError: a dtype is unknown.

    """
    pieces, ends = [], [(0, 0)]
    boxes = _sharding(header.get("__metadata__"), where)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        words = f"{where}: tensor {name!r}"
        dtype, shape, start, stop = _entry(entry, words)
        ends.append((start, stop))
        if stop - start != prod(shape) * DTYPES[dtype]:
            raise CorruptError(
                f"{words} has {stop - start} bytes, and {dtype}{list(shape)} has {prod(shape) * DTYPES[dtype]}; get "
                "the file again"
            )
        offset = boxes.get(name, (0,) * len(shape))
        if len(offset) != len(shape):
            raise CorruptError(f"{words} of shape {list(shape)} is said to lie at {list(offset)}; get the file again")
        whole = tuple(low + count for low, count in zip(offset, shape, strict=True))
        pieces.append(Piece("model", name, dtype, whole, offset, shape, key, first + start))
    ends.sort()
    if any(stop != start for (_, stop), (start, _) in pairwise(ends)) or ends[-1][1] != size - first:
        raise CorruptError(
            f"{where}: its tensors do not follow each other from byte {first} to byte {size}, the end of the file: it "
            "is truncated, or its header is wrong; get it again"
        )
    return pieces, bool(boxes)


def _entry(entry: object, words: str) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape and the byte range of an entry."""
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise CorruptError(f"{words} has no dtype, shape and data_offsets; get the file again")
    dtype = check_dtype(NAMES.get(str(entry["dtype"])), f"{words} has dtype {str(entry['dtype'])[:40]!r}")
    shape, places = check_shape(entry["shape"], words), entry["data_offsets"]
    sound = isinstance(places, list) and [*map(type, places)] == [int, int]
    if not sound or not 0 <= places[0] <= places[1]:
        raise CorruptError(f"{words} has data_offsets {str(places)[:80]}; get the file again")
    return dtype, shape, places[0], places[1]


def _sharding(metadata: object, where: str) -> dict[str, tuple[int, ...]]:
    """Return the first corners of the boxes of a file, by name; none for a file of whole tensors."""
    text = metadata.get(SHARDING) if isinstance(metadata, dict) else None
    if text is None:
        return {}
    boxes = from_json(str(text).encode(), f"{SHARDING} of {where}")
    if not isinstance(boxes, dict) or not all(isinstance(box, dict) for box in boxes.values()):
        raise CorruptError(f"{SHARDING} of {where} names no boxes; get the file again")
    return {
        name: check_shape(box.get("saved_offsets"), f"{SHARDING} of {where}: tensor {name!r}")
        for name, box in boxes.items()
    }


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Give all boxes of a tensor its shape: the largest end in each dimension."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        known = shapes.get(piece.name, piece.shape)
        shapes[piece.name] = tuple(map(max, known, piece.shape)) if len(known) == len(piece.shape) else known
    return [
        Piece(
            piece.kind,
            piece.name,
            piece.dtype,
            shapes[piece.name],
            piece.offset,
            piece.length,
            piece.key,
            piece.start,
        )
        for piece in dict.fromkeys(pieces)
    ]
