"""Boxes (the paper's ShardMeta, sec. 3.2), and flat intervals inside them (sec. 4.4).

:class:`Box` is one box. :class:`Boxes` and :class:`FlatBoxes` hold many as columns: matrices with one row a box, padded
on the right with length 1, and at least one column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bcp.plan.columns import Ints

__all__ = ["Box", "Boxes", "FlatBoxes", "cut", "decompose", "flat_boxes", "indices", "sweep_intervals"]

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Box:
    """An n-dimensional block of a global tensor.

    Attributes:
        offsets: first index in each dimension, in elements.
        lengths: how many indices in each dimension; a 0-d tensor has the empty tuple in both.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that is all of a tensor of that shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """How many elements the box holds; 1 for a 0-d tensor."""
        return math.prod(self.lengths)

    def intersect(self, other: Box) -> Box | None:
        """Return the block that both share, or None if they share no element."""
        low = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True)
        )
        lengths = tuple(h - lo for lo, h in zip(low, high, strict=True))
        return None if any(n <= 0 for n in lengths) else Box(low, lengths)

    def within(self, outer: Box) -> Box:
        """Return the same block with offsets counted from ``outer``'s first corner."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)


def flat_boxes(lengths: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Decompose the flat interval [start, stop) of a row-major array into boxes, in flat order.

    A ragged head, full rows and a ragged tail: at most ``2 * ndim - 1`` boxes (paper sec. 4.4, Fig. 11).

    Yields:
        The flat position of the box's first element, and the box in the array's own coordinates. Each box is
        contiguous in flat order.
    """
    if start >= stop:
        return
    if not lengths:
        yield 0, Box((), ())
        return
    row = math.prod(lengths[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        for flat, inner in flat_boxes(lengths[1:], start - first * row, stop - first * row):
            yield first * row + flat, Box((first, *inner.offsets), (1, *inner.lengths))
        return
    head = -(-start // row)
    tail = stop // row
    if start < head * row:
        yield from flat_boxes(lengths, start, head * row)
    if head < tail:
        rest = lengths[1:]
        yield head * row, Box((head, *(0,) * len(rest)), (tail - head, *rest))
    if tail * row < stop:
        yield from flat_boxes(lengths, tail * row, stop)


def cut(box: Box, most: int) -> Iterator[Box]:
    """Yield blocks of so many elements at most that make up a box, in row-major order."""
    if box.numel <= most:
        yield box
        return
    dim = next(dim for dim, length in enumerate(box.lengths) if length > 1)
    row = math.prod(box.lengths[dim + 1 :])
    step = max(most // row, 1)
    for first in range(0, box.lengths[dim], step):
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[dim], lengths[dim] = offsets[dim] + first, min(step, lengths[dim] - first)
        yield from cut(Box(tuple(offsets), tuple(lengths)), most)


def sweep_intervals(runs: Ints, *weights: Ints) -> tuple[Ints, ...]:
    """Sweep overlapping intervals: split them at every boundary, and sum the weights that cover each interval.

    ``runs`` has rows (first, stop) in any order, int64[n, 2]; each of ``weights`` is int64[n]. Returns all intervals
    between the first and the last boundary, in order and with gaps, int64[k, 2]. Then, for each column of weights,
    int64[k] follows: the sum over the runs that hold the interval. Sums wrap around.
    """
    boundaries = runs.T.ravel()
    order = np.argsort(boundaries, kind="stable")
    boundaries = boundaries[order]
    ends = np.flatnonzero(boundaries[1:] != boundaries[:-1])  # the last event before each interval
    totals = (np.cumsum(np.concatenate((weight, -weight))[order])[ends] for weight in weights)
    return np.stack((boundaries[ends], boundaries[ends + 1]), axis=1), *totals


def indices(flat: Ints, length: Ints) -> Ints:
    """Return int64[n, D]: the index in each dimension of flat positions of row-major arrays of these shapes."""
    out, rest = np.empty_like(length), flat
    for dim in range(length.shape[1] - 1, -1, -1):
        rest, out[:, dim] = np.divmod(rest, length[:, dim])
    return out


@dataclass(frozen=True, slots=True, eq=False)
class FlatBoxes:
    """The boxes that flat intervals consist of, m rows in the order (interval, flat)."""

    interval: Ints  # int64[m], row of the interval
    flat: Ints  # int64[m], flat position of the box's first element
    offset: Ints  # int64[m, D], first corner in the array's own coordinates
    length: Ints  # int64[m, D], extent


def decompose(length: Ints, start: Ints, stop: Ints) -> FlatBoxes:
    """Decompose the flat interval [start, stop) of each array, as :func:`flat_boxes` does, all at once.

    Shapes are int64[n, D], with 0 only if the interval is empty. Each interval gives at most ``2 * D - 1`` boxes.
    """
    # Where to cut, from the outside in: at every level the interval is rounded inwards to whole rows, until it lies
    # in a single row. What the rounding takes off at a level is a box: one of the head, or one of the tail.
    heads, tails, row = [start], [stop], np.ones_like(start)
    for dim in range(length.shape[1] - 1, 0, -1):
        row = row * np.maximum(length[:, dim], 1)
        up, down = -(-start // row) * row, stop // row * row
        fits = up <= down
        heads.append(np.where(fits, up, heads[-1]))
        tails.append(np.where(fits, down, tails[-1]))
    cuts = np.stack(heads + tails[::-1], axis=1)
    interval, level = np.nonzero(cuts[:, :-1] < cuts[:, 1:])
    first, last, shape = cuts[interval, level], cuts[interval, level + 1] - 1, length[interval]
    offset = indices(first, shape)
    return FlatBoxes(interval, first, offset, indices(last, shape) - offset + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Boxes of arrays: row i is ``low[i]`` to ``low[i] + extent[i]`` of an array of shape ``length[i]``."""

    length: Ints
    low: Ints
    extent: Ints

    def take(self, rows: Ints) -> Boxes:
        """Return some of the rows, some of them repeatedly."""
        return Boxes(self.length[rows], self.low[rows], self.extent[rows])

    @property
    def ends(self) -> tuple[Ints, Ints]:
        """Flat position in its array of the first element of each block, and of the last one + 1."""
        first, last = np.zeros(len(self.low), dtype=np.int64), np.zeros(len(self.low), dtype=np.int64)
        for length, low, extent in zip(self.length.T, self.low.T, self.extent.T, strict=True):
            first, last = first * length + low, last * length + low + extent - 1
        return first, last + 1

    def before(self, flat: Ints) -> Ints:
        """Count the elements of each block that come before flat position 0 <= p <= numel of its array.

        ``flat`` may have several rows of positions: int64[..., n].
        """
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
        """Return the flat position in its array of an element of each block, given by its row-major number."""
        flat, rest, rest_block = np.zeros_like(ordinal), ordinal, self.extent.prod(axis=1)
        for length, low, extent in zip(self.length.T, self.low.T, self.extent.T, strict=True):
            rest_block = rest_block // extent
            index, rest = np.divmod(rest, rest_block)
            flat = flat * length + low + index
        return flat
