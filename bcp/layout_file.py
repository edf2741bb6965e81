"""The layout as bytes: the part of ``metadata.arrow`` that stays the same between saves.

Columns that follow from others are not stored: which tensor a piece belongs to follows from the counts, where a segment
starts inside its piece from the lengths before it. ``docs/format.md`` specifies every column.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from bcp.container import (
    Buffer,
    counted,
    digest,
    encode_table,
    integers,
    list_lengths,
    ragged,
    ragged_column,
    read_tables,
    schema,
    translated,
    values,
)
from bcp.errors import InputError
from bcp.plan.check import check_layout
from bcp.plan.layout import Layout
from bcp.plan.shards import TensorTable

__all__ = ["LAYOUT_TABLES", "decode_layout", "encode_layout", "layout_digest", "layout_from"]

MOST_DIMENSIONS = 64

INT, TEXT, LIST = pa.int64(), pa.string(), pa.list_(pa.int64())
WORLD = schema("layout", world_size=INT, block_bytes=INT)
TENSORS = schema(
    "tensors",
    kind=INT,
    fqn=TEXT,
    dtype=TEXT,
    itemsize=INT,
    shape=LIST,
    stride=LIST,
    device=TEXT,
    requires_grad=pa.bool_(),
    tied_to=TEXT,
    pieces=INT,
)
PIECES = schema("pieces", offset=LIST, length=LIST, segments=INT)
SEGMENTS = schema("segments", length=INT, file=INT, offset=INT)
FILES = schema("files", kind=INT, rank=INT, nbytes=INT)
OBJECTS = schema("objects", kind=TEXT, path=TEXT, rank=INT)
EXTRAS = schema("extras", kind=INT, rank=INT)
LAYOUT_TABLES = (WORLD, TENSORS, PIECES, SEGMENTS, FILES, OBJECTS, EXTRAS)


def encode_layout(layout: Layout) -> bytes:
    """Encode a layout; equal layouts give equal bytes.

    Raises:
        InputError: no reader would accept this layout.

    """
    try:
        check_layout(layout)
    except ValueError as error:
        raise InputError(f"this layout cannot be written, please report it: {error}") from error
    tensors, ndim = layout.tensors, layout.tensors.ndim
    pieces = np.bincount(layout.piece_tensor, minlength=len(tensors))
    segments = np.bincount(layout.segment_piece, minlength=len(layout.piece_tensor))
    columns = (
        ([layout.world_size], [layout.block_bytes]),
        (
            tensors.kind,
            tensors.fqn,
            tensors.dtype,
            tensors.itemsize,
            ragged(tensors.shape, ndim),
            ragged(tensors.stride, ndim),
            tensors.device,
            tensors.requires_grad.astype(np.bool_),
            tensors.tied_to,
            pieces,
        ),
        (
            ragged(layout.offset, ndim[layout.piece_tensor]),
            ragged(layout.length, ndim[layout.piece_tensor]),
            segments,
        ),
        (layout.segment_length, layout.segment_file, layout.segment_offset),
        (layout.file_kind, layout.file_rank, layout.file_nbytes),
        ([kind for kind, _ in layout.objects], [path for _, path in layout.objects], layout.object_rank),
        (layout.extra_kind, layout.extra_rank),
    )
    return b"".join(encode_table(of, rows) for of, rows in zip(LAYOUT_TABLES, columns, strict=True))


def decode_layout(data: Buffer, where: str = "layout") -> Layout:
    """Decode and check what :func:`encode_layout` made.

    Raises:
        CorruptError: these bytes are not a sound layout; ``where`` names them.

    """
    with translated(where):
        return layout_from(read_tables(data, LAYOUT_TABLES))


def layout_digest(data: bytes) -> bytes:
    """Return the xxh3-128 of an encoded layout: two saves with equal digests have the same layout."""
    return digest(data)


def layout_from(tables: Sequence[pa.Table]) -> Layout:
    """Put the decoded :data:`LAYOUT_TABLES` together, and check them; ValueError where they do not fit."""
    world, tensors, pieces, segments, files, objects, extras = tables
    if len(world) != 1:
        raise ValueError(f"table 'layout' has {len(world)} rows instead of 1")
    tensor_table = _tensors(tensors)
    piece_tensor = counted(integers(tensors, "pieces"), len(pieces), "pieces")
    segment_piece = counted(integers(pieces, "segments"), len(segments), "segments")
    ndim, width = tensor_table.ndim[piece_tensor], tensor_table.shape.shape[1]
    length = integers(segments, "length")
    before = np.cumsum(length) - length
    layout = Layout(
        world_size=int(integers(world, "world_size")[0]),
        block_bytes=int(integers(world, "block_bytes")[0]),
        tensors=tensor_table,
        piece_tensor=piece_tensor,
        offset=ragged_column(pieces, "offset", ndim, width, 0),
        length=ragged_column(pieces, "length", ndim, width, 1),
        segment_piece=segment_piece,
        segment_start=before - before[np.searchsorted(segment_piece, segment_piece)],
        segment_length=length,
        segment_file=integers(segments, "file"),
        segment_offset=integers(segments, "offset"),
        file_kind=integers(files, "kind"),
        file_rank=integers(files, "rank"),
        file_nbytes=integers(files, "nbytes"),
        objects=list(zip(values(objects, "kind"), values(objects, "path"), strict=True)),
        object_rank=integers(objects, "rank"),
        extra_kind=integers(extras, "kind"),
        extra_rank=integers(extras, "rank"),
    )
    check_layout(layout)
    return layout


def _tensors(table: pa.Table) -> TensorTable:
    """Decode the table of tensors."""
    ndim = list_lengths(table, "shape")
    width = int(ndim.max(initial=0))
    if width > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {width} dimensions")
    return TensorTable(
        kind=integers(table, "kind"),
        fqn=values(table, "fqn"),
        dtype=values(table, "dtype"),
        itemsize=integers(table, "itemsize"),
        ndim=ndim,
        shape=ragged_column(table, "shape", ndim, width, 1),
        stride=ragged_column(table, "stride", ndim, width, 0),
        device=values(table, "device"),
        requires_grad=np.array(values(table, "requires_grad"), dtype=np.int64),
        tied_to=values(table, "tied_to"),
    )
