"""Boxes and flat positions, many at once: the columnar twin of :mod:`bcp.plan.box`.

Matrices have one row a box, padded on the right with length 1, and at least one column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bcp.plan.columns import Ints

__all__ = ["Boxes", "FlatBoxes", "decompose", "indices", "swept"]


def swept(runs: Ints, *weights: Ints) -> tuple[Ints, ...]:
    """Sweep over runs that may overlap: cut where one begins or ends, and add up the weights of those that are there.

    Args:
        runs: int64[n, 2], rows (first, stop), in any order.
        weights: int64[n] each; sums wrap around.

    Returns:
        int64[k, 2], all intervals between the first and the last end, in order, gaps included; and for each of the
        weights int64[k], the sum over the runs that hold the interval.

    """
    at = runs.T.ravel()
    order = np.argsort(at, kind="stable")
    at = at[order]
    ends = np.flatnonzero(at[1:] != at[:-1])  # the last event before each interval
    totals = (np.cumsum(np.concatenate((each, -each))[order])[ends] for each in weights)
    return np.stack((at[ends], at[ends + 1]), axis=1), *totals


def indices(flat: Ints, length: Ints) -> Ints:
    """int64[n, D]: the index in each dimension of flat positions of row-major arrays of these shapes."""
    out, rest = np.empty_like(length), flat
    for dim in range(length.shape[1] - 1, -1, -1):
        rest, out[:, dim] = np.divmod(rest, length[:, dim])
    return out


@dataclass(frozen=True, slots=True, eq=False)
class FlatBoxes:
    """The boxes that flat intervals consist of, m rows in the order (interval, flat).

    Attributes:
        interval: int64[m], row of the interval.
        flat: int64[m], flat position of the box's first element.
        offset: int64[m, D], first corner in the array's own coordinates.
        length: int64[m, D], extent.
    """

    interval: Ints
    flat: Ints
    offset: Ints
    length: Ints


def decompose(length: Ints, start: Ints, stop: Ints) -> FlatBoxes:
    """Decompose the flat interval [start, stop) of each array: what :func:`bcp.plan.box.flat_boxes` does, all at once.

    At most ``2 * D - 1`` boxes each; an empty interval gives none, and nothing is decomposed into elements.

    Args:
        length: int64[n, D], shapes; 0 only where the interval is empty.
        start: int64[n], first flat position.
        stop: int64[n], one past the last.

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
