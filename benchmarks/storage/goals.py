"""Figures against goals, and the table, of one kind of storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from benchmarks.figures import Figures
from benchmarks.speed.tables import Table
from benchmarks.storage.section import KINDS, Sample, Samples

__all__ = ["beside", "judge", "table"]

TIMES_FASTER = {"write": 2.0, "read": 1.5}
LEAST_MB_S = 1000.0
STALL_MS = 50.0

Rounds = Callable[[str], Samples]
"""Makes some rounds of a kind, and returns their samples."""


def judge(
    name: str, ours: str, plain: Sequence[str], rounds: Rounds, figures: Figures, *, goals: Collection[str]
) -> None:
    """Measure a kind of storage, and add its figures.

    Args:
        name: of the storage.
        ours: bcp's client.
        plain: clients of which the quickest call counts.
        rounds: makes measurements.
        figures: takes them.
        goals: figures that have one: ``"faster"``, ``"cpu"``, ``"rate"``; the stall always has.

    """
    for kind in KINDS:
        _Goals(name, kind, ours, plain, rounds).add(figures, goals)


class _Goals:
    """The goals of writes or reads. All come from the same rounds, until one that was missed is measured again."""

    def __init__(self, name: str, kind: str, ours: str, plain: Sequence[str], rounds: Rounds) -> None:
        self._title = f"{name}, {kind}"
        self._kind, self._ours, self._plain, self._rounds = kind, ours, plain, rounds
        self._first: Samples | None = rounds(kind)

    def add(self, figures: Figures, goals: Collection[str]) -> None:
        """Add the figures."""
        least = TIMES_FASTER[self._kind] if "faster" in goals else None
        beside = " or ".join(self._plain)
        self._measure(figures, f"times faster than {beside}", self._faster, "", least, least=True)
        self._measure(figures, f"CPU, as a part of that of {beside}", self._cpu, "", 1.0 if "cpu" in goals else None)
        if self._kind == "write":
            rate = LEAST_MB_S if "rate" in goals else None
            self._measure(figures, "MB/s of one process", self._rate, "", rate, least=True)
        self._measure(figures, "longest stall of the loop", self._stall, "ms", STALL_MS)
        self._first = None

    def _measure(
        self,
        figures: Figures,
        what: str,
        value: Callable[[Samples], float | None],
        unit: str,
        goal: float | None,
        *,
        least: bool = False,
    ) -> None:
        found = value(self._samples())
        if found is None:
            print(f"{self._title}: {what}: not measured", flush=True)
            return

        def again() -> float:
            measured = value(self._samples())
            assert measured is not None  # noqa: S101 -- the clients are as they were
            return measured

        figures.measure(f"{self._title}: {what}", again, unit, goal, least=least)

    def _samples(self) -> Samples:
        return self._first or self._rounds(self._kind)

    def _faster(self, samples: Samples) -> float | None:
        ours, theirs = samples.best(self._kind, [self._ours]), samples.best(self._kind, self._plain)
        return None if ours is None or theirs is None else samples.rate(ours) / samples.rate(theirs)

    def _cpu(self, samples: Samples) -> float | None:
        ours, theirs = samples.best(self._kind, [self._ours]), samples.best(self._kind, self._plain)
        return None if ours is None or theirs is None else samples.cpu(ours) / samples.cpu(theirs)

    def _rate(self, samples: Samples) -> float | None:
        ours = samples.best(self._kind, [self._ours])
        return None if ours is None else samples.rate(ours) / 1e6

    def _stall(self, samples: Samples) -> float | None:
        ours = samples.best(self._kind, [self._ours])
        return None if ours is None else counted_stall(samples.calmest(ours))


def beside(name: str, ours: str, others: Sequence[str], samples: Samples, figures: Figures) -> None:
    """Add how bcp compares with clients that no goal is about."""
    for kind in KINDS:
        mine = samples.best(kind, [ours])
        for other in others:
            theirs = samples.best(kind, [other])
            if mine is not None and theirs is not None:
                title = f"{name}, {kind}: beside {other}"
                figures.add(f"{title}: times faster", samples.rate(mine) / samples.rate(theirs))
                figures.add(f"{title}: CPU, as a part of its", samples.cpu(mine) / samples.cpu(theirs))


def counted_stall(sample: Sample) -> float:
    """Return the stall in ms, less the stall of an idle loop beside it beyond the goal, which the machine causes."""
    return max(sample.stall - max(sample.control - STALL_MS, 0.0), 0.0)


def table(name: str, samples: Samples) -> Table:
    """Make the table of a kind of storage."""
    rows = []
    for kind in KINDS:
        for way in samples.ways(kind):
            rates = [sample.rate / 1e6 for sample in samples.taken[way]]
            calm = samples.calmest(way)
            cells = [
                f"{samples.rate(way) / 1e6:.0f}",
                f"{min(rates):.0f} to {max(rates):.0f}",
                f"{samples.cpu(way):.2f}",
                f"{calm.stall:.0f}",
                f"{calm.control:.0f}",
            ]
            rows.append([kind, str(way), *cells])
    return Table(name, ["", "", "MB/s", "from, to", "CPU s/GB", "stall ms", "idle loop ms"], rows, words=2)
