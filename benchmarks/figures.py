"""Figures of a benchmark against goals: as a table, as JSON, and as an exit status."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

__all__ = ["Figure", "Figures", "arguments", "cpu_ms", "parser"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number: its name, value and unit; and the most (or the least) it may be, if that is a goal."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    least: bool = False

    @property
    def missed(self) -> bool:
        """Whether the goal is missed."""
        return self.goal is not None and (self.value < self.goal if self.least else self.value > self.goal)

    def __str__(self) -> str:
        count = float(self.value).is_integer() and self.unit == ""
        value = f"{self.value:,.0f}" if count else f"{self.value:.4f}" if self.unit == "" else f"{self.value:.4g}"
        side = " >=" if self.least else ""
        goal = (
            "" if self.goal is None else f"{'MISSED' if self.missed else 'ok':>7}, goal{side} {self.goal:g} {self.unit}"
        )
        return f"{self.name:<62} {value:>12} {self.unit:<5}{goal}"


@dataclass(slots=True)
class Figures:
    """All figures of one run, printed as they come."""

    found: list[Figure] = field(default_factory=list)
    again: dict[str, Callable[[], float]] = field(default_factory=dict)

    def head(self, text: str) -> None:
        """Begin a section."""
        print(f"\n{text}\n{'-' * len(text)}", flush=True)

    def add(self, name: str, value: float, unit: str = "", goal: float | None = None, *, least: bool = False) -> None:
        """Take note of a figure and print it; ``least``: the goal is the least that it may be, not the most."""
        self.found.append(Figure(name, float(value), unit, goal, least))
        print(self.found[-1], flush=True)

    def measure(
        self, name: str, work: Callable[[], float], unit: str, goal: float | None, *, least: bool = False
    ) -> None:
        """Record the figure that ``work`` measures; measure again later if the goal is missed.

        Other work of the machine makes a time longer, never shorter, and may do so for many seconds.
        """
        self.again[name] = work
        self.add(name, work(), unit, goal, least=least)

    def look_again(self, times: int = 3) -> None:
        """Measure figures again that missed their goals, and keep the better values."""
        for _ in range(times):
            late = [row for row, figure in enumerate(self.found) if figure.missed and figure.name in self.again]
            if late:
                print("\nonce more, where a goal was missed:", flush=True)
            for row in late:
                figure = self.found[row]
                better = max if figure.least else min
                self.found[row] = replace(figure, value=better(figure.value, self.again[figure.name]()))
                print(self.found[row], flush=True)

    def close(self, options: argparse.Namespace) -> int:
        """Write the JSON file, print the missed goals last, and return the exit status."""
        self.look_again()
        if options.json:
            Path(options.json).write_text(json.dumps(self.rows(), indent=1), "utf-8")
        return self.verdict(check=options.check)

    def rows(self) -> list[dict[str, object]]:
        """Return all figures as JSON has them."""
        return [asdict(figure) | {"missed": figure.missed} for figure in self.found]

    def verdict(self, *, check: bool) -> int:
        """Print how many goals are reached, and last those that are missed; return the exit status."""
        missed = [figure for figure in self.found if figure.missed]
        goals = sum(figure.goal is not None for figure in self.found)
        print(f"\n{goals - len(missed)} of {goals} goals reached", flush=True)
        for figure in missed:
            print(f"missed: {figure}", flush=True)
        return 1 if missed and check else 0


def parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser of the options that all benchmarks have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer cases, for a look")
    options.add_argument("--json", metavar="FILE", help="write the figures to this file as well")
    options.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    return options


def arguments(description: str | None) -> argparse.Namespace:
    """Read the options that all benchmarks have."""
    return parser(description).parse_args()


def cpu_ms(work: Callable[[], object], repeat: int = 7) -> float:
    """Return the least CPU time of some runs, in ms over all threads.

    It is the least, because other work of the machine only adds to it. The garbage collector is off, as in timeit:
    its cost depends on everything else in the process.
    """
    best = float("inf")
    gc.disable()
    try:
        for _ in range(repeat):
            started = time.process_time()
            work()
            best = min(best, time.process_time() - started)
    finally:
        gc.enable()
    return 1000 * best
