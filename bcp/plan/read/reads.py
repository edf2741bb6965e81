"""The bytes of a checkpoint that one rank needs (paper sec. 3.3, steps 2 to 4; sec. 4.4).

A target shard is a box of a tensor, or a flat interval of such a box. A saved tensor consists of boxes as well, and
these of segments (runs of row-major elements in one file). :func:`wants` intersects the two. Binary searches in an
index (:class:`BoxIndex`), computed once for a layout, find the saved boxes that a target box meets.
:mod:`bcp.plan.read.share` then chooses the readers, and :mod:`bcp.plan.read.copies` finds the destination of each
byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bcp.errors import CorruptError
from bcp.plan.box import Boxes, decompose
from bcp.plan.columns import Ints, order_of, spread
from bcp.plan.layout import Layout, find_all, resolve_all
from bcp.plan.shards import KINDS, Segments, ShardTable
from bcp.runtime.cache import LruCache

__all__ = ["BoxIndex", "ReadRequest", "box_index", "fitted", "wants"]


@dataclass(frozen=True, slots=True, eq=False)
class BoxIndex:
    """An index of the boxes of a layout.

    All tensors are put behind each other along their first dimension: index i of it, in tensor t, is ``base[t] + i``.
    """

    offset: Ints  # int64[b, D], as in the layout, but with at least one column
    length: Ints  # int64[b, D], the same
    base: Ints  # int64[n], first index of each tensor
    begin: Ints  # int64[b], first index of each box; not decreasing
    reach: Ints  # int64[b], the largest end of this box and all before it; not decreasing

    @classmethod
    def of(cls, layout: Layout) -> BoxIndex:
        """Index the boxes of a layout."""
        width = max(1, layout.offset.shape[1])  # 0 where all tensors are 0-d: one element each
        offset, length = fitted(layout.offset, width, 0), fitted(layout.length, width, 1)
        extent = fitted(layout.tensors.shape, width, 1)[:, 0]
        base = np.cumsum(extent) - extent
        begin = base[layout.box_tensor] + offset[:, 0]
        return cls(offset, length, base, begin, np.maximum.accumulate(begin + length[:, 0]))

    def candidates(self, tensor: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the boxes [first, stop) that may share elements with given ones, by the first dimension alone.

        ``tensor`` is the row of the leader; ``low`` and ``high``, one past the last, bound the first dimension: all
        are int64[m]. The result has all boxes that share elements, and few others if boxes are cut along it.
        """
        base = self.base[tensor]
        return np.searchsorted(self.reach, base + low, side="right"), np.searchsorted(self.begin, base + high)


def fitted(matrix: Ints, width: int, fill: int) -> Ints:
    """Return a matrix of that width: append or drop columns on the right, beyond the dimensions of all its tensors."""
    given = matrix.shape[1]
    return matrix[:, :width] if given >= width else np.pad(matrix, ((0, 0), (0, width - given)), constant_values=fill)


_indices: LruCache[int, tuple[Layout, BoxIndex]] = LruCache(4)
"""By the layout's id, which no other object has while the layout is here. A job saves and loads one or two layouts;
further loads and ranks of one process find them."""


def box_index(layout: Layout) -> BoxIndex:
    """Return the index of a layout; the last few are remembered."""
    known = _indices.get(id(layout))
    if known is None:
        known = layout, BoxIndex.of(layout)
        _indices.put(id(layout), known)
    return known[1]


