"""Find the newest whole snapshot in the memories of hosts, and divide its digests (Gemini's recovery, paper sec. 7).

The save has proved that the files of all ranks tile every tensor. So a snapshot is whole if each rank's files have a
holder: a set difference, for which no tensor is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bcp.plan.columns import Ints
from bcp.plan.parity import Group, Stripe, groups_with

__all__ = ["Holding", "Whole", "divide", "judged", "newest_whole"]


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """The marked files of one save on one host.

    Attributes:
        operation: id of the save.
        step: of the training.
        world_size: how many ranks have saved.
        ranks: int64[n], those whose files the host has, each once.
    """

    operation: str
    step: int
    world_size: int
    ranks: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A snapshot of which each rank's files have a holder, or follow from parity.

    Attributes:
        operation: id of the save.
        step: of the training.
        world_size: how many ranks have saved.
        holder: int64[p], hosts, by their number; those that hold rank r stand at ``begin[r]`` to ``begin[r + 1]``. Of
            ranks whose files are to be rebuilt, these are the hosts with parity: they know the receipt.
        begin: int64[world_size + 1].
        rebuilt: int64[n], ranks whose files no host has, and that follow from parity.
        groups: hosts with parity of each other's files.
    """

    operation: str
    step: int
    world_size: int
    holder: Ints
    begin: Ints
    rebuilt: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    groups: Sequence[Group] = ()

    def of(self, rank: int) -> Ints:
        """Return the hosts that hold a rank's files, or parity from which they follow."""
        return self.holder[self.begin[rank] : self.begin[rank + 1]]

    def is_held(self) -> npt.NDArray[np.bool_]:
        """Return whether some host has the files of each rank; bool[world_size]."""
        held = np.ones(self.world_size, np.bool_)
        held[self.rebuilt] = False
        return held


def newest_whole(
    told: Sequence[Sequence[Holding]],
    without: Collection[tuple[int, str]] = (),
    parity: Sequence[Sequence[Stripe]] = (),
) -> tuple[Whole | None, Mapping[str, str]]:
    """Return the snapshot of the latest step that is whole, and why later ones are not, by their operations.

    The arguments are those of :func:`judged`.
    """
    reasons: dict[str, str] = {}
    for operation, whole in judged(told, without, parity):
        if isinstance(whole, Whole):
            return whole, reasons
        reasons[operation] = whole
    return None, reasons


def judged(
    told: Sequence[Sequence[Holding]],
    without: Collection[tuple[int, str]] = (),
    parity: Sequence[Sequence[Stripe]] = (),
) -> Iterator[tuple[str, Whole | str]]:
    """Yield the operation of each snapshot, the latest step first, with its holders; or why it is not whole.

    Args:
        told: the holdings of each host.
        without: hosts and operations whose files turned out to be damaged.
        parity: the stripes of each host.

    """
    found: dict[str, list[tuple[int, Holding]]] = {}
    for host, holdings in enumerate(told):
        for holding in holdings:
            if (host, holding.operation) not in without:
                found.setdefault(holding.operation, []).append((host, holding))
    stripes: dict[str, list[tuple[int, Stripe]]] = {}
    for host, there in enumerate(parity):
        for stripe in there:
            if (host, stripe.operation) not in without:
                stripes.setdefault(stripe.operation, []).append((host, stripe))
    for operation, held in sorted(found.items(), key=lambda each: (-each[1][0][1].step, each[0])):
        whole = _whole(held, stripes.get(operation, ()))
        yield operation, whole if isinstance(whole, Whole) else f"step {held[0][1].step}: {whole}"


def _whole(held: Sequence[tuple[int, Holding]], stripes: Sequence[tuple[int, Stripe]]) -> Whole | str:
    """Return a snapshot with the hosts that hold it; or why it is not whole."""
    first = held[0][1]
    if any((each.step, each.world_size) != (first.step, first.world_size) for _, each in held):
        return "hosts disagree about its step or its number of ranks"
    ranks = np.concatenate([each.ranks for _, each in held])
    hosts = np.repeat([host for host, _ in held], [len(each.ranks) for _, each in held])
    count = np.bincount(ranks, minlength=first.world_size)
    if len(count) > first.world_size:
        return "a host has files of a rank that there was not"
    groups = groups_with(stripes, first.world_size)
    rebuilt = _rebuilt(groups, count > 0)
    if (lost := np.setdiff1d(np.flatnonzero(count == 0), [*rebuilt])).size:
        more = f" and {lost.size - 1} more" if lost.size > 1 else ""
        return f"no host has the files of rank {lost[0]}{more}"
    ranks = np.concatenate([ranks, *(np.full(len(there), rank) for rank, there in rebuilt.items())])
    hosts = np.concatenate([hosts, *rebuilt.values()])
    order = np.argsort(ranks, kind="stable")
    begin = np.concatenate([[0], np.cumsum(np.bincount(ranks, minlength=first.world_size))])
    lost = np.array(sorted(rebuilt), np.int64)
    return Whole(first.operation, first.step, first.world_size, hosts[order], begin, lost, groups)


def _rebuilt(groups: Sequence[Group], is_held: npt.NDArray[np.bool_]) -> dict[int, Ints]:
    """Return the ranks whose files no host has and that follow from parity, each with the hosts that have parity."""
    found: dict[int, Ints] = {}
    for group in groups:
        for member, ranks in enumerate(group.members):
            lost = [rank for rank in ranks if not is_held[rank]]
            if lost and group.rebuilds(member, is_held):
                found |= dict.fromkeys(lost, group.holders)
    return found


def divide(whole: Whole, host_of: Sequence[int]) -> Ints:
    """Let each saved rank's files be digested by one reader on a host that has them, evenly; int64[world_size].

    Args:
        whole: the snapshot.
        host_of: the host of each reader. Each host of the snapshot has one.

    """
    readers: dict[int, list[int]] = {}
    for reader, host in enumerate(host_of):
        readers.setdefault(host, []).append(reader)
    turns = dict.fromkeys(readers, 0)
    chosen = np.empty(whole.world_size, np.int64)
    for rank in range(whole.world_size):
        host = min(whole.of(rank).tolist(), key=lambda each: turns[each] / len(readers[each]))
        chosen[rank] = readers[host][turns[host] % len(readers[host])]
        turns[host] += 1
    return chosen
