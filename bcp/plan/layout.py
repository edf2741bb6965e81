"""Where every element of every tensor lies in a checkpoint: what stays the same between saves of one layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bcp.plan.columns import Ints
from bcp.plan.segments import Segments
from bcp.plan.shards import TensorTable

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The paper's TensorShardToBasicByteMap (sec. 3.2), columnar.

    A tensor consists of pieces: boxes that tile its global shape, in the order (tensor, offset). A piece consists of
    segments: runs of its row-major elements, each contiguous in one data file. A tensor that is ``tied_to`` another has
    no pieces of its own.

    The states that an optimizer keeps of one parameter are cut alike, so they share pieces and segments: those of
    their *leader*, the first of them. What tells them apart is the *plane*: a data file is a row of planes, each
    with elements of one size, and a segment lies in all planes of its leader's family at the same element. Byte of
    element i of a segment in file f, counted from the start of the data section:
    ``file_planes[f, plane[tensor]] + (at + i) * itemsize[tensor]``.

    Attributes:
        world_size: how many ranks saved.
        block_bytes: data files are checksummed and read in blocks of this many bytes of their data section.
        tensors: n tensors, sorted by (kind, fqn).
        leader: int64[n], row of the tensor whose pieces this one shares: of the same kind and shape; leads itself.
        plane: int64[n], column in ``file_planes``; the members of a family lie in different planes.
        piece_tensor: int64[p], row in ``tensors``, of a leader; not decreasing.
        offset: int64[p, D], first corner of each piece.
        length: int64[p, D], extent of each piece.
        segments: how the pieces are cut.
        file_kind: int64[f], code in ``KINDS``; :func:`bcp.plan.save.divide.divide` sorts files by (kind, rank).
        file_rank: int64[f], the rank that writes it.
        file_nbytes: int64[f], bytes of the data section.
        file_planes: int64[f, P], first byte of each plane in the data section; 0 where the file has no such plane.
        objects: (kind, path) of the leaves that are not tensors.
        object_rank: int64[o], the rank whose receipt holds the value.
        extra_kind: int64[e], kind of an opaque object of one rank (``dataloader``, ``extra_states``).
        extra_rank: int64[e], its rank.
    """

    world_size: int
    block_bytes: int
    tensors: TensorTable
    leader: Ints
    plane: Ints
    piece_tensor: Ints
    offset: Ints
    length: Ints
    segments: Segments
    file_kind: Ints
    file_rank: Ints
    file_nbytes: Ints
    file_planes: Ints
    objects: Sequence[tuple[str, str]]
    object_rank: Ints
    extra_kind: Ints
    extra_rank: Ints
