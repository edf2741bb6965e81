"""Payloads of many ranks, with each distinct value once: the form in which they go up and down the tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bcp.coordinators.tree.frames import FrameError, pack_number, unpack_number

__all__ = ["Values"]


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """A sequence of byte strings of which many are equal.

    On the wire they are the number of distinct values, their lengths, their bytes, and for each member of the sequence
    an index of 1, 2 or 4 bytes; none if all are equal. How many members there are is not written: it is known.

    Attributes:
        distinct: the values, in the order of their first appearance.
        which: for each member the index of its value.
    """

    distinct: tuple[bytes, ...]
    which: NDArray[np.uint32]

    def __len__(self) -> int:
        """Return how many members the sequence has."""
        return len(self.which)

    @classmethod
    def of(cls, members: Iterable[bytes]) -> Values:
        """Find the distinct values."""
        known: dict[bytes, int] = {}
        which = [known.setdefault(member, len(known)) for member in members]
        return cls(tuple(known), np.array(which, np.uint32))

    @classmethod
    def joined(cls, pieces: Sequence[Values]) -> Values:
        """Put sequences one behind the other. Costs no Python step for a member, only for a distinct value."""
        known: dict[bytes, int] = {}
        which = []
        for piece in pieces:
            table = np.array([known.setdefault(value, len(known)) for value in piece.distinct], np.uint32)
            which.append(table[piece.which])
        return cls(tuple(known), np.concatenate(which) if which else np.zeros(0, np.uint32))

    def split(self, sizes: Sequence[int]) -> list[Values]:
        """Return the pieces of these sizes; the reverse of :meth:`joined`."""
        pieces = np.split(self.which, np.cumsum(sizes)[:-1])
        return [self._of_indices(piece) for piece in pieces]

    def members(self) -> list[bytes]:
        """Return the whole sequence."""
        return [self.distinct[index] for index in self.which.tolist()]

    def pack(self) -> bytes:
        """Return its bytes."""
        lengths = b"".join(pack_number(len(value)) for value in self.distinct)
        which = self.which.astype(_width(len(self.distinct))).tobytes() if len(self.distinct) > 1 else b""
        return b"".join((pack_number(len(self.distinct)), lengths, *self.distinct, which))

    @classmethod
    def unpack(cls, data: bytes, count: int) -> Values:
        """Read a sequence of ``count`` members. Raises :class:`~bcp.coordinators.tree.frames.FrameError`."""
        size, at = unpack_number(data, 0)
        if not (0 < size <= count and size <= len(data)):
            raise FrameError(f"{size} distinct values for {count} ranks, in {len(data)} bytes")
        lengths = []
        for _ in range(size):
            length, at = unpack_number(data, at)
            lengths.append(length)
        width = _width(size)
        expected = at + sum(lengths) + (count * width.itemsize if size > 1 else 0)
        if len(data) != expected:
            raise FrameError(f"values of {count} ranks in {len(data)} bytes instead of {expected}")
        distinct = []
        for length in lengths:
            distinct.append(data[at : at + length])
            at += length
        which = np.frombuffer(data, width, offset=at) if size > 1 else np.zeros(count, width)
        if which.max() >= size:
            raise FrameError(f"value {which.max()} of {size} distinct ones")
        return cls(tuple(distinct), which.astype(np.uint32))

    def _of_indices(self, which: NDArray[np.uint32]) -> Values:
        """Return the members that have these indices."""
        if len(self.distinct) == 1:
            return Values(self.distinct, which)
        used, first, inverse = np.unique(which, return_index=True, return_inverse=True)
        by_appearance = np.argsort(first)
        rank_of = np.empty_like(by_appearance)
        rank_of[by_appearance] = np.arange(len(used))
        distinct = tuple(self.distinct[index] for index in used[by_appearance].tolist())
        return Values(distinct, rank_of[inverse].astype(np.uint32))


def _width(size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest type that tells so many values apart."""
    return np.dtype("<u1") if size <= 1 << 8 else np.dtype("<u2") if size <= 1 << 16 else np.dtype("<u4")
