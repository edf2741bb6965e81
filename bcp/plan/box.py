"""Boxes (the paper's ShardMeta, sec. 3.2) and flat intervals inside them (sec. 4.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Box", "flat_boxes"]


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
        """Return the block that both share, or None where they share no element."""
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

    Args:
        lengths: shape of the array.
        start: first flat position.
        stop: one past the last; ``start == stop`` gives nothing.

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