@dataclass(frozen=True, slots=True, eq=False)
class ReadRequest:
    """The bytes that one rank needs: n byte ranges of segments, sorted by (file, start)."""

    row: Ints  # int64[n], row of the target shard in this rank's table
    tensor: Ints  # int64[n], row in the layout of the tensor that is stored for it
    box: Ints  # int64[n], row of the box in the layout
    segment: Ints  # int64[n], row of the segment in its patterns; no (row, box, segment) comes twice
    first: Ints  # int64[n], first needed element, as a flat position in the segment's box
    file: Ints  # int64[n], row of the file in the layout
    start: Ints  # int64[n], first needed byte in the file's data section
    stop: Ints  # int64[n], one past the last. Bytes between may not be needed: it is a hull.

    def __len__(self) -> int:
        return len(self.row)

    def ranges(self) -> Ints:
        """Return int64[k, 3]: disjoint, non-adjacent (file, start, stop) that hold everything, sorted."""
        new = np.diff(self.file, prepend=-1) != 0
        heads = np.flatnonzero(new)
        if not len(heads):
            return np.empty((0, 3), dtype=np.int64)
        # All files behind each other, with a gap between them: how far one reaches says nothing of the next.
        ends = np.maximum.reduceat(self.stop, heads) + 1
        base = (np.cumsum(ends) - ends)[np.cumsum(new) - 1]
        reach = np.maximum.accumulate(base + self.stop)
        heads = np.flatnonzero(np.concatenate(([True], (base + self.start)[1:] > reach[:-1])))
        tails = np.append(heads[1:], len(base)) - 1
        return np.stack((self.file[heads], self.start[heads], reach[tails] - base[tails]), axis=1)


def wants(layout: Layout, table: ShardTable, saved: Ints | None = None) -> ReadRequest:
    """Return the bytes of the checkpoint that each local shard needs.

    Tensors that the layout does not have are skipped. A tied tensor is read from the tensor that stores its data.
    Shapes are assumed to be equal (checked before). Dtypes may differ: sizes are those of the saved one. ``saved`` is
    ``find_all(layout, table.tensors)``, if it is known already.

    Raises CorruptError if a needed element lies outside its file, or in a file of another kind.
    """
    asked = _Regions.of(layout, table, find_all(layout, table.tensors) if saved is None else saved)
    segments = layout.segments
    hulls = _hulls(segments, _meetings(box_index(layout), asked))
    # From here on every state of a parameter by itself: they share boxes and segments, and differ in plane and size.
    source, state = spread(asked.count[hulls.ask])
    indices = asked.begin[hulls.ask[source]] + state
    tensor, row = asked.tensor[indices], asked.row[indices]
    box, segment = hulls.box[source], hulls.segment[source]
    line, length = hulls.line[source], hulls.length[source]
    file, itemsize = segments.file[box] + segments.step[segment], layout.tensors.itemsize[tensor]
    element = segments.at[segment] + line - segments.line[segment]
    base = layout.file_planes[file, layout.plane[tensor]]
    _check_inside(layout, tensor, file, element + length, base)
    start = base + element * itemsize
    order = order_of((start, file))
    first = line - segments.starts[box]
    columns = (row, tensor, box, segment, first, file, start, start + length * itemsize)
    return ReadRequest(*(column[order] for column in columns))


