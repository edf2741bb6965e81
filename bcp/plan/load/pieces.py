"""Which pieces of a checkpoint a box meets: binary searches in what is computed once for a layout."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import numpy as np

from bcp.plan.columns import Ints
from bcp.plan.layout import Layout

__all__ = ["Pieces", "fitted", "pieces_of"]

LATELY = 4
"""So many layouts are remembered; a job saves and loads one or two."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The pieces of a layout, and how to find them.

    All tensors are put behind each other along their first dimension: index i of it, in tensor t, is ``base[t] + i``.

    Attributes:
        offset: int64[p, D], as in the layout, but with at least one column.
        length: int64[p, D], the same.
        base: int64[n], where each tensor begins.
        begin: int64[p], where each piece begins; not decreasing.
        reach: int64[p], how far this piece and all before it reach; not decreasing.
    """

    offset: Ints
    length: Ints
    base: Ints
    begin: Ints
    reach: Ints

    @classmethod
    def of(cls, layout: Layout) -> Pieces:
        """Index the pieces of a layout."""
        width = max(1, layout.offset.shape[1])  # 0 where all tensors are 0-d: one element each
        offset, length = fitted(layout.offset, width, 0), fitted(layout.length, width, 1)
        extent = fitted(layout.tensors.shape, width, 1)[:, 0]
        base = np.cumsum(extent) - extent
        begin = base[layout.piece_tensor] + offset[:, 0]
        return cls(offset, length, base, begin, np.maximum.accumulate(begin + length[:, 0]))

    def candidates(self, tensor: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
        """Return the pieces [first, stop) that may share elements with boxes, by the first dimension alone.

        All that do are among them. Where pieces are cut along the first dimension, few others are.

        Args:
            tensor: int64[m], row of the leader whose pieces they are.
            low: int64[m], first index in the first dimension.
            high: int64[m], one past the last; above ``low``.

        """
        base = self.base[tensor]
        return np.searchsorted(self.reach, base + low, side="right"), np.searchsorted(self.begin, base + high)


def fitted(matrix: Ints, width: int, fill: int) -> Ints:
    """Return a matrix of that width; columns are appended or left out on the right, where no tensor in it has any."""
    given = matrix.shape[1]
    return matrix[:, :width] if given >= width else np.pad(matrix, ((0, 0), (0, width - given)), constant_values=fill)


_lately: list[tuple[Layout, Pieces]] = []
_lock = Lock()


def pieces_of(layout: Layout) -> Pieces:
    """Return the index of a layout; the last few are remembered, for further loads and for ranks of one process."""
    with _lock:
        for known, pieces in _lately:
            if known is layout:
                return pieces
    pieces = Pieces.of(layout)
    with _lock:
        _lately.insert(0, (layout, pieces))
        del _lately[LATELY:]
    return pieces
