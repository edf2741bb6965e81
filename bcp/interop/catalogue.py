"""The catalogue of a foreign checkpoint: its tensors as pieces of files, and the table of contents made of them.

A reader of a format lists pieces. This module compares the pieces with tensors and files, and reads no tensor. Files of
other libraries have no checksums, and their elements lie at any byte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from bcp.errors import CheckpointError, CorruptError
from bcp.format.container import digest
from bcp.format.foreign_files import ForeignFiles
from bcp.format.metadata import Commit, encode_foreign, encode_layout
from bcp.plan.columns import Ints, matrix, weigh
from bcp.plan.layout import ALIGNMENT, LARGEST, Layout
from bcp.plan.shards import KINDS, Segments, TensorMeta, TensorTable
from bcp.plan.strided import row_major

__all__ = ["DTYPES", "Catalogue", "Piece", "check_dtype", "check_shape"]

DTYPES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "complex32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of an element by dtype. Elements of less than a byte are left out."""

PART_BYTES = 32 << 20
MOST_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor whose row-major elements lie side by side in a file; or a run of the elements of a box.

    Attributes:
        kind: ``"model"`` or ``"optimizer"``.
        name: name of the tensor.
        dtype: a key of :data:`DTYPES`.
        shape: global shape of the tensor.
        offset: first corner of the box.
        length: extent of the box.
        key: the file, relative to the folder.
        start: byte of the file at which the first element begins.
        run: first element of the box in this piece, and the one behind the last; None for all. Runs of one box may lie
            in several files.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    length: tuple[int, ...]
    key: str
    start: int
    run: tuple[int, int] | None = None

    @classmethod
    def whole(cls, kind: str, name: str, dtype: str, shape: tuple[int, ...], key: str, start: int) -> Piece:
        """Return a whole tensor as one piece."""
        return cls(kind, name, dtype, shape, (0,) * len(shape), shape, key, start)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype]

    @property
    def ends(self) -> tuple[int, int]:
        """First element of the box in this piece, and the one behind the last."""
        return self.run or (0, prod(self.length))

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        first, stop = self.ends
        return (stop - first) * self.itemsize


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What a foreign checkpoint has, and where.

    Attributes:
        framework: name of the format.
        pieces: the tensors, in any order.
        sizes: bytes of each file, by storage.
        values: JSON text of each other leaf, by (kind, path).
        tied: (kind, name) of each tensor without data of its own, and the name of the tensor with the data.
        ranks: how many ranks saved it.
        is_file: whether the checkpoint is one file, and not a folder.
        user: facts that are no states, as JSON data: the user metadata of the checkpoint.
    """

    framework: str
    pieces: Sequence[Piece]
    sizes: Mapping[str, int]
    values: Mapping[tuple[str, str], str] = field(default_factory=dict)
    tied: Mapping[tuple[str, str], str] = field(default_factory=dict)
    ranks: int = 1
    is_file: bool = False
    user: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[tuple[str, str]]:
        """(kind, name) of all tensors."""
        return [*dict.fromkeys((piece.kind, piece.name) for piece in self.pieces), *self.tied]

    def encode(self, where: str) -> bytes:
        """Return the table of contents, as :func:`bcp.format.metadata.decode_metadata` takes it.

        ``where`` names the checkpoint in messages.

        Raises:
            CorruptError: a piece lies outside of its file or tensor, or the pieces of a tensor do not tile it.

        """
        for piece in self.pieces:
            _check_piece(piece, self.sizes, where)
        layout, files = _built(self, where)
        data = encode_layout(layout)
        commit = Commit(
            operation=digest(data + repr(files.key).encode()).hex()[:16],
            created="",
            framework=self.framework,
            codecs=(),
            part_bytes=PART_BYTES,
            version="",
            receipts=b"",
            user=self.user,
        )
        return encode_foreign(data, commit, files)


def check_dtype(dtype: str | None, words: str) -> str:
    """Return a known dtype. Raises CheckpointError for an unknown one; its text begins with ``words``."""
    if dtype is None or dtype not in DTYPES:
        raise CheckpointError(
            f"{words}, which bcp does not read; it reads {', '.join(DTYPES)}: convert the tensor with the library that "
            "saved it"
        )
    return dtype


def check_shape(shape: object, words: str) -> tuple[int, ...]:
    """Return a possible shape. Raises CorruptError for another one; its text begins with ``words``."""
    sizes = tuple(shape) if isinstance(shape, list | tuple) else (-1,)
    if len(sizes) > MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < LARGEST for size in sizes):
        raise CorruptError(f"{words} has shape {str(shape)[:80]}, which no tensor has; get the file again")
    return sizes


def _check_piece(piece: Piece, sizes: Mapping[str, int], where: str) -> None:
    """Check the place of a piece in its file and in its tensor."""
    if prod(piece.shape) * piece.itemsize >= LARGEST:
        raise CorruptError(f"{where}: {piece.kind} tensor {piece.name!r} has the impossible shape {list(piece.shape)}")
    inside = len(piece.shape) == len(piece.offset) == len(piece.length) and all(
        first >= 0 and count >= 0 and first + count <= size
        for first, count, size in zip(piece.offset, piece.length, piece.shape, strict=True)
    )
    if not inside:
        raise CorruptError(
            f"{where}: a piece of {piece.kind} tensor {piece.name!r} at {list(piece.offset)} of shape "
            f"{list(piece.length)} lies outside of the tensor's shape {list(piece.shape)}; get the files again"
        )
    first, last = piece.ends
    if not 0 <= first <= last <= prod(piece.length):
        raise CorruptError(
            f"{where}: {piece.kind} tensor {piece.name!r} is said to have elements {first} to {last} of "
            f"{prod(piece.length)} in {piece.key}; get the files again"
        )
    stop, size = piece.start + piece.nbytes, sizes.get(piece.key, 0)
    if piece.start < 0 or (stop > size and 0 not in piece.length):
        raise CorruptError(
            f"{where}: {piece.kind} tensor {piece.name!r} is said to lie in bytes {piece.start} to {stop} of "
            f"{piece.key}, which has {size} bytes; get the file again"
        )


def _built(catalogue: Catalogue, where: str) -> tuple[Layout, ForeignFiles]:
    """Make the layout: a file for each kind, and each remainder of the places of elements."""
    table = _tensors(catalogue, where)
    row_of = {name: row for row, name in enumerate(zip(map(KINDS.__getitem__, table.kind), table.fqn, strict=True))}
    pieces = sorted(
        (piece for piece in catalogue.pieces if piece.nbytes),
        key=lambda piece: (row_of[piece.kind, piece.name], piece.offset, piece.ends),
    )
    boxes, number = _boxes(pieces, where)
    grain = int(table.itemsize.max(initial=1))
    files = sorted({(KINDS.index(piece.kind), piece.key, piece.start % grain) for piece in pieces})
    file_of = {file: row for row, file in enumerate(files)}
    width = table.shape.shape[1]
    base = _ints([rest for _, _, rest in files])
    sizes = _ints([catalogue.sizes[key] for _, key, _ in files])
    offset, length = (matrix([getattr(piece, name) for piece in boxes], width, fill) for name, fill in _BOX)
    owner = _ints([row_of[piece.kind, piece.name] for piece in boxes])
    _check_cover(table, owner, offset, length, where)
    rows = _ints([file_of[KINDS.index(piece.kind), piece.key, piece.start % grain] for piece in pieces])
    at = _ints([piece.start // grain * (grain // piece.itemsize) for piece in pieces])
    elements = _ints([piece.nbytes // piece.itemsize for piece in pieces])
    objects = tuple(sorted(catalogue.values))
    nothing = _ints([])
    layout = Layout(
        world_size=max(len(files), 1),
        block_bytes=ALIGNMENT,
        tensors=table,
        leader=np.arange(len(table)),
        plane=np.log2(table.itemsize).astype(np.int64),  # one plane an item size, from the first byte on
        box_tensor=owner,
        offset=offset,
        length=length,
        segments=Segments.of(number, elements, rows, at),
        file_kind=_ints([kind for kind, _, _ in files]),
        file_rank=np.arange(len(files)),
        file_nbytes=sizes - base,
        file_planes=np.zeros((len(files), 5), np.int64),
        objects=objects,
        object_rank=np.zeros(len(objects), np.int64),
        extra_kind=nothing,
        extra_rank=nothing,
    )
    keys = [key for _, key, _ in files]
    return layout, ForeignFiles(keys, base, sizes, catalogue.ranks, catalogue.is_file, dict(catalogue.values))


_BOX = (("offset", 0), ("length", 1))


def _boxes(pieces: Sequence[Piece], where: str) -> tuple[list[Piece], Ints]:
    """Return the first piece of each box, and int64[b]: how many pieces it has. ``pieces`` are sorted.

    Raises CorruptError for a box with runs that leave an element out, or have it twice.
    """
    boxes: list[Piece] = []
    number: list[int] = []
    stop = 0
    for piece in pieces:
        first, last = piece.ends
        if boxes and piece.run is not None and _box(piece) == _box(boxes[-1]):
            _check_run(piece, stop, first, where)
            number[-1] += 1
        else:
            if boxes:
                _check_run(boxes[-1], stop, prod(boxes[-1].length), where)
            _check_run(piece, 0, first, where)
            boxes.append(piece)
            number.append(1)
        stop = last
    if boxes:
        _check_run(boxes[-1], stop, prod(boxes[-1].length), where)
    return boxes, _ints(number)


def _box(piece: Piece) -> tuple[object, ...]:
    return piece.kind, piece.name, piece.offset, piece.length


def _check_run(piece: Piece, stop: int, first: int, where: str) -> None:
    """Compare the end of a run with the begin of the next one."""
    if stop != first:
        how = "no file" if stop < first else "two files"
        raise CorruptError(
            f"{where}: elements {min(stop, first)} to {max(stop, first)} of {piece.kind} tensor {piece.name!r} of "
            f"shape {list(piece.shape)} are in {how}; files are missing, or are of another checkpoint"
        )


def _ints(numbers: Sequence[int]) -> Ints:
    return np.array(numbers, np.int64)


def _tensors(catalogue: Catalogue, where: str) -> TensorTable:
    """Return all tensors, sorted; the pieces of each agree about it."""
    metas: dict[tuple[str, str], TensorMeta] = {}
    for piece in catalogue.pieces:
        strides = tuple(min(stride, LARGEST) for stride in row_major(piece.shape))
        meta = TensorMeta(piece.kind, piece.name, piece.dtype, piece.itemsize, piece.shape, strides)
        known = metas.setdefault((piece.kind, piece.name), meta)
        if known != meta:
            raise CorruptError(
                f"{where}: {piece.kind} tensor {piece.name!r} is {known.dtype}{list(known.shape)} in one place, and "
                f"{meta.dtype}{list(meta.shape)} in another; get the files again"
            )
    for (kind, name), stored in catalogue.tied.items():
        meta = metas[kind, stored]
        metas[kind, name] = TensorMeta(kind, name, meta.dtype, meta.itemsize, meta.shape, meta.stride, tied_to=stored)
    return TensorTable.build([metas[name] for name in sorted(metas, key=lambda name: (KINDS.index(name[0]), name[1]))])


def _check_cover(table: TensorTable, owner: Ints, offset: Ints, length: Ints, where: str) -> None:
    """Check the cover of each tensor by its pieces: no gap, no overlap."""
    covered = np.zeros(len(table), np.uint64)
    np.add.at(covered, owner, weigh(offset, offset + length))
    wrong = (covered != weigh(0 * table.shape, table.shape)) & ~table.tied & (table.numel > 0)
    if wrong.any():
        row = int(wrong.argmax())
        boxes = defaultdict(list)
        for tensor, first, count in zip(owner.tolist(), offset.tolist(), length.tolist(), strict=True):
            boxes[tensor].append(f"{count} at {first}")
        raise CorruptError(
            f"{where}: the {len(boxes[row])} pieces of {KINDS[int(table.kind[row])]} tensor {table.fqn[row]!r} of "
            f"shape {table[row].shape} overlap, or leave a part of it out: {'; '.join(boxes[row][:4])}; files are "
            "missing, or are of another checkpoint"
        )
