"""What a rank wants of a checkpoint, and where each byte of it goes (paper sec. 3.3, steps 2 to 4; sec. 4.4).

A target shard is a box of a tensor, or a flat interval of such a box. A saved tensor is made of pieces (boxes),
and these of segments (runs of row-major elements in one file). :func:`wants` intersects the two;
:func:`assign`, in a file of its own, decides who reads what; :func:`placements` turns any run of file bytes into
copies between boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bcp.plan.assign import Assignment, Chunk, Transfer, assign
from bcp.plan.box import Box, flat_boxes
from bcp.plan.layout import Layout
from bcp.plan.lookup import find, resolve, rows_of
from bcp.plan.shards import KINDS, Ints, ShardTable

__all__ = [
    "Assignment",
    "Chunk",
    "Placement",
    "Transfer",
    "Wants",
    "assign",
    "decode_ranges",
    "encode_ranges",
    "placements",
    "wants",
]


@dataclass(frozen=True, slots=True, eq=False)
class Wants:
    """What one rank needs: n parts of segments, sorted by (file, start).

    Attributes:
        table: the target shards.
        tensor: int64[len(table)], row of the tensor in the layout that is stored for each shard; -1: there is none.
        row: int64[n], row of the target shard in this rank's table.
        segment: int64[n], row of the segment in the layout; no (row, segment) comes twice.
        file: int64[n], row of the file in the layout.
        start: int64[n], first needed byte in the file's data section.
        stop: int64[n], one past the last. Bytes between may not be needed: it is a hull.
    """

    table: ShardTable
    tensor: Ints
    row: Ints
    segment: Ints
    file: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        """Return the number of parts."""
        return len(self.row)

    def saved_tensor(self, row: int) -> int:
        """Return the row in the layout of the tensor that is stored for a shard: its dtype is the saved one."""
        return int(self.tensor[row])

    def ranges(self) -> Ints:
        """int64[k, 3]: disjoint, non-adjacent (file, start, stop) that hold everything, sorted."""
        merged = [np.empty((0, 3), dtype=np.int64)]
        for file in np.unique(self.file).tolist():
            first, last = rows_of(self.file, file)
            start, reach = self.start[first:last], np.maximum.accumulate(self.stop[first:last])
            heads = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
            tails = np.append(heads[1:], len(start)) - 1
            merged.append(np.stack((np.full_like(heads, file), start[heads], reach[tails]), axis=1))
        return np.concatenate(merged)


def encode_ranges(ranges: Ints) -> bytes:
    """Return (file, start, stop) rows as little-endian int64."""
    return ranges.astype("<i8").tobytes()


def decode_ranges(data: bytes | bytearray | memoryview) -> Ints:
    """Return what :func:`encode_ranges` was given. Raises ValueError if these are not whole rows."""
    return np.frombuffer(data, dtype="<i8").reshape(-1, 3).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Placement:
    """One copy from a run of file bytes to a target shard.

    Source: the bytes from ``source_at`` on, viewed with the *saved* dtype as an array of shape ``source_lengths``;
    block ``source_box`` of it. Target: the row's tensor, which has shape ``target_lengths`` where ``target_at`` is
    None; otherwise it is 1-D, and its elements from ``target_at`` on are viewed as an array of shape
    ``target_lengths``; block ``target_box`` of it. The two blocks have the same lengths.

    Attributes:
        row: row of the target shard in this rank's table.
        source_at: first byte of the source, counted from the first byte of the run.
        source_lengths: shape of the source.
        source_box: what to copy, in the source's own coordinates.
        target_at: first element of the target, for a flat shard; None for a regular one.
        target_lengths: shape of the target.
        target_box: where to copy it, in the target's own coordinates.
    """

    row: int
    source_at: int
    source_lengths: tuple[int, ...]
    source_box: Box
    target_at: int | None
    target_lengths: tuple[int, ...]
    target_box: Box


def wants(layout: Layout, table: ShardTable) -> Wants:
    """Find what each local shard needs of the checkpoint.

    Tensors that the layout does not have are skipped; a tied tensor is found where its data is. Shapes are
    assumed to be equal (checked before); dtypes need not be: sizes are those of the saved one.
    """
    tensor = np.array([_stored(layout, table, row) for row in range(len(table))], dtype=np.int64)
    parts = [
        part for row in np.flatnonzero(tensor >= 0).tolist() for part in _wanted(layout, table, row, int(tensor[row]))
    ]
    row, segment, low, high = np.concatenate([np.empty((4, 0), dtype=np.int64), *parts], axis=1)
    # A flat shard may meet a segment with its head, its body and its tail: one part, their hull.
    keys, inverse = np.unique(row * max(1, len(layout.segment_length)) + segment, return_inverse=True)
    first = np.full(len(keys), np.iinfo(np.int64).max)
    last = np.zeros(len(keys), dtype=np.int64)
    np.minimum.at(first, inverse, low)
    np.maximum.at(last, inverse, high)
    row, segment = np.divmod(keys, max(1, len(layout.segment_length)))
    file, start = layout.segment_file[segment], layout.segment_offset[segment]
    itemsize = layout.tensors.itemsize[layout.piece_tensor[layout.segment_piece[segment]]]
    stop = start + (last - layout.segment_start[segment]) * itemsize
    start = start + (first - layout.segment_start[segment]) * itemsize
    order = np.lexsort((row, start, file))
    return Wants(table, tensor, row[order], segment[order], file[order], start[order], stop[order])


def placements(  # noqa: PLR0917 -- two tables, what is wanted of them, and a run of bytes, which is three numbers
    layout: Layout, table: ShardTable, wanted: Wants, file: int, lo: int, hi: int
) -> Iterator[Placement]:
    """Say where everything goes that this rank wants of bytes [lo, hi) of a file's data section.

    Runs that tile the file write every wanted element exactly once. Irregular intervals are decomposed into boxes here,
    as they are needed (paper sec. 4.4).

    Args:
        layout: where everything lies.
        table: the target shards.
        wanted: :func:`wants` of these two.
        file: row of the file in the layout.
        lo: first byte, at an element boundary.
        hi: one past the last byte, at an element boundary.

    """
    first, last = rows_of(wanted.file, file)
    inside = (wanted.start[first:last] < hi) & (wanted.stop[first:last] > lo)
    for index in (first + np.flatnonzero(inside)).tolist():
        yield from _copies(layout, list(_targets(table, int(wanted.row[index]))), wanted, index, (lo, hi))


def _stored(layout: Layout, table: ShardTable, row: int) -> int:
    """Return the row of the tensor that is stored for a shard, or -1."""
    tensor = int(table.tensor[row])
    found = find(layout, KINDS[int(table.tensors.kind[tensor])], table.tensors.fqn[tensor])
    return -1 if found is None else resolve(layout, found)


def _wanted(layout: Layout, table: ShardTable, row: int, tensor: int) -> Iterator[Ints]:
    """Yield int64[4, k] arrays (row, segment, first, stop) for one shard; positions are elements of the piece."""
    targets = [target for _, target in _targets(table, row)]
    for piece in _pieces_meeting(layout, tensor, table.box(row)):
        box = _piece_box(layout, piece)
        for target in targets:
            shared = target.intersect(box)
            if shared is not None:
                segments, first, stop = _segments_meeting(layout, piece, box, shared)
                yield np.stack((np.full_like(segments, row), segments, first, stop))


def _pieces_meeting(layout: Layout, tensor: int, box: Box) -> list[int]:
    """Return the pieces of a tensor that share an element with the box."""
    first, stop = rows_of(layout.piece_tensor, tensor)
    ndim = len(box.lengths)
    offset, length = layout.offset[first:stop, :ndim], layout.length[first:stop, :ndim]
    corner, extent = np.array(box.offsets, dtype=np.int64), np.array(box.lengths, dtype=np.int64)
    shared = np.minimum(offset + length, corner + extent) > np.maximum(offset, corner)
    meeting: list[int] = (first + np.flatnonzero(shared.all(axis=1))).tolist()
    return meeting


def _segments_meeting(layout: Layout, piece: int, box: Box, shared: Box) -> tuple[Ints, Ints, Ints]:
    """Return the segments that hold elements of the block ``shared`` of a piece, and the hull of these in each."""
    low, high = box.hull(shared)
    begin, end = rows_of(layout.segment_piece, piece)
    starts = layout.segment_start[begin:end]
    first = begin + int(np.searchsorted(starts, low, side="right")) - 1
    segments = np.arange(first, begin + int(np.searchsorted(starts, high)), dtype=np.int64)
    start = np.maximum(layout.segment_start[segments], low)
    stop = np.minimum(layout.segment_start[segments] + layout.segment_length[segments], high)
    if high - low == shared.numel:  # contiguous in the piece: all between is needed
        return segments, start, stop
    bounds = zip(start.tolist(), stop.tolist(), strict=True)
    hulls = np.array([_hull(box, shared, a, b) for a, b in bounds], dtype=np.int64)
    hit = hulls[:, 0] < hulls[:, 1]
    return segments[hit], hulls[hit, 0], hulls[hit, 1]


def _hull(box: Box, shared: Box, start: int, stop: int) -> tuple[int, int]:
    """Return the hull of those elements of a block that lie in flat interval [start, stop) of its box; or (0, 0)."""
    blocks = (_outward(inner, box).intersect(shared) for _, inner in flat_boxes(box.lengths, start, stop))
    hulls = [box.hull(block) for block in blocks if block is not None]
    return (hulls[0][0], hulls[-1][1]) if hulls else (0, 0)  # they come in flat order


def _copies(
    layout: Layout, targets: Sequence[tuple[int | None, Box]], wanted: Wants, index: int, run: tuple[int, int]
) -> Iterator[Placement]:
    """Yield the copies from a run of file bytes for one wanted part, whose shard is made of these targets."""
    lo, hi = run
    row, segment = int(wanted.row[index]), int(wanted.segment[index])
    start, stop = max(lo, int(wanted.start[index])), min(hi, int(wanted.stop[index]))
    piece = int(layout.segment_piece[segment])
    box, itemsize = _piece_box(layout, piece), int(layout.tensors.itemsize[layout.piece_tensor[piece]])
    # Element e of the piece is at byte origin + e * itemsize of the file.
    origin = int(layout.segment_offset[segment]) - int(layout.segment_start[segment]) * itemsize
    for flat, inner in flat_boxes(box.lengths, (start - origin) // itemsize, (stop - origin) // itemsize):
        source = _outward(inner, box)
        for target_at, target in targets:
            shared = source.intersect(target)
            if shared is not None:
                yield Placement(
                    row=row,
                    source_at=origin + flat * itemsize - lo,
                    source_lengths=source.lengths,
                    source_box=shared.within(source),
                    target_at=target_at,
                    target_lengths=target.lengths,
                    target_box=shared.within(target),
                )


def _targets(table: ShardTable, row: int) -> Iterator[tuple[int | None, Box]]:
    """Yield the boxes of the global tensor that make up a shard, each with its first element in a flat shard."""
    box, start, stop = table.box(row), int(table.start[row]), int(table.stop[row])
    if start == 0 and stop == box.numel:
        yield None, box
        return
    for flat, inner in flat_boxes(box.lengths, start, stop):
        yield flat - start, _outward(inner, box)


def _piece_box(layout: Layout, piece: int) -> Box:
    """Return the box of a piece, in its tensor's own number of dimensions."""
    ndim = int(layout.tensors.ndim[layout.piece_tensor[piece]])
    return Box(tuple(layout.offset[piece, :ndim].tolist()), tuple(layout.length[piece, :ndim].tolist()))


def _outward(inner: Box, outer: Box) -> Box:
    """Return ``inner``, given in the coordinates of ``outer``, in those of the global tensor."""
    return Box(tuple(a + b for a, b in zip(inner.offsets, outer.offsets, strict=True)), inner.lengths)
