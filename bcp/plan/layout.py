"""The layout: the place of every element of every tensor in a checkpoint. All saves of one layout share it.

:func:`find`, :func:`resolve` and :func:`rows_of` look tensors up by binary searches, and build nothing.
:func:`check_layout` and :func:`check_segments` check that every number points to something that exists, before it is
used. So a damaged or hostile file never becomes an index error or a read out of bounds. The checks are vectorised: two
milliseconds for 300,000 segments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import lt

import numpy as np
import numpy.typing as npt

from bcp.errors import CorruptError
from bcp.plan.columns import Ints, begins
from bcp.plan.shards import KINDS, OPAQUE_KINDS, Segments, TensorTable

__all__ = [
    "LARGEST",
    "Layout",
    "check_block_bytes",
    "check_layout",
    "check_segments",
    "find",
    "find_all",
    "named_files",
    "resolve",
    "resolve_all",
    "rows_of",
]


@dataclass(frozen=True, slots=True)
class Layout:
    """The paper's TensorShardToBasicByteMap (sec. 3.2), columnar.

    A tensor consists of boxes that tile its global shape, in the order (tensor, offset). A box consists of segments:
    runs of its row-major elements, each contiguous in one data file. A tensor that is ``tied_to`` another has no boxes
    of its own.

    The states that an optimizer keeps of one parameter are cut alike, so they share boxes and segments: those of
    their *leader*, the first of them. They differ in their *plane*: a data file is a row of planes, each with elements
    of one size. A segment lies in all planes of its leader's family at the same element. Byte of element i of a
    segment in file f, counted from the start of the data section:
    ``file_planes[f, plane[tensor]] + (at + i) * itemsize[tensor]``.
    """

    world_size: int  # how many ranks saved
    block_bytes: int  # data files are checksummed and read in blocks of this many bytes of their data section
    tensors: TensorTable  # n tensors, sorted by (kind, fqn)
    leader: Ints  # int64[n], row of the tensor whose boxes this one shares, of the same kind and shape; maybe itself
    plane: Ints  # int64[n], column in ``file_planes``; the members of a family lie in different planes
    box_tensor: Ints  # int64[b], row in ``tensors``, of a leader; not decreasing
    offset: Ints  # int64[b, D], first corner of each box
    length: Ints  # int64[b, D], extent of each box
    segments: Segments  # how the boxes are cut
    # int64[f], code in ``KINDS``; :func:`bcp.plan.write.divide.divide_writes` sorts files by (kind, rank)
    file_kind: Ints
    file_rank: Ints  # int64[f], the rank that writes it
    file_nbytes: Ints  # int64[f], bytes of the data section
    file_planes: Ints  # int64[f, P], first byte of each plane in the data section; 0 if the file has no such plane
    objects: Sequence[tuple[str, str]]  # (kind, path) of the leaves that are not tensors
    object_rank: Ints  # int64[o], the rank whose receipt holds the value
    extra_kind: Ints  # int64[e], kind of an opaque object of one rank (``dataloader``, ``extra_states``)
    extra_rank: Ints  # int64[e], its rank


def rows_of(owners: Ints, owner: int) -> tuple[int, int]:
    """Return the rows [first, stop) of a non-decreasing owner column that belong to ``owner``."""
    return int(np.searchsorted(owners, owner)), int(np.searchsorted(owners, owner, side="right"))


def find(layout: Layout, kind: str, fqn: str) -> int | None:
    """Return the row of a tensor in ``layout.tensors``, or None if the checkpoint has no such name."""
    first, stop = rows_of(layout.tensors.kind, KINDS.index(kind))
    row = bisect_left(layout.tensors.fqn, fqn, first, stop)
    return row if row < stop and layout.tensors.fqn[row] == fqn else None


def find_all(layout: Layout, wanted: TensorTable) -> Ints:
    """Return int64[n]: the row of every wanted tensor in ``layout.tensors``, by kind and name; -1 for none."""
    fqns, codes = layout.tensors.fqn, np.arange(len(KINDS) + 1)
    bounds = np.searchsorted(layout.tensors.kind, codes).tolist()  # once, and not for every name as ``find`` does
    rows = []
    for code, fqn in zip(wanted.kind.tolist(), wanted.fqn, strict=True):
        row = bisect_left(fqns, fqn, bounds[code], bounds[code + 1])
        rows.append(row if row < bounds[code + 1] and fqns[row] == fqn else -1)
    return np.array(rows, dtype=np.int64)


def resolve(layout: Layout, row: int) -> int:
    """Return the row of the tensor that is stored for this one: its own row, or that of the tensor it is tied to.

    Raises CorruptError if the tensor is tied to a name that the checkpoint does not have.
    """
    tied_to = layout.tensors.tied_to[row]
    if not tied_to:
        return row
    kind = KINDS[int(layout.tensors.kind[row])]
    stored = find(layout, kind, tied_to)
    if stored is None:
        raise CorruptError(
            f"{kind} tensor {layout.tensors.fqn[row]!r} is tied to {tied_to!r}, which the checkpoint does not have; "
            "load another checkpoint"
        )
    return stored


def resolve_all(layout: Layout, rows: Ints) -> Ints:
    """Return int64[n]: :func:`resolve` of every row; -1 stays -1."""
    tied_to = layout.tensors.tied_to
    return np.array(
        [resolve(layout, row) if row >= 0 and tied_to[row] else row for row in rows.tolist()], dtype=np.int64
    )


def named_files(layout: Layout) -> set[tuple[int, int]]:
    """Return (rank, code of the kind) of all data files: of tensors, opaque objects and units.

    A receipt may have a file that the layout does not name: an edit has dropped all that was in it.
    """
    files = set(zip(layout.file_rank.tolist(), layout.file_kind.tolist(), strict=True))
    files.update(zip(layout.extra_rank.tolist(), layout.extra_kind.tolist(), strict=True))
    units = zip(layout.object_rank.tolist(), layout.objects, strict=True)
    return files | {(rank, KINDS.index(kind)) for rank, (kind, _) in units if kind in OPAQUE_KINDS}


LARGEST = 1 << 62
"""All tensors together have fewer elements, and all files fewer bytes: such numbers can be added in int64."""

LARGEST_WORLD = 1 << 31
LARGEST_BLOCK = 1 << 40
MOST_DIMENSIONS = 64

CHUNK = 512
"""Boxes whose segments are looked at together, so that temporary columns stay in the cache."""

ALIGNMENT = 16
"""The largest item size; blocks are multiples of it, so that no element is cut by a block."""

Bools = npt.NDArray[np.bool_]


def check_layout(layout: Layout) -> None:
    """Check everything that a reader of the layout relies on, except facts that hold for every decoded layout.

    These facts are: ``box_tensor`` and ``segments.begin`` count up, and ``segments.line`` is a running sum. A load
    checks by itself that the segments that it needs lie inside their files; :func:`check_segments` checks all.

    Raises ValueError, which names the fault and its first row.
    """
    if not 1 <= layout.world_size <= LARGEST_WORLD:
        raise ValueError(f"world_size is {layout.world_size}")
    check_block_bytes("block_bytes", layout.block_bytes)
    _check_tensors(layout.tensors)
    numel = _volumes(layout.tensors.shape)
    untied = _check_ties(layout)
    stored = untied & (numel > 0)
    _check_families(layout, untied, stored)
    _check_files(layout)
    volume = _check_boxes(layout, np.where(stored & (layout.leader == np.arange(len(numel))), numel, 0))
    _check_patterns(layout.segments, volume, len(layout.file_rank))
    _check_owners(layout)


def check_block_bytes(name: str, nbytes: int) -> None:
    """Raise ValueError unless a size of blocks or parts, in bytes, is a multiple of ``ALIGNMENT`` within bounds."""
    if not ALIGNMENT <= nbytes <= LARGEST_BLOCK or nbytes % ALIGNMENT:
        raise ValueError(f"{name} is {nbytes}, not a multiple of {ALIGNMENT} up to {LARGEST_BLOCK}")


def _refuse(bad: npt.ArrayLike, fault: str, first: int = 0) -> None:
    """Raise if any row is bad, or anything in a row of a matrix; rows are counted from ``first``."""
    if np.any(bad):
        rows = np.unique(np.nonzero(np.asarray(bad))[0]) + first
        raise ValueError(f"{fault}: row {rows[0]}" + (f" and {rows.size - 1} more" if rows.size > 1 else ""))


def _refuse_outside(values: Ints, stop: int, fault: str, first: int = 0) -> None:
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < stop:
        _refuse((values < 0) | (values >= stop), fault, first)


def _refuse_repeated(keys: Ints, fault: str) -> None:
    """Raise if a value comes twice."""
    if (keys[1:] > keys[:-1]).all():  # as a rule they are sorted
        return
    order = np.argsort(keys, kind="stable")
    repeated = np.zeros(len(keys), dtype=np.bool_)
    repeated[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    _refuse(repeated, fault)


def _volumes(lengths: Ints) -> Ints:
    """Return the product of each row; a tenth of the time of ``prod(axis=1)`` for few columns."""
    out = np.ones(len(lengths), dtype=lengths.dtype)
    for column in lengths.T:
        out *= column
    return out


def _check_tensors(tensors: TensorTable) -> None:
    """Check each tensor by itself, and that names can be searched for."""
    _refuse_outside(tensors.kind, len(KINDS), "tensor of unknown kind")
    bounds = [0, *(np.flatnonzero(np.diff(tensors.kind)) + 1).tolist(), len(tensors)]
    for first, stop in pairwise(bounds):
        names = tensors.fqn[first:stop]
        if not all(map(lt, names, names[1:])):
            _refuse([a >= b for a, b in pairwise(names)], "tensor not sorted by name", first + 1)
    _refuse(tensors.kind[1:] < tensors.kind[:-1], "tensor not sorted by kind", 1)
    size = tensors.itemsize
    _refuse((size < 1) | (size > ALIGNMENT) | (size & (size - 1) != 0), "tensor with impossible item size")
    width = tensors.shape.shape[1]
    if width > MOST_DIMENSIONS or tensors.stride.shape[1] != width:
        raise ValueError(f"shapes have {width} dimensions and strides {tensors.stride.shape[1]}")
    _refuse_outside(tensors.ndim, width + 1, "tensor with an impossible number of dimensions")
    _refuse((tensors.shape < 0) | (tensors.stride < 0), "tensor with negative shape or stride")
    padding = np.arange(width) >= tensors.ndim[:, None]
    _refuse(padding & ((tensors.shape != 1) | (tensors.stride != 0)), "tensor with more dimensions")
    numel = _volumes(tensors.shape.astype(np.float64))  # floats do not wrap around
    _refuse(numel * size >= LARGEST, "tensor with impossible shape")
    if float(numel.sum()) >= LARGEST:
        raise ValueError("tensors with an impossible total size")
    _refuse_outside(tensors.requires_grad, 2, "tensor that neither requires a gradient nor does not")


def _check_ties(layout: Layout) -> Bools:
    """Check that a tied tensor leads, in one step, to a stored one like itself; return which tensors are not tied."""
    tensors = layout.tensors
    untied = np.ones(len(tensors), dtype=np.bool_)
    ties = [row for row, tied_to in enumerate(tensors.tied_to) if tied_to] if any(tensors.tied_to) else []
    untied[ties] = False
    for row in ties:
        stored = find(layout, KINDS[int(tensors.kind[row])], tensors.tied_to[row])
        meta = tensors[row]
        if stored is None or tensors.tied_to[stored]:
            raise ValueError(f"{meta.fqn!r} is tied to {meta.tied_to!r}, which is not stored")
        if (tensors[stored].shape, tensors[stored].dtype) != (meta.shape, meta.dtype):
            raise ValueError(f"{meta.fqn!r} is tied to {meta.tied_to!r}, which has another shape or dtype")
    return untied


def _check_families(layout: Layout, untied: Bools, stored: Bools) -> None:
    """Check that leaders lead themselves, and that families have one kind and shape, but different planes."""
    tensors, leader, rows = layout.tensors, layout.leader, np.arange(len(layout.tensors))
    _refuse_outside(leader, len(tensors), "tensor led by none")
    follows = leader != rows
    _refuse((leader > rows) | follows[leader], "tensor whose leader follows another")
    _refuse(follows & ~(untied & untied[leader]), "tensor that is led and tied")
    alike = (tensors.kind == tensors.kind[leader]) & (tensors.ndim == tensors.ndim[leader])
    _refuse(~alike, "tensor whose leader is not like it")
    _refuse(tensors.shape != tensors.shape[leader], "tensor whose leader has another shape")
    planes = layout.file_planes.shape[1]
    _refuse(stored & ((layout.plane < 0) | (layout.plane >= planes)), "tensor in no plane")
    _refuse_repeated(
        np.where(stored, leader * planes + layout.plane, -1 - rows), "tensor in the plane of another it is led with"
    )


def _check_files(layout: Layout) -> None:
    """Check that every file has a name of its own and a possible size."""
    _refuse_outside(layout.file_kind, len(KINDS), "file of unknown kind")
    _refuse_outside(layout.file_rank, layout.world_size, "file of a rank outside the world")
    _refuse_outside(layout.file_nbytes, LARGEST, "file with impossible size")
    if float(layout.file_nbytes.sum(dtype=np.float64)) >= LARGEST:
        raise ValueError("files with an impossible total size")
    _refuse_repeated(layout.file_kind * layout.world_size + layout.file_rank, "two files of one kind and rank")
    outside = (layout.file_planes < 0) | (layout.file_planes > layout.file_nbytes[:, None])
    _refuse(outside, "file with a plane outside it")


def _check_boxes(layout: Layout, volume: Ints) -> Ints:
    """Check that boxes lie inside their tensors and have these volumes together; return the volume of each box."""
    shape, owner = layout.tensors.shape, layout.box_tensor
    if {layout.offset.shape[1], layout.length.shape[1]} != {shape.shape[1]}:
        raise ValueError("boxes with other numbers of dimensions than tensors")
    outside = (layout.offset < 0) | (layout.length < 1) | (layout.offset > shape.take(owner, axis=0) - layout.length)
    _refuse(outside, "box outside its tensor")
    box_volume = _volumes(layout.length)
    line = begins(box_volume)
    total = np.diff(line[np.searchsorted(owner, np.arange(len(volume) + 1))])
    _refuse(total != volume, "tensor whose boxes do not add up to it")
    return box_volume


def _check_patterns(segments: Segments, volume: Ints, files: int) -> None:
    """Check that patterns consist of segments with elements, and fill the boxes, which have these volumes."""
    if len(segments.pattern) != len(volume) or len(segments.file) != len(volume):
        raise ValueError("boxes without pattern")
    _refuse_outside(segments.pattern, len(segments.begin) - 1, "box of no pattern")
    _refuse(np.diff(segments.begin) < 1, "pattern without segments")
    _refuse_outside(segments.length - 1, LARGEST, "segment without elements, or too many")
    _refuse_outside(segments.at, LARGEST, "segment outside its file")
    total = np.diff(segments.line[segments.begin])
    _refuse(total[segments.pattern] != volume, "box whose segments do not add up to it")
    if len(segments):
        low = segments.file + np.minimum.reduceat(segments.step, segments.begin[:-1])[segments.pattern]
        high = segments.file + np.maximum.reduceat(segments.step, segments.begin[:-1])[segments.pattern]
        _refuse((low < 0) | (high >= files), "box with a segment in no file")


def check_segments(layout: Layout) -> None:
    """Check that all segments of a sound layout lie in their files, in all planes of their family.

    The check takes as long as opening the checkpoint. Raises ValueError if a segment lies outside its file.
    """
    stored = ~layout.tensors.tied & (layout.tensors.numel > 0)
    segments = layout.segments
    room, group = _room(layout, stored)
    begin, end = group * room.shape[1], segments.at + segments.length
    for first in range(0, len(segments.pattern), CHUNK):
        boxes = np.arange(first, min(first + CHUNK, len(segments.pattern)))
        box, row = segments.of_boxes(boxes)
        file = segments.file[box] + segments.step[row]
        left = room.reshape(-1)[file + begin[layout.box_tensor[box]]] - end[row]
        if int(left.min()) < 0:
            outside = np.isin(boxes, box[left < 0])
            _refuse(outside, "box with a segment outside its file", first)


def _room(layout: Layout, stored: Bools) -> tuple[Ints, Ints]:
    """Return how many elements of each group of planes fit into each file, and the row of each tensor's group.

    A group are the planes of a kind in which the families with one leader's plane lie. The tightest one counts.
    """
    tensors, planes = layout.tensors, layout.file_planes.shape[1]
    place = np.where(stored, tensors.kind * planes + layout.plane, 0)
    group = place[layout.leader]
    size, lead = np.zeros((2, len(KINDS) * planes + 1), dtype=np.int64)
    size[place[stored]], lead[place[stored]] = tensors.itemsize[stored], group[stored]
    _refuse(stored & (size[place] != tensors.itemsize), "tensor in a plane of another item size")
    _refuse(stored & (lead[place] != group), "tensor in a plane of other leaders")
    groups, rows = np.unique(lead[size > 0], return_inverse=True)
    own_files = layout.file_kind == groups[:, None] // max(planes, 1)
    room = np.where(own_files, LARGEST, -1)
    for index, row in zip(np.flatnonzero(size).tolist(), rows.tolist(), strict=True):
        base, itemsize = layout.file_planes[:, index % planes], int(size[index])
        _refuse(own_files[row] & (base & (itemsize - 1) != 0), "file with a misaligned plane")
        np.minimum(room[row], (layout.file_nbytes - base) >> (itemsize.bit_length() - 1), out=room[row])
    return room, np.searchsorted(groups, group)


def _check_owners(layout: Layout) -> None:
    """Check the rows of objects and extras."""
    _refuse_outside(layout.object_rank, layout.world_size, "object of a rank outside the world")
    if not {kind for kind, _ in layout.objects} <= set(KINDS):
        raise ValueError("object of unknown kind")
    if len(set(layout.objects)) != len(layout.objects):
        raise ValueError("two objects of one name")
    _refuse_outside(layout.extra_kind, len(KINDS), "extra of unknown kind")
    _refuse_outside(layout.extra_rank, layout.world_size, "extra of a rank outside the world")
