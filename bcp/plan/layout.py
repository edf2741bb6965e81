"""Where every element of every tensor lies in a checkpoint: what stays the same between saves of one layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bcp.plan.shards import Ints, TensorTable

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The paper's TensorShardToBasicByteMap (sec. 3.2), columnar.

    A tensor consists of pieces: boxes that tile its global shape. A piece consists of segments: runs of its
    row-major elements, each contiguous in one data file. Rows are sorted: pieces by (tensor, offset), segments by
    (piece, start). A tensor that is ``tied_to`` another has no pieces of its own.

    Attributes:
        world_size: how many ranks saved.
        block_bytes: data files are checksummed and read in blocks of this many bytes of their data section.
        tensors: n tensors, sorted by (kind, fqn).
        piece_tensor: int64[p], row in ``tensors``; not decreasing.
        offset: int64[p, D], first corner of each piece.
        length: int64[p, D], extent of each piece.
        segment_piece: int64[s], row of the piece; not decreasing.
        segment_start: int64[s], first flat position inside the piece, in elements.
        segment_length: int64[s], elements.
        segment_file: int64[s], row in the file columns.
        segment_offset: int64[s], first byte, counted from the start of the file's data section.
        file_kind: int64[f], code in ``KINDS``.
        file_rank: int64[f], the rank that writes it.
        file_nbytes: int64[f], bytes of the data section.
        objects: (kind, path) of the leaves that are not tensors.
        object_rank: int64[o], the rank whose receipt holds the value.
        extra_kind: int64[e], kind of an opaque object of one rank (``dataloader``, ``extra_states``).
        extra_rank: int64[e], its rank.
    """

    world_size: int
    block_bytes: int
    tensors: TensorTable
    piece_tensor: Ints
    offset: Ints
    length: Ints
    segment_piece: Ints
    segment_start: Ints
    segment_length: Ints
    segment_file: Ints
    segment_offset: Ints
    file_kind: Ints
    file_rank: Ints
    file_nbytes: Ints
    objects: Sequence[tuple[str, str]]
    object_rank: Ints
    extra_kind: Ints
    extra_rank: Ints
