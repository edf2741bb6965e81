"""The layout as bytes: the part of ``metadata.arrow`` that stays the same between saves.

Columns that follow from others are not stored. Some are stored as differences, because these compress.
``docs/format.md`` specifies every column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pyarrow as pa

from bcp.errors import InputError
from bcp.format.container import (
    DIGEST_BYTES,
    GRID,
    INT,
    WORD,
    Buffer,
    check_counts,
    counted,
    encode_tables,
    grid,
    integers,
    read_tables,
    schema,
    steps,
    summed,
    translated,
    values,
)
from bcp.plan.columns import begins
from bcp.plan.layout import LARGEST, Layout, check_layout, check_segments
from bcp.plan.shards import TENSOR_COLUMNS, Segments, TensorTable

__all__ = ["LAYOUT_TABLES", "decode_layout", "encode_layout"]

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
BOXES = schema("pieces", offset=GRID, length=GRID, file=INT, pattern=INT)
PATTERNS = schema("patterns", segments=INT)
SEGMENTS = schema("segments", length=INT, file=INT, at=INT)
FILES = schema("files", kind=INT, rank=INT, nbytes=INT, planes=GRID)
OBJECTS = schema("objects", kind=WORD, path=TEXT, rank=INT)
EXTRAS = schema("extras", kind=INT, rank=INT)
LAYOUT_TABLES = (WORLD, TENSORS, BOXES, PATTERNS, SEGMENTS, FILES, OBJECTS, EXTRAS)


def encode_layout(layout: Layout) -> bytes:
    """Encode a layout; equal layouts give equal bytes.

    Raises InputError if no reader would accept this layout, or if a reader would read another one.
    """
    try:
        _check_derived(layout)
        folded = replace(layout, segments=layout.segments.folded())
        check_layout(folded)
        check_segments(folded)
    except ValueError as error:
        raise InputError(f"this layout cannot be written, please report it: {error}") from error
    digests = DIGEST_BYTES * layout.world_size  # of the receipts, in the same file
    return encode_tables(list(zip(LAYOUT_TABLES, _columns(folded), strict=True)), beside=digests)


def decode_layout(data: Buffer, where: str = "layout") -> Layout:
    """Decode and check an encoded layout. Its arrays are read-only: a layout may be shared.

    Raises CorruptError, which names ``where``, if these bytes are not a sound layout.
    """
    with translated(where):
        layout = _layout(read_tables(data, LAYOUT_TABLES))
        check_layout(layout)
    for owner in (layout, layout.tensors, layout.segments):
        for column in fields(owner):
            array = getattr(owner, column.name)
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
    return layout


def _columns(layout: Layout) -> tuple[tuple[Any, ...], ...]:
    """Return the columns of :data:`LAYOUT_TABLES`."""
    tensors, segments = layout.tensors, layout.segments
    return (
        ([layout.world_size], [layout.block_bytes]),
        (
            *(getattr(tensors, name) for name in TENSORS.names if name in TENSOR_COLUMNS),
            steps(layout.leader),
            layout.plane,
            np.bincount(layout.box_tensor, minlength=len(tensors)),
        ),
        (layout.offset, layout.length, steps(segments.file), segments.pattern),
        (np.diff(segments.begin),),
        (segments.length, segments.step, segments.at),
        (layout.file_kind, steps(layout.file_rank), layout.file_nbytes, layout.file_planes),
        ([kind for kind, _ in layout.objects], [path for _, path in layout.objects], layout.object_rank),
        (layout.extra_kind, steps(layout.extra_rank)),
    )


def _check_derived(layout: Layout) -> None:
    """Check that a reader will find the columns that are not stored as they are here; ValueError where not."""
    segments = layout.segments
    rows = len(segments)
    if len(segments.line) != rows + 1 or len(segments.step) != rows or segments.line[0] != 0:
        raise ValueError("segments that do not begin at 0, or columns of different lengths")
    if segments.begin[0] != 0 or segments.begin[-1] != rows or (np.diff(segments.begin) < 1).any():
        raise ValueError("pattern without segments, or segments without pattern")
    if (np.diff(layout.box_tensor) < 0).any():
        raise ValueError("boxes are not sorted")
    if layout.box_tensor.max(initial=-1) >= len(layout.tensors):
        raise ValueError("box of no tensor")


def _layout(tables: Sequence[pa.RecordBatch]) -> Layout:
    """Put the decoded :data:`LAYOUT_TABLES` together."""
    world, tensors, boxes, patterns, segments, files, objects, extras = tables
    if len(world) != 1:
        raise ValueError(f"table 'layout' has {len(world)} rows instead of 1")
    return Layout(
        world_size=int(integers(world, "world_size")[0]),
        block_bytes=int(integers(world, "block_bytes")[0]),
        tensors=TensorTable(**{name: _column(tensors, name) for name in TENSOR_COLUMNS}),
        leader=summed(tensors, "leader"),
        plane=integers(tensors, "plane"),
        box_tensor=counted(integers(tensors, "pieces"), len(boxes), "pieces"),
        offset=grid(boxes, "offset"),
        length=grid(boxes, "length"),
        segments=_segments(boxes, patterns, segments),
        file_kind=integers(files, "kind"),
        file_rank=summed(files, "rank"),
        file_nbytes=integers(files, "nbytes"),
        file_planes=grid(files, "planes"),
        objects=tuple(zip(values(objects, "kind"), values(objects, "path"), strict=True)),
        object_rank=integers(objects, "rank"),
        extra_kind=integers(extras, "kind"),
        extra_rank=summed(extras, "rank"),
    )


def _segments(boxes: pa.RecordBatch, patterns: pa.RecordBatch, segments: pa.RecordBatch) -> Segments:
    """Put the segments together."""
    number, length = integers(patterns, "segments"), integers(segments, "length")
    check_counts(number, len(segments), "segments")
    if float(length.sum(dtype=np.float64)) >= LARGEST:  # they are added up before they are looked at one by one
        raise ValueError("segments with an impossible total length")
    file, step = summed(boxes, "file"), integers(segments, "file")
    if max(int(np.abs(file).max(initial=0)), int(np.abs(step).max(initial=0))) >= LARGEST:
        raise ValueError("segments in impossible files")
    pattern, element = integers(boxes, "pattern"), integers(segments, "at")
    return Segments(file, pattern, begins(number), begins(length), step, element)


def _column(table: pa.RecordBatch, name: str) -> Any:
    """Decode one column of the table of tensors as its schema says."""
    kind = TENSORS.field(name).type
    if kind == INT:
        return integers(table, name)
    return grid(table, name) if kind == GRID else tuple(values(table, name))
