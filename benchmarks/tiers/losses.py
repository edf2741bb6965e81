"""Which losses of hosts a snapshot survives in memory, and how long the choice of a snapshot takes on a large job.

The library says who copies whom (:meth:`bcp.tiers.recovery.Hosts.copied_by`) and what is whole
(:func:`bcp.plan.holders.newest_whole`). The job is that of ``benchmarks/llama.py``; no tensor of it is ever made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bcp.plan.holders import Holding, divide, newest_whole
from bcp.tiers.recovery import Hosts
from benchmarks.figures import Figures, cpu_ms
from benchmarks.llama import Job
from benchmarks.speed.tables import Table, plain

__all__ = ["Cluster", "losses", "planning"]

JOB = Job(8, 70, 16, "A")
RANKS_PER_HOST, HOSTS_PER_RACK = 8, 8
GENERATIONS = 3
PLANNING_MS = 250.0
RANDOM = (1, 2, 3, 4, 8, 16, 32)
WAYS = ((1, 1), (2, 1), (2, HOSTS_PER_RACK), (3, 1), (3, HOSTS_PER_RACK))
"""Holders of each file (m), and the stride between a host and the one that copies it."""


@dataclass(frozen=True)
class Cluster:
    """The hosts of a job with copies of each other's snapshots.

    Attributes:
        count: how many hosts.
        per_host: ranks of each.
        copies: holders of each file.
        stride: hosts between a host and the one that copies it.
    """

    count: int
    per_host: int
    copies: int
    stride: int

    @cached_property
    def held(self) -> list[list[int]]:
        """The hosts whose files each host has, its own first."""
        hosts = Hosts(tuple(f"host-{number}" for number in range(self.count)), ("",) * self.count)
        number = {name: place for place, name in enumerate(hosts.names)}
        sources = (hosts.copied_by(name, self.copies - 1, self.stride).nodes for name in hosts.names)
        return [[place, *(number[name] for name in names)] for place, names in enumerate(sources)]

    @cached_property
    def holdings(self) -> list[Holding]:
        """What each host tells of one snapshot."""
        return [self._holding("0" * 16, 1, own) for own in self.held]

    def generations(self, count: int, lost: Sequence[int]) -> list[list[Holding]]:
        """Return what each host tells of some snapshots; of the newest one some hosts have nothing."""
        told = []
        for place, own in enumerate(self.held):
            steps = range(1, count if place in lost else count + 1)
            told.append([self._holding(f"{step:016x}", step, own) for step in steps])
        return told

    def survives(self, lost: Sequence[int]) -> bool:
        """Whether the others have all files of a snapshot."""
        gone = set(lost)
        told = [[] if place in gone else [holding] for place, holding in enumerate(self.holdings)]
        return newest_whole(told)[0] is not None

    def _holding(self, operation: str, step: int, own: Sequence[int]) -> Holding:
        ranks = (np.array(own)[:, None] * self.per_host + np.arange(self.per_host)).reshape(-1)
        return Holding(operation, step, self.count * self.per_host, ranks)


def planning(figures: Figures) -> None:
    """Measure the choice among three snapshots of 8,960 ranks, the newest of which a lost host and its copy spoil."""
    hosts = JOB.world_size // RANKS_PER_HOST
    figures.head(f"Llama-3.1-405B on {JOB.world_size:,} ranks and {hosts:,} hosts, {GENERATIONS} snapshots in memory")
    cluster = Cluster(hosts, RANKS_PER_HOST, 2, HOSTS_PER_RACK)
    told = cluster.generations(GENERATIONS, lost=(40, 40 + HOSTS_PER_RACK))
    host_of = np.repeat(np.arange(hosts), RANKS_PER_HOST).tolist()
    whole, reasons = newest_whole(told)
    if whole is None or whole.step != GENERATIONS - 1 or len(reasons) != 1:
        raise RuntimeError(f"{whole} was chosen, for {reasons}")
    choice, division = cpu_ms(lambda: newest_whole(told)), cpu_ms(lambda: divide(whole, host_of))
    figures.add("choice of the newest whole snapshot, on rank 0", choice, "ms")
    figures.add("division of its files among their readers, on each rank", division, "ms")
    figures.add("planning of a recovery, both", choice + division, "ms", PLANNING_MS)


def losses(trials: int, figures: Figures) -> None:
    """Show which shares of random losses, and of losses of racks, a snapshot survives; check what is promised.

    Args:
        trials: random losses of each kind.
        figures: get the promises.

    """
    hosts = JOB.world_size // RANKS_PER_HOST
    clusters = [Cluster(hosts, RANKS_PER_HOST, *way) for way in WAYS]
    columns = ["lost", *(f"m={each.copies}, stride {each.stride}" for each in clusters)]
    rows, share = [], dict[tuple[str, int, int], float]()
    for name, cases in _cases(hosts, trials):
        each = [sum(map(cluster.survives, cases)) / len(cases) for cluster in clusters]
        share |= {(name, *way): found for way, found in zip(WAYS, each, strict=True)}
        rows.append([f"{name} ({len(cases):,})", *(f"{found:.3f}" for found in each)])
    title = f"Share of losses that a snapshot survives in memory: {hosts:,} hosts, {HOSTS_PER_RACK} in a rack (cases)"
    print(plain(Table(title, columns, rows)), flush=True)
    for name, copies, stride in (("1 host", 2, 1), ("1 host", 2, HOSTS_PER_RACK), ("2 hosts", 3, 1)):
        _promise(f"any {name}, m={copies}, stride {stride}", share[name, copies, stride], figures)
    for copies in (2, 3):
        _promise(f"any rack, m={copies}, stride {HOSTS_PER_RACK}", share["1 rack", copies, HOSTS_PER_RACK], figures)


def _promise(what: str, share: float, figures: Figures) -> None:
    figures.add(f"losses survived: {what}", share, "", 1.0, least=True)


def _cases(hosts: int, trials: int) -> Iterator[tuple[str, Sequence[Sequence[int]]]]:
    """Yield losses: each single host, random hosts, all neighbours, all racks, two random racks, all pairs of them."""
    random, racks = np.random.default_rng(0), np.arange(hosts).reshape(-1, HOSTS_PER_RACK)
    for count in RANDOM:
        name = "1 host" if count == 1 else f"{count} hosts"
        some = [random.choice(hosts, count, replace=False).tolist() for _ in range(trials)]
        yield name, [[host] for host in range(hosts)] if count == 1 else some
    yield "2 neighbours", [[host, (host + 1) % hosts] for host in range(hosts)]
    yield "1 rack", racks.tolist()
    yield "2 racks", [racks[random.choice(len(racks), 2, replace=False)].reshape(-1).tolist() for _ in range(trials)]
    yield "2 neighbouring racks", np.concatenate([racks, np.roll(racks, -1, axis=0)], axis=1).tolist()
