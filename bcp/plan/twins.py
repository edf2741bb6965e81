"""Choose the hosts that hold each other's files, and the *twins*: ranks with equal shards that write them.

Replicas on two hosts need no network for a second copy: each host writes it from its own replica. A host is copied by
one other host, and copies one. So hosts with equal shards form rings. Hosts without an equal one form a ring, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bcp.plan.columns import Ints

__all__ = ["Twins", "choose_twins"]


@dataclass(frozen=True, slots=True)
class Twins:
    """The second holder of each file.

    Attributes:
        copied_by: int64[h], the host that gets a copy of each host's files; a host alone has itself here.
        writer: int64[n], the rank on that host with equal shards, which writes the tensors of each rank; -1 for none.
    """

    copied_by: Ints
    writer: Ints

    def of(self, rank: int) -> list[int]:
        """Return the ranks whose tensors a rank writes beside its own."""
        ranks: list[int] = np.flatnonzero(self.writer == rank).tolist()
        return ranks


def choose_twins(held: Ints, host_of: Ints, stride: int = 1) -> Twins:
    """Choose by the shards and the hosts of all ranks. Pure: equal arguments give equal twins.

    Args:
        held: int64[n], a number for the shards of each rank; equal shards have equal numbers.
        host_of: int64[n], the host of each rank. Hosts are numbered from 0, and none is left out.
        stride: least distance of two hosts that hold each other's files, if the job has hosts enough.

    Example:
        Two hosts of four hold the first half of a model, and two hold the second half:

        >>> twins = choose_twins(np.array([0, 1, 0, 1]), np.array([0, 1, 2, 3]))
        >>> twins.copied_by.tolist(), twins.writer.tolist()
        ([2, 3, 0, 1], [2, 3, 0, 1])
    """
    ranks = _Ranks.of(held, host_of)
    copied_by, alone = np.arange(len(ranks.has)), list[int]()
    for hosts in _alike(ranks.has):
        if len(hosts) > 1:
            copied_by[hosts] = _ring(ranks, hosts, stride)
        else:
            alone += hosts.tolist()
    if len(alone) > 1:
        copied_by[alone] = _ring(ranks, np.array(sorted(alone)), stride)
    elif alone and len(copied_by) > 1:
        _join(ranks, copied_by, alone[0])
    return Twins(copied_by, _writers(ranks, copied_by))


@dataclass(frozen=True, slots=True)
class _Ranks:
    held: Ints  # int64[n], numbers from 0
    host_of: Ints  # int64[n]
    has: npt.NDArray[np.bool_]  # bool[h, k], whether a host has a rank with such shards

    @classmethod
    def of(cls, held: Ints, host_of: Ints) -> _Ranks:
        distinct, numbers = np.unique(held, return_inverse=True)
        has = np.zeros((int(host_of.max()) + 1, len(distinct)), dtype=np.bool_)
        has[host_of, numbers] = True
        return cls(numbers, host_of, has)


def _alike(has: npt.NDArray[np.bool_]) -> Iterator[Ints]:
    """Yield hosts with equal shards, in order."""
    _, first, number = np.unique(np.packbits(has, axis=1), axis=0, return_index=True, return_inverse=True)
    order = np.argsort(number.ravel(), kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(number.ravel()))[:-1])
    for group in np.argsort(first).tolist():
        yield groups[group]


def _ring(ranks: _Ranks, hosts: Ints, stride: int) -> Ints:
    """Return the host that copies each of these: as many twins as can be, then the distance, then the least shift."""
    count, among = len(ranks.has), np.isin(ranks.host_of, hosts)
    place, held = np.searchsorted(hosts, ranks.host_of[among]), ranks.held[among]
    best, chosen = (-1, -1), hosts
    for shift in range(1, len(hosts)):
        others = np.roll(hosts, -shift)
        distance = (others - hosts) % count
        apart = int(np.minimum(distance, count - distance).min())
        score = int(ranks.has[others[place], held].sum()), min(apart, stride)
        if score > best:
            best, chosen = score, others
    return chosen


def _join(ranks: _Ranks, copied_by: Ints, host: int) -> None:
    """Let a host join the ring of others where that costs fewest twins."""
    number = np.zeros(ranks.has.shape, dtype=np.int64)
    np.add.at(number, (ranks.host_of, ranks.held), 1)
    before = (number * ranks.has[copied_by]).sum(axis=1)
    gained = number @ ranks.has[host].astype(np.int64) + (ranks.has @ number[host])[copied_by] - before
    gained[host] = np.iinfo(np.int64).min
    other = int(gained.argmax())
    copied_by[host], copied_by[other] = copied_by[other], host


def _writers(ranks: _Ranks, copied_by: Ints) -> Ints:
    """Give each rank a twin on the host that copies its host; ranks there take turns."""
    there: dict[tuple[int, int], list[int]] = defaultdict(list)
    places = list(zip(ranks.host_of.tolist(), ranks.held.tolist(), strict=True))
    for rank, place in enumerate(places):
        there[place].append(rank)
    writer = np.full(len(places), -1, dtype=np.int64)
    for (host, held), members in there.items():
        other = int(copied_by[host])
        twins = there.get((other, held), []) if other != host else []
        for number, rank in enumerate(members if twins else []):
            writer[rank] = twins[number % len(twins)]
    return writer