def _check_inside(layout: Layout, tensor: Ints, file: Ints, stop: Ints, base: Ints) -> None:
    """Raise CorruptError if needed elements lie outside their file, or in a file of another kind.

    ``stop`` is one past the last needed element of a plane, which begins at byte ``base``.
    """
    itemsize = layout.tensors.itemsize[tensor]
    wrong = (stop > (layout.file_nbytes[file] - base) // itemsize) | (base % itemsize != 0)
    wrong |= layout.file_kind[file] != layout.tensors.kind[tensor]
    if wrong.any():
        row = int(wrong.argmax())
        meta, where = layout.tensors[int(tensor[row])], int(file[row])
        raise CorruptError(
            f"the metadata is corrupt: {meta.kind} tensor {meta.fqn!r} is said to end with element {stop[row]} behind "
            f"byte {base[row]} of the {KINDS[layout.file_kind[where]]} file of rank {layout.file_rank[where]}, whose "
            f"size is {layout.file_nbytes[where]} bytes; restore it"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Regions:
    """The m distinct regions that a rank asks for: flat intervals of boxes of leaders."""

    leader: Ints  # int64[m], row in the layout
    offset: Ints  # int64[m, D], the box
    length: Ints
    start: Ints  # int64[m], the flat interval [start, stop) of the box; not empty
    stop: Ints
    begin: Ints  # int64[m], first of the rows below that ask for the region
    count: Ints  # int64[m], how many rows ask for it: one for each state
    row: Ints  # int64[n], row of the target shard
    tensor: Ints  # int64[n], row of its tensor in the layout

    @classmethod
    def of(cls, layout: Layout, table: ShardTable, saved: Ints) -> _Regions:
        """Leave out empty shards and absent tensors, and fold equal regions."""
        tensor = resolve_all(layout, saved)[table.tensor]
        row = np.flatnonzero((tensor >= 0) & (table.start < table.stop))
        width = max(1, layout.offset.shape[1])
        offset, length = fitted(table.offset[row], width, 0), fitted(table.length[row], width, 1)
        keys = np.column_stack((layout.leader[tensor[row]], table.start[row], table.stop[row], offset, length))
        order = order_of(list(keys.T))
        keys, row = keys[order], row[order]
        new = np.ones(len(row), dtype=np.bool_)
        new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
        begin = np.flatnonzero(new)
        leader, start, stop = keys[begin, :3].T
        offset, length = np.hsplit(keys[begin, 3:], 2)
        return cls(leader, offset, length, start, stop, begin, np.diff(begin, append=len(row)), row, tensor[row])


@dataclass(frozen=True, slots=True, eq=False)
class _Meetings:
    """The intersections of requested boxes and boxes of the layout, one row each."""

    ask: Ints  # row in :class:`_Regions`
    box: Ints  # row in the layout
    blocks: Boxes  # the intersection in the box


def _meetings(index: BoxIndex, asked: _Regions) -> _Meetings:
    """Intersect every region with the boxes of its leader."""
    wanted = decompose(asked.length, asked.start, asked.stop)
    low = asked.offset[wanted.interval] + wanted.offset
    high = low + wanted.length
    first, stop = index.candidates(asked.leader[wanted.interval], low[:, 0], high[:, 0])
    wanted_rows, box = spread(stop - first)
    box += first[wanted_rows]
    offset, length = index.offset[box], index.length[box]
    corner = np.maximum(offset, low[wanted_rows])
    extent = np.minimum(offset + length, high[wanted_rows]) - corner
    hit = np.flatnonzero((extent > 0).all(axis=1))
    return _Meetings(
        wanted.interval[wanted_rows[hit]], box[hit], Boxes(length[hit], (corner - offset)[hit], extent[hit])
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Hulls:
    """Hulls of the needed elements of a segment: ``length`` elements from position ``line`` of all patterns."""

    ask: Ints
    box: Ints
    segment: Ints
    line: Ints
    length: Ints


def _hulls(segments: Segments, met: _Meetings) -> _Hulls:
    """Find the segments of all intersections, and the first and last needed element of each."""
    base = segments.starts[met.box]
    first, stop = met.blocks.ends
    begins = segments.line[:-1]
    begin = np.searchsorted(begins, base + first, side="right") - 1
    rows, segment = spread(np.searchsorted(begins, base + stop) - begin)
    segment += begin[rows]
    base, line = base[rows], segments.line[segment]
    low = np.maximum(first[rows], line - base)
    high = np.minimum(stop[rows], segments.line[segment + 1] - base)
    ragged = np.flatnonzero((stop - first > met.blocks.extent.prod(axis=1))[rows])
    if len(ragged):  # between the rows of such a block lies what is not needed
        blocks = met.blocks.take(rows[ragged])
        before, until = blocks.before(np.stack((low[ragged], high[ragged])))
        # A segment that lies between two rows gets an empty hull.
        low[ragged], last = blocks.position(np.stack((np.minimum(before, until - 1), until - 1)))
        high[ragged] = np.where(before < until, last + 1, low[ragged])
    hit = np.flatnonzero(low < high)
    rows = rows[hit]
    return _joined(met.ask[rows], met.box[rows], segment[hit], (base + low)[hit], (base + high)[hit])


def _joined(ask: Ints, box: Ints, segment: Ints, line: Ints, stop: Ints) -> _Hulls:
    """Join the hulls in a segment to one: a flat shard may meet it with its head, its body and its tail."""
    order = order_of((segment, box, ask))
    ask, box, segment, line, stop = (column[order] for column in (ask, box, segment, line, stop))
    changes = [np.diff(column, prepend=-1) != 0 for column in (ask, box, segment)]
    heads = np.flatnonzero(np.logical_or.reduce(changes))
    if not len(heads):
        return _Hulls(ask, box, segment, line, stop)
    line, stop = np.minimum.reduceat(line, heads), np.maximum.reduceat(stop, heads)
    return _Hulls(ask[heads], box[heads], segment[heads], line, stop - line)
