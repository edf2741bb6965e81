"""How pieces are cut into segments, with each way to cut them once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from bcp.plan.columns import Ints, distinct_rows, mix, runs

__all__ = ["Segments"]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """The segments of p pieces: k patterns, s segments in all patterns together.

    Tensor-parallel ranks cut their pieces alike, and so do pipeline stages of as many layers: a piece is cut as its
    *pattern* says, in files counted from a first one of its own. 405B parameters on 8,960 ranks, in Megatron's buckets,
    are 10,618 pieces and 298,762 segments, but 296 patterns of 6,412.

    Attributes:
        file: int64[p], row in the layout's file columns, from which the piece's segments count.
        pattern: int64[p], how the piece is cut.
        begin: int64[k + 1]; pattern i consists of the segments ``begin[i]`` to ``begin[i + 1]``.
        line: int64[s + 1], where each segment begins, in elements, with all patterns end to end; then their end.
        step: int64[s], its file, counted from the piece's.
        at: int64[s], its first element, counted from the start of a plane of that file.
    """

    file: Ints
    pattern: Ints
    begin: Ints
    line: Ints
    step: Ints
    at: Ints

    def __len__(self) -> int:
        """Return how many segments the patterns have."""
        return len(self.at)

    @classmethod
    def of(cls, number: Ints, length: Ints, file: Ints, at: Ints) -> Segments:
        """Give every piece a pattern of its own.

        Args:
            number: int64[p], of how many segments each piece consists; at least one.
            length: int64[n], elements of each segment; those of a piece tile it, in row-major order.
            file: int64[n], its file.
            at: int64[n], its first element, counted from the start of a plane.

        """
        begin = np.concatenate(([0], np.cumsum(number)))
        first = file[begin[:-1]]
        line = np.concatenate(([0], np.cumsum(length)))
        return cls(first, np.arange(len(number)), begin, line, file - np.repeat(first, number), at)

    @property
    def length(self) -> Ints:
        """int64[s]: elements of each segment."""
        return np.diff(self.line)

    @property
    def starts(self) -> Ints:
        """int64[p]: where each piece's pattern begins on the line, in elements."""
        return self.line[self.begin[self.pattern]]

    def of_pieces(self, pieces: Ints) -> tuple[Ints, Ints]:
        """Return (piece, segment) of all segments of these pieces, in order."""
        pattern = self.pattern[pieces]
        number = np.diff(self.begin)[pattern]
        return np.repeat(pieces, number), runs(self.begin[pattern], number)

    def folded(self) -> Segments:
        """Return the same with equal patterns once, in the order of the pieces.

        Patterns are hashed, and each is compared with the first one of its hash.
        """
        number, length = np.diff(self.begin), self.length
        inside = np.arange(len(self)) - np.repeat(self.begin[:-1], number)
        columns = [length, self.step, self.at, inside]
        for seed in count():
            word = np.zeros(len(self), dtype=np.uint64)
            for column in columns:
                word = mix(word ^ column.astype(np.uint64), seed)
            total = np.add.reduceat(word, self.begin[:-1]) if len(number) else word
            key = np.column_stack([number, total.view(np.int64)])[self.pattern]
            first, code = distinct_rows(key)
            of = self.pattern[first]  # the pattern that stands for each distinct one
            same = runs(self.begin[of[code]], number[self.pattern])
            mine = runs(self.begin[self.pattern], number[self.pattern])
            if all(np.array_equal(column[same], column[mine]) for column in columns):
                break
        kept = runs(self.begin[of], number[of])
        return Segments(
            self.file,
            code,
            np.concatenate(([0], np.cumsum(number[of]))),
            np.concatenate(([0], np.cumsum(length[kept]))),
            self.step[kept],
            self.at[kept],
        )
