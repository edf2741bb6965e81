"""Find the newest whole snapshot in the memories of hosts, and divide its digests (Gemini's recovery, paper sec. 7).

The save has proved that the files of all ranks tile every tensor. So a snapshot is whole if each rank's files have a
holder: a set difference, for which no tensor is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bcp.plan.columns import Ints

__all__ = ["Holding", "Whole", "divide", "newest_whole"]


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
    """A snapshot of which each rank's files have a holder.

    Attributes:
        operation: id of the save.
        step: of the training.
        world_size: how many ranks have saved.
        holder: int64[p], hosts, by their number; those that hold rank r stand at ``begin[r]`` to ``begin[r + 1]``.
        begin: int64[world_size + 1].
    """

    operation: str
    step: int
    world_size: int
    holder: Ints
    begin: Ints

    def of(self, rank: int) -> Ints:
        """Return the hosts that hold a rank's files."""
        return self.holder[self.begin[rank] : self.begin[rank + 1]]


def newest_whole(
    told: Sequence[Sequence[Holding]], without: Collection[tuple[int, str]] = ()
) -> tuple[Whole | None, Mapping[str, str]]:
    """Return the snapshot of the latest step that is whole, and why later ones are not, by their operations.

    Args:
        told: the holdings of each host.
        without: hosts and operations whose files turned out to be damaged.

    """
    found: dict[str, list[tuple[int, Holding]]] = {}
    for host, holdings in enumerate(told):
        for holding in holdings:
            if (host, holding.operation) not in without:
                found.setdefault(holding.operation, []).append((host, holding))
    reasons = {}
    for operation, held in sorted(found.items(), key=lambda each: (-each[1][0][1].step, each[0])):
        first = held[0][1]
        if any((each.step, each.world_size) != (first.step, first.world_size) for _, each in held):
            reasons[operation] = f"step {first.step}: hosts disagree about its step or its number of ranks"
            continue
        ranks = np.concatenate([each.ranks for _, each in held])
        hosts = np.repeat([host for host, _ in held], [len(each.ranks) for _, each in held])
        count = np.bincount(ranks, minlength=first.world_size)
        if len(count) > first.world_size:
            reasons[operation] = f"step {first.step}: a host has files of a rank that there was not"
        elif (lost := np.flatnonzero(count == 0)).size:
            more = f" and {lost.size - 1} more" if lost.size > 1 else ""
            reasons[operation] = f"step {first.step}: no host has the files of rank {lost[0]}{more}"
        else:
            order = np.argsort(ranks, kind="stable")
            begin = np.concatenate([[0], np.cumsum(count)])
            return Whole(operation, first.step, first.world_size, hosts[order], begin), reasons
    return None, reasons


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
