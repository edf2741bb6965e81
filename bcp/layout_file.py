"""The layout as bytes: the part of ``metadata.arrow`` that stays the same between saves.

Columns that follow from others are not stored: which tensor a piece belongs to follows from the counts, where a segment
begins on the line of all pieces from the lengths before it. Others are stored as differences, because these compress.
``docs/format.md`` specifies every column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa

from bcp.container import (
    GRID,
    INT,
    WORD,
    Buffer,
    check_counts,
    counted,
    digest,
    encode_table,
    grid,
    integers,
    narrow,
    read_tables,
    schema,
    steps,
    summed,
    translated,
    values,
)
from bcp.errors import InputError
from bcp.plan.check import LARGEST, check_layout
from bcp.plan.columns import Ints, Whole
from bcp.plan.layout import Layout
from bcp.plan.shards import TensorTable

__all__ = ["LAYOUT_TABLES", "decode_layout", "encode_layout", "layout_digest"]

TEXT = pa.string()
WORLD = schema("layout", world_size=INT, block_bytes=INT)
TENSORS = schema(
    "tensors",
    kind=INT,
    fqn=TEXT,
    dtype=WORD,
    itemsize=INT,
    ndim=INT,
    shape=GRID,
    stride=GRID,
    device=WORD,
    requires_grad=INT,
    tied_to=WORD,
    leader=INT,
    plane=INT,
    pieces=INT,
)
PIECES = schema("pieces", offset=GRID, length=GRID, file=INT, segments=INT)
SEGMENTS = schema("segments", length=INT, file=INT, at=INT)
FILES = schema("files", kind=INT, rank=INT, nbytes=INT, planes=GRID)
OBJECTS = schema("objects", kind=WORD, path=TEXT, rank=INT)
EXTRAS = schema("extras", kind=INT, rank=INT)
LAYOUT_TABLES = (WORLD, TENSORS, PIECES, SEGMENTS, FILES, OBJECTS, EXTRAS)


def encode_layout(layout: Layout) -> bytes:
    """Encode a layout; equal layouts give equal bytes.

    Raises:
        InputError: no reader would accept this layout, or it would read another one.

    """
    try:
        segments = np.diff(np.searchsorted(layout.segment_line, layout.piece_line))
        _check_derived(layout)
        check_layout(layout, segments)
    except ValueError as error:
        raise InputError(f"this layout cannot be written, please report it: {error}") from error
    columns = _columns(layout, segments)
    return b"".join(encode_table(of, rows) for of, rows in zip(LAYOUT_TABLES, columns, strict=True))


def decode_layout(data: Buffer, where: str = "layout") -> Layout:
    """Decode and check what :func:`encode_layout` made. Its arrays are read-only: a layout may be shared.

    Raises:
        CorruptError: these bytes are not a sound layout; ``where`` names them.

    """
    with translated(where):
        layout, segments = _layout(read_tables(data, LAYOUT_TABLES))
        check_layout(layout, segments)
    for owner in (layout, layout.tensors):
        for column in fields(owner):
            found = getattr(owner, column.name)
            if isinstance(found, np.ndarray):
                found.flags.writeable = False
    return layout


def layout_digest(data: Buffer) -> bytes:
    """Return the xxh3-128 of an encoded layout: two saves with equal digests have the same layout."""
    return digest(data)


def _columns(layout: Layout, segments: Ints) -> tuple[tuple[Any, ...], ...]:
    """Return the columns of :data:`LAYOUT_TABLES`."""
    tensors = layout.tensors
    first = layout.segment_file[np.cumsum(segments) - segments].astype(np.int64)
    return (
        ([layout.world_size], [layout.block_bytes]),
        (
            tensors.kind,
            tensors.fqn,
            tensors.dtype,
            tensors.itemsize,
            tensors.ndim,
            tensors.shape,
            tensors.stride,
            tensors.device,
            tensors.requires_grad,
            tensors.tied_to,
            steps(layout.leader),
            layout.plane,
            np.bincount(layout.piece_tensor, minlength=len(tensors)),
        ),
        (layout.offset, layout.length, steps(first), segments),
        # The files of a piece are those of ranks at equal distances: counted from its first file, most pieces look
        # alike. 300,000 segments take 2 KB, in place of 45 KB, and no running sum over all of them (0.7 ms) undoes it.
        (np.diff(layout.segment_line), layout.segment_file - np.repeat(first, segments), layout.segment_at),
        (layout.file_kind, steps(layout.file_rank), layout.file_nbytes, layout.file_planes),
        ([kind for kind, _ in layout.objects], [path for _, path in layout.objects], layout.object_rank),
        (layout.extra_kind, steps(layout.extra_rank)),
    )


def _check_derived(layout: Layout) -> None:
    """Check that a reader will find the columns that are not stored as they are here; ValueError where not."""
    line, segments = layout.segment_line, len(layout.segment_at)
    if len(line) != segments + 1 or len(layout.segment_file) != segments or line[0] != 0:
        raise ValueError("segments that do not begin at 0, or columns of different lengths")
    if line[-1] != layout.piece_line[-1]:
        raise ValueError("segments that do not end where the pieces do")
    if (np.diff(layout.piece_tensor) < 0).any():
        raise ValueError("pieces are not sorted")
    if layout.piece_tensor.max(initial=-1) >= len(layout.tensors):
        raise ValueError("piece of no tensor")


def _layout(tables: Sequence[pa.RecordBatch]) -> tuple[Layout, Ints]:
    """Put the decoded :data:`LAYOUT_TABLES` together; also return how many segments each piece has."""
    world, tensors, pieces, segments, files, objects, extras = tables
    if len(world) != 1:
        raise ValueError(f"table 'layout' has {len(world)} rows instead of 1")
    counts = integers(pieces, "segments")
    check_counts(counts, len(segments), "segments")
    length = narrow(segments, "length")
    # They are added up before they are looked at one by one.
    if int(length.max(initial=0)) * len(length) >= LARGEST and float(length.sum(dtype=np.float64)) >= LARGEST:
        raise ValueError("segments with an impossible total length")
    layout = Layout(
        world_size=int(integers(world, "world_size")[0]),
        block_bytes=int(integers(world, "block_bytes")[0]),
        tensors=_tensors(tensors),
        leader=summed(tensors, "leader"),
        plane=integers(tensors, "plane"),
        piece_tensor=counted(integers(tensors, "pieces"), len(pieces), "pieces"),
        offset=grid(pieces, "offset"),
        length=grid(pieces, "length"),
        segment_line=_line(length),
        segment_file=_files(narrow(segments, "file"), counts, summed(pieces, "file")),
        segment_at=narrow(segments, "at"),
        file_kind=integers(files, "kind"),
        file_rank=summed(files, "rank"),
        file_nbytes=integers(files, "nbytes"),
        file_planes=grid(files, "planes"),
        objects=tuple(zip(values(objects, "kind"), values(objects, "path"), strict=True)),
        object_rank=integers(objects, "rank"),
        extra_kind=integers(extras, "kind"),
        extra_rank=summed(extras, "rank"),
    )
    return layout, counts


def _line(length: Whole) -> Ints:
    """Return where segments of these lengths begin, and where the last one ends."""
    line = np.empty(len(length) + 1, dtype=np.int64)
    line[0], line[1:] = 0, length  # numpy widens and adds up in one go at half the speed of both by themselves
    return np.cumsum(line, out=line)


def _files(offset: Whole, counts: Ints, first: Ints) -> Whole:
    """Return the file of every segment: ``offset`` from the ``first`` one of its piece.

    As int32: segments are by far the most rows, and what takes time is the memory they come into.
    """
    low, high = int(first.min(initial=0)), int(first.max(initial=0))
    low, high = low + int(offset.min(initial=0)), high + int(offset.max(initial=0))
    if not -(1 << 31) <= low <= high < 1 << 31:
        raise ValueError(f"segments in files {low} to {high}")
    file = np.repeat(first.astype(np.int32), counts)
    return np.add(file, offset, out=file, casting="same_kind" if offset.itemsize <= file.itemsize else "unsafe")


def _tensors(table: pa.RecordBatch) -> TensorTable:
    """Decode the table of tensors."""
    return TensorTable(
        kind=integers(table, "kind"),
        fqn=tuple(values(table, "fqn")),
        dtype=tuple(values(table, "dtype")),
        itemsize=integers(table, "itemsize"),
        ndim=integers(table, "ndim"),
        shape=grid(table, "shape"),
        stride=grid(table, "stride"),
        device=tuple(values(table, "device")),
        requires_grad=integers(table, "requires_grad"),
        tied_to=tuple(values(table, "tied_to")),
    )
