"""What was measured, value by value; medians and comparisons are made of these, and nothing else."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.speed.cases import SINGLE

__all__ = ["RAW", "Sample", "Samples"]

RAW = "raw"
"""The machine itself, where a library's name would be."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Attributes:
        kind: ``"first save"``, ``"save"``, ``"first background"``, ``"background"``, ``"cold load"``, ``"warm load"``;
            of the machine ``"write"``, ``"cold read"``, ``"warm read"``, ``"copy"``.
        library: who.
        way: how, in the library's words.
        case: name of the :class:`~benchmarks.speed.cases.Case`.
        values: what was measured, by name; seconds and bytes.
    """

    kind: str
    library: str
    way: str
    case: str
    values: Mapping[str, float]


@dataclass(slots=True)
class Samples:
    """All measurements of one run, in the order in which they were made.

    Attributes:
        about: the machine, the versions, and the options of the run.
        taken: the measurements.
        absent: library -> why it is not among them.
    """

    about: dict[str, str | float] = field(default_factory=dict)
    taken: list[Sample] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, library: str, way: str, values: Mapping[str, float], case: str = SINGLE) -> Sample:
        """Take note of a measurement."""
        self.taken.append(Sample(kind, library, way, case, dict(values)))
        return self.taken[-1]

    def ways(self, kind: str, case: str = SINGLE) -> Iterator[tuple[str, str]]:
        """Go through (library, way) of a kind, in the order in which they were measured first."""
        yield from dict.fromkeys((one.library, one.way) for one in self.taken if (one.kind, one.case) == (kind, case))

    def each(
        self, kind: str, library: str, way: str | None = None, *, name: str = "seconds", case: str = SINGLE
    ) -> list[float]:
        """Return all values of a name; ``way=None``: of every way."""
        return [
            one.values[name]
            for one in self.taken
            if (one.kind, one.library, one.case) == (kind, library, case)
            and way in (None, one.way)
            and name in one.values
        ]

    def median(self, kind: str, library: str, way: str, *, name: str = "seconds", case: str = SINGLE) -> float | None:
        """Return the median over the rounds, or None where nothing was measured."""
        values = self.each(kind, library, way, name=name, case=case)
        return statistics.median(values) if values else None

    def best(self, kind: str, library: str, *, name: str = "seconds", case: str = SINGLE) -> float | None:
        """Return the least median of a library's ways."""
        ways = [way for who, way in self.ways(kind, case) if who == library]
        medians = [self.median(kind, library, way, name=name, case=case) for way in ways]
        return min((value for value in medians if value is not None), default=None)

    def write(self, path: Path, figures: list[dict[str, object]]) -> None:
        """Write all of it as JSON, with the figures that were made of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self) | {"figures": figures}, indent=1) + "\n", "utf-8")

    @classmethod
    def read(cls, path: Path) -> Samples:
        """Read what :meth:`write` wrote; figures are made anew."""
        found = json.loads(path.read_text("utf-8"))
        return cls(found["about"], [Sample(**one) for one in found["taken"]], found["absent"])
