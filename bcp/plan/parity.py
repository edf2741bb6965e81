"""Groups of hosts that keep the parity of each other's files, and the cut of these files into stripes (RAID 5).

The files of a host stand in one row. The row is cut into one segment for each other host of the group. A host keeps the
XOR of the segments that the others have for it, its *stripe*. So a lost host takes no segment away together with its
parity, and the stripes of the others lead to all of its segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bcp.plan.columns import Ints

__all__ = ["Group", "Row", "Stripe", "groups_of", "groups_with", "segment_for", "stripe_of"]


def groups_of(count: int, most: int, stride: int = 1) -> list[tuple[int, ...]]:
    """Divide hosts into groups of about equal size, with ``most`` hosts at most.

    Neighbours in a group are ``stride`` hosts apart. With the number of hosts in a rack, a group of no more hosts than
    there are racks has one host of each rack at most.

    Args:
        count: number of hosts.
        most: hosts of a group, from 3 on. So no group has a single host, unless the job has no other.
        stride: as said.

    Example:
        >>> groups_of(8, most=4, stride=2)
        [(0, 2, 4, 6), (1, 3, 5, 7)]

    """
    order = [place for first in range(min(stride, count)) for place in range(first, count, stride)]
    number = -(-count // most)
    bounds = [count * each // number for each in range(number + 1)]
    return [tuple(order[start:stop]) for start, stop in pairwise(bounds)]


def stripe_of(member: int, segment: int, size: int) -> int:
    """Return the member of a group of so many hosts that keeps the parity of a segment of another member."""
    return (member + 1 + segment) % size


def segment_for(member: int, stripe: int, size: int) -> int:
    """Return the segment of a member that is in the stripe of another one."""
    return (stripe - member - 1) % size


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The files of one host in one save behind each other, cut into segments where blocks begin.

    Attributes:
        keys: the files, in order.
        begin: int64[f + 1], where each file begins in the row; last the bytes of the row.
        bounds: int64[s + 1], where each segment begins in the row; last the bytes of the row.
    """

    keys: Sequence[str]
    begin: Ints
    bounds: Ints
    _number: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def cut(cls, keys: Sequence[str], blocks: Sequence[Ints], nbytes: Sequence[int], segments: int) -> Row:
        """Cut files into so many segments. None is longer than its part of the row and one block.

        Args:
            keys: the files.
            blocks: where the blocks of each file begin in it.
            nbytes: bytes of each file.
            segments: how many.

        """
        begin = np.concatenate([[0], np.cumsum(nbytes)]).astype(np.int64)
        starts = [first + each for first, each in zip(begin.tolist(), blocks, strict=False)]
        start = np.concatenate([np.zeros(0, np.int64), *starts])
        total = int(begin[-1])
        inner = np.searchsorted(start * segments // max(total, 1), np.arange(1, segments))
        bounds = np.concatenate([[0], np.append(start, total)[inner], [total]]).astype(np.int64)
        return cls(keys, begin, bounds, {key: number for number, key in enumerate(keys)})

    def nbytes(self, segment: int) -> int:
        """Return the bytes of a segment."""
        return int(self.bounds[segment + 1] - self.bounds[segment])

    def pieces(self, segment: int, start: int, stop: int) -> list[tuple[str, int, int]]:
        """Return the bytes [start, stop) of a segment, as far as it has them: file, first byte and end in the file."""
        first = int(self.bounds[segment]) + start
        last = min(int(self.bounds[segment]) + stop, int(self.bounds[segment + 1]))
        found = []
        for key, begin, end in zip(self.keys, self.begin[:-1].tolist(), self.begin[1:].tolist(), strict=True):
            if max(first, begin) < min(last, end):
                found.append((key, max(first, begin) - begin, min(last, end) - begin))
        return found

    def segments(self, key: str, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return where the bytes [start, stop) of a file are, as far as it has them: segment, first byte and end in it.

        Raises:
            KeyError: the host has no such file.

        """
        base, limit = self.begin[self._number[key] : self._number[key] + 2].tolist()
        found = []
        for segment, (begin, end) in enumerate(zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True)):
            first, last = max(base + start, begin), min(base + stop, limit, end)
            if first < last:
                found.append((segment, first - begin, last - begin))
        return found


@dataclass(frozen=True, slots=True)
class Stripe:
    """The parity that one host has of the files of its group.

    Attributes:
        operation: id of the save.
        place: number of the host in the group.
        members: ranks whose files each host of the group has, of that save.
    """

    operation: str
    place: int
    members: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Hosts that have the parity of each other's files in one save.

    Attributes:
        members: ranks whose files each of them has had.
        holder: int64[g], the host that has each stripe, by its number; -1 for a lost one.
    """

    members: tuple[tuple[int, ...], ...]
    holder: Ints

    def rebuilds(self, member: int, is_held: npt.NDArray[np.bool_]) -> bool:
        """Whether the files of a member follow from those of all others, and from their stripes.

        Args:
            member: number of the host in the group.
            is_held: bool[world_size], whether some host has the files of a rank.

        """
        others = [each for each in range(len(self.members)) if each != member]
        return all(self.holder[each] >= 0 and is_held[list(self.members[each])].all() for each in others)

    @property
    def holders(self) -> Ints:
        """The hosts that have stripes; int64[n]."""
        return self.holder[self.holder >= 0]


def groups_with(stripes: Sequence[tuple[int, Stripe]], world_size: int) -> list[Group]:
    """Put the stripes of one save together; those that fit no group of this world are left out.

    Args:
        stripes: with the host that has each.
        world_size: how many ranks have saved.

    """
    holders: dict[tuple[tuple[int, ...], ...], dict[int, int]] = {}
    for host, stripe in stripes:
        holders.setdefault(stripe.members, {})[stripe.place] = host
    found = []
    for members, places in holders.items():
        ranks = [rank for member in members for rank in member]
        if len({*ranks}) == len(ranks) and all(0 <= rank < world_size for rank in ranks):
            found.append(Group(members, np.array([places.get(each, -1) for each in range(len(members))], np.int64)))
    return found
