"""What is made of the samples: figures against goals."""

from __future__ import annotations

import statistics

from benchmarks.figures import Figures
from benchmarks.speed.cases import MANY, ONE, RANKS, SINGLE
from benchmarks.speed.libraries import BCP_ASYNC, BCP_LAZY, BCP_LOAD, BCP_SAVE, DCP_PROCESS
from benchmarks.speed.samples import RAW, Samples

__all__ = ["judge", "over"]

MIB = 1 << 20
COLD = 0.01
"""Share of a checkpoint in the page cache above which a load was not cold."""


def judge(samples: Samples, figures: Figures) -> None:
    """Add every figure that these samples can be made into; what was not measured is said."""
    goals = _Goals(samples, figures)
    figures.head("bcp against the machine, against others, and against itself")
    goals.save()
    goals.background()
    goals.load()
    goals.memory()
    for case in RANKS.values():
        goals.ranks(case)
    goals.small()


class _Goals:
    """The goals, in groups."""

    def __init__(self, samples: Samples, figures: Figures) -> None:
        self._samples, self._figures = samples, figures

    def save(self) -> None:
        """A save is as fast as the disk, and no first save is slow."""
        samples = self._samples
        seconds = samples.median("save", "bcp", BCP_SAVE)
        self._at_least("save: share of the best raw write", over(samples.best("write", RAW), seconds), 0.9)
        self._at_least("save: times faster than DCP at its best", over(samples.best("save", "DCP"), seconds), 2)
        first = samples.median("first save", "bcp", BCP_SAVE)
        self._at_most("save: the first one, as a multiple of the second", over(first, seconds), 1.5)

    def background(self) -> None:
        """A background save is short for training, short until it is durable, and quiet meanwhile."""
        samples = self._samples
        blocking = samples.median("background", "bcp", BCP_ASYNC, name="blocking")
        self._at_most("background: training waits", blocking, 0.2, "s")
        copy = samples.best("copy", RAW)
        self._at_most("background: training waits, as a multiple of a memcpy", over(blocking, copy), 1.3)
        others = [samples.best("background", library) for library in ("DCP", "torch_checkpointing")]
        fastest = min((one for one in others if one is not None), default=None)
        durable = over(samples.median("background", "bcp", BCP_ASYNC), fastest)
        self._at_most("background: durable, as a part of DCP's or torch_checkpointing's", durable, 0.5)
        lost = over(self._lost("bcp", BCP_ASYNC), self._lost("DCP", DCP_PROCESS))
        self._at_most("background: training lost, as a part of DCP's process", lost, 0.5)
        worst = samples.median("background", "bcp", BCP_ASYNC, name="worst")
        alone = samples.median("background", "bcp", BCP_ASYNC, name="alone")
        self._at_most("background: worst step, as a multiple of a usual one", over(worst, alone), 3)
        worst_alone = samples.median("background", "bcp", BCP_ASYNC, name="worst_alone")
        self._at_most("  for comparison: the worst step while nothing is saved", over(worst_alone, alone))
        lazy = samples.median("background", "bcp", BCP_LAZY, name="blocking")
        self._at_most("background, lazy: training waits", None if lazy is None else 1e3 * lazy, 5, "ms")

    def load(self) -> None:
        """A load is as fast as the disk, or as memory."""
        samples = self._samples
        cold, warm = (samples.median(f"{kind} load", "bcp", BCP_LOAD) for kind in ("cold", "warm"))
        self._at_least("load, cold: share of the best raw read", over(samples.best("cold load", RAW), cold), 0.9)
        self._at_least("load, warm: times faster than DCP", over(samples.best("warm load", "DCP"), warm), 2)
        self._at_least("  for comparison: share of a raw read", over(samples.best("warm load", RAW), warm))
        if any(value > COLD for value in samples.each("cold load", "bcp", name="cached")):
            print("cold loads were not cold: this file system keeps its files in memory", flush=True)

    def memory(self) -> None:
        """No more memory than the budget and a little."""
        for what, kind, way, allowed in (
            ("save", "save", BCP_SAVE, "budget"),
            ("background", "background", BCP_ASYNC, "state"),
            ("load", "cold load", BCP_LOAD, "budget"),
        ):
            memory, budget = (self._samples.median(kind, "bcp", way, name=name) for name in ("memory", allowed))
            beyond = None if memory is None or budget is None else (memory - budget) / MIB
            self._at_most(f"{what}: peak memory beyond state and budget", beyond, 256, "MiB")

    def ranks(self, case: str) -> None:
        """Several ranks on one disk are as fast as one, and each writes its part."""
        samples = self._samples
        if not samples.each("save", "bcp", case=case):
            return
        seconds = samples.median("save", "bcp", BCP_SAVE, case=case)
        raw = samples.best("write", RAW, case=case)
        self._at_least(f"{case}, save: share of the best raw write", over(raw, seconds), 0.9)
        dcp = samples.best("save", "DCP", case=case)
        self._at_least(f"{case}, save: times faster than DCP at its best", over(dcp, seconds))
        balance = samples.median("save", "bcp", BCP_SAVE, name="balance", case=case)
        self._at_most(f"{case}, save: bytes of the busiest rank by the mean", balance, 1.05)

    def small(self) -> None:
        """Many small tensors are not much slower than one large one."""
        samples = self._samples
        for what, kind, way in (("save", "save", BCP_SAVE), ("load, warm", "warm load", BCP_LOAD)):
            many, one = (samples.median(kind, "bcp", way, case=case) for case in (MANY, ONE))
            if many is not None:
                self._at_most(f"{MANY}, {what}: as a multiple of one", over(many, one), 2)

    def _lost(self, library: str, way: str) -> float | None:
        """Return the seconds of training that a background save costs; noise may make it less than nothing."""
        values = self._samples.each("background", library, way, name="lost", case=SINGLE)
        return max(statistics.median(values), 1e-3) if values else None

    def _at_most(self, name: str, value: float | None, goal: float | None = None, unit: str = "") -> None:
        self._add(name, value, unit, goal, least=False)

    def _at_least(self, name: str, value: float | None, goal: float | None = None, unit: str = "") -> None:
        self._add(name, value, unit, goal, least=True)

    def _add(self, name: str, value: float | None, unit: str, goal: float | None, *, least: bool) -> None:
        if value is None:
            print(f"{name:<62} not measured", flush=True)
        else:
            self._figures.add(name, value, unit, goal, least=least)


def over(value: float | None, by: float | None) -> float | None:
    """Divide, where both were measured."""
    return None if value is None or by is None else value / by
