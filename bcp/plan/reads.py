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
from bcp.plan.shards import KINDS, Ints, ShardTable, matrix

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
        row: int64[n], row of the target shard in this rank's table.
        segment: int64[n], row of the segment in the layout; no (row, segment) comes twice.
        file: int64[n], row of the file in the layout.
        start: int64[n], first needed byte in the file's data section.
        stop: int64[n], one past the last. Bytes between may not be needed: it is a hull.
    """

    row: Ints
    segment: Ints
    file: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        """Return the number of parts."""
        return len(self.row)

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
    row, segment, first, last = _hulls(layout, _meetings(layout, table))
    file, start = layout.segment_file[segment], layout.segment_offset[segment]
    itemsize = layout.tensors.itemsize[layout.piece_tensor[layout.segment_piece[segment]]]
    stop = start + (last - layout.segment_start[segment]) * itemsize
    start = start + (first - layout.segment_start[segment]) * itemsize
    order = np.lexsort((row, start, file))
    return Wants(row[order], segment[order], file[order], start[order], stop[order])


def placements(layout: Layout, table: ShardTable, wanted: Wants, file: int, lo: int, hi: int) -> Iterator[Placement]:
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


def _pieces(layout: Layout, table: ShardTable, row: int) -> tuple[int, int]:
    """Return the rows [first, stop) of the pieces of the tensor that is stored for a shard; none if there is none."""
    tensor = int(table.tensor[row])
    found = find(layout, KINDS[int(table.tensors.kind[tensor])], table.tensors.fqn[tensor])
    return (0, 0) if found is None else rows_of(layout.piece_tensor, resolve(layout, found))


@dataclass(frozen=True, slots=True, eq=False)
class _Meetings:
    """Where target boxes and pieces share elements, one row each; columns as matrices of the layout's width.

    ``row`` of the target shard, ``piece`` of the layout, its ``length``; ``low`` and ``extent`` of the shared block, in
    the piece's own coordinates.
    """

    row: Ints
    piece: Ints
    length: Ints
    low: Ints
    extent: Ints

    def take(self, rows: Ints) -> _Meetings:
        """Return some of the rows, some of them repeatedly."""
        return _Meetings(self.row[rows], self.piece[rows], self.length[rows], self.low[rows], self.extent[rows])

    def before(self, flat: Ints) -> Ints:
        """Count the elements of each block that come before flat position 0 <= p <= numel of its piece."""
        rest_row, rest_block = self.length.prod(axis=1), self.extent.prod(axis=1)
        index, rest = np.divmod(flat, rest_row)
        count, follows = index * rest_block, index == 0
        for length, low, extent in zip(self.length.T, self.low.T, self.extent.T, strict=True):
            rest_row, rest_block = rest_row // length, rest_block // extent
            index, rest = np.divmod(rest, rest_row)
            count = count + follows * np.clip(index - low, 0, extent) * rest_block
            follows = follows & (index >= low) & (index < low + extent)  # elsewhere the other indices do not matter
        return np.asarray(count, dtype=np.int64)

    def position(self, ordinal: Ints) -> Ints:
        """Return the flat position in its piece of an element of each block, given by its row-major number."""
        flat, rest, rest_block = np.zeros_like(ordinal), ordinal, self.extent.prod(axis=1)
        for length, low, extent in zip(self.length.T, self.low.T, self.extent.T, strict=True):
            rest_block = rest_block // extent
            index, rest = np.divmod(rest, rest_block)
            flat = flat * length + low + index
        return flat


def _meetings(layout: Layout, table: ShardTable) -> _Meetings:
    """Intersect every target box with the pieces of the tensor that is stored for it."""
    width = layout.offset.shape[1]
    found: list[tuple[Ints, ...]] = []
    for row in range(len(table)):
        first, stop = _pieces(layout, table, row)
        offset, length = layout.offset[first:stop], layout.length[first:stop]
        if first == stop:  # such a tensor may have more dimensions than any in the layout
            continue
        for _, box in _targets(table, row):
            (corner,), (extent,) = matrix([box.offsets], width, 0), matrix([box.lengths], width, 1)
            low = np.maximum(offset, corner)
            shared = np.minimum(offset + length, corner + extent) - low
            hit = np.flatnonzero((shared > 0).all(axis=1))
            found.append((np.full_like(hit, row), first + hit, length[hit], (low - offset)[hit], shared[hit]))
    if not found:
        none, empty = np.empty(0, dtype=np.int64), np.empty((0, width), dtype=np.int64)
        return _Meetings(none, none, empty, empty, empty)
    return _Meetings(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _hulls(layout: Layout, met: _Meetings) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (row, segment, first, last + 1): the hull of what each shard needs of a segment, in elements of its piece.

    All pieces are put behind each other, so that one binary search finds the segments of all meetings.
    """
    numel = layout.length.prod(axis=1)
    base = np.cumsum(numel) - numel
    starts = base[layout.segment_piece] + layout.segment_start
    count = met.extent.prod(axis=1)
    begin = np.searchsorted(starts, base[met.piece] + met.position(np.zeros_like(count)), side="right") - 1
    segments = np.searchsorted(starts, base[met.piece] + met.position(count - 1), side="right") - begin
    each = met.take(np.repeat(np.arange(len(count)), segments))
    segment = np.arange(len(each.row)) - np.repeat(np.cumsum(segments) - segments - begin, segments)
    before = each.before(layout.segment_start[segment])
    until = each.before(layout.segment_start[segment] + layout.segment_length[segment])
    hit = np.flatnonzero(before < until)  # a segment may lie between two rows of a block
    each, segment = each.take(hit), segment[hit]
    first, last = each.position(before[hit]), each.position(until[hit] - 1) + 1
    # A flat shard may meet a segment with its head, its body and its tail: one hull.
    order = np.lexsort((segment, each.row))
    row, segment = each.row[order], segment[order]
    heads = np.flatnonzero((np.diff(row, prepend=-1) != 0) | (np.diff(segment, prepend=-1) != 0))
    if not len(heads):
        return row, segment, first, last
    return row[heads], segment[heads], np.minimum.reduceat(first[order], heads), np.maximum.reduceat(last[order], heads)


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
