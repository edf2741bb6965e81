"""Strided views of memory as numbers: whether two of them share a byte, and whether one has an element twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from bcp.runtime.process import cached_property

__all__ = ["Strided", "overlaps_itself", "row_major"]


@dataclass(frozen=True)
class Strided:
    """A view with at least one element; strides are not negative, as in torch.

    Example:
        >>> left, right = (Strided(start, 4, (3, 2), (16, 4)) for start in (0, 8))  # columns of a 3 x 4 matrix
        >>> left.meets(right)
        False
    """

    start: int  # address of the first byte
    itemsize: int  # bytes of an element
    lengths: Sequence[int]  # elements of each dimension
    strides: Sequence[int]  # bytes from one element of a dimension to the next

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.start + self.itemsize + sum(stride * last for stride, last in self._steps)

    @cached_property
    def order(self) -> tuple[tuple[int, int], ...]:
        """(length, stride) of the fewest dimensions that have the same elements in the same order."""
        dimensions: list[tuple[int, int]] = []
        for length, stride in zip(self.lengths, self.strides, strict=True):
            if length == 1:
                continue
            if dimensions and dimensions[-1][1] == stride * length:
                dimensions[-1] = (dimensions[-1][0] * length, stride)
            else:
                dimensions.append((length, stride))
        return tuple(dimensions)

    @property
    def is_run(self) -> bool:
        """Whether its elements are one run of bytes, in order."""
        return len(self.order) <= 1 and all(stride == self.itemsize for _, stride in self.order)

    def meets(self, other: Strided) -> bool:
        """Whether both have a byte in common; exact."""
        if self.stop <= other.start or other.stop <= self.start:
            return False
        # start + steps + byte = other.start + its steps + its byte, with the right side counted from its end
        terms = [*self._steps, *other._steps, (1, self.itemsize - 1), (1, other.itemsize - 1)]
        return _solvable(terms, other.stop - 1 - self.start)

    @property
    def _steps(self) -> list[tuple[int, int]]:
        return [(stride, length - 1) for length, stride in self.order]


def overlaps_itself(lengths: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a view are the same memory; exact. Strides are in elements, and not negative.

    Example:
        >>> overlaps_itself((4, 3), (1, 1))  # a sliding window
        True
    """
    if 0 in lengths:
        return False
    steps = sorted((stride, length - 1) for length, stride in zip(lengths, strides, strict=True) if length > 1)
    reach = accumulate((stride * last for stride, last in steps), initial=0)
    if all(stride > before for (stride, _), before in zip(steps, reach, strict=False)):  # as a rule
        return False
    # Two elements differ first in dimension i, by 1 or more; in each later dimension by -last to last.
    for number, (stride, last) in enumerate(steps):
        later = steps[number + 1 :]
        terms = [(stride, last - 1), *((step, 2 * most) for step, most in later)]
        if _solvable(terms, sum(step * most for step, most in later) - stride):
            return True
    return False


def _solvable(terms: Iterable[tuple[int, int]], target: int) -> bool:
    """Whether factors 0 <= x <= bound exist for all (coefficient, bound) with which the coefficients sum to the target.

    Coefficients are tried from the largest one down. The reach of the smaller ones leaves few factors to each: one or
    two for views of one larger tensor.
    """
    bounds: dict[int, int] = {}
    for coefficient, bound in terms:
        if coefficient:
            bounds[coefficient] = bounds.get(coefficient, 0) + bound
    large_first = sorted(bounds.items(), reverse=True)
    reach = list(accumulate((step * bound for step, bound in reversed(large_first)), initial=0))[::-1]
    divisor = list(accumulate((step for step, _ in reversed(large_first)), gcd, initial=0))[::-1]

    def search(number: int, rest: int) -> bool:
        if number == len(large_first):
            return rest == 0
        if rest < 0 or rest % divisor[number]:
            return False
        coefficient, bound = large_first[number]
        least = max(0, -(-(rest - reach[number + 1]) // coefficient))
        most = min(bound, rest // coefficient)
        return any(search(number + 1, rest - coefficient * factor) for factor in range(least, most + 1))

    return search(0, target)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor; an empty dimension counts as 1, as in torch.

    Example:
        >>> row_major((3, 0, 2))
        (2, 2, 1)
    """
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
