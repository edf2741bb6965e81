"""What is measured: one process, several ranks, many small tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.speed.libraries import LIBRARIES

__all__ = ["CASES", "MANY", "ONE", "RANKS", "SINGLE", "SMALL_BYTES", "YARDSTICK", "Case"]

YARDSTICK = "bcp"
"""The library that goals are about. Raw limits are measured in its turns, right before it."""
SINGLE = "one process"
RANKS = {2: "2 ranks", 4: "4 ranks"}
SMALL_COUNT = 20_000
MANY, ONE = f"{SMALL_COUNT:,} tensors of 4 KiB", "the same in one tensor"
SMALL_BYTES = SMALL_COUNT * 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One state, and who saves it.

    Attributes:
        name: what it is called.
        part: cases of a part take turns.
        libraries: who takes part.
        quick: who does in a quick run.
        ranks: processes that share the state, by FSDP2 if there are several.
        tensors: how many tensors of equal size it has; 0: it is a GPT.
        rounds: a share of all rounds.
        backgrounds: whether background saves are measured.
        brief: whether libraries show only some of their ways.
    """

    name: str
    part: str
    libraries: tuple[str, ...]
    quick: tuple[str, ...]
    ranks: int = 1
    tensors: int = 0
    rounds: float = 1.0
    backgrounds: bool = True
    brief: bool = True

    def plays(self, library: str, number: int, rounds: int) -> bool:
        """Say whether a library has a turn in round 0, 1, 2 ... of so many; in round 0 everybody has."""
        return library in self.libraries and number < math.ceil(rounds * self.rounds * LIBRARIES[library].rounds)

    def plays_quickly(self, library: str, number: int, rounds: int) -> bool:
        """Say the same of a quick run, in which only the one that goals are about has more than one turn."""
        return library in self.quick and self.plays(library, number, rounds if library == YARDSTICK else 1)


def _small(name: str, tensors: int) -> Case:
    libraries = ("bcp", "DCP")
    return Case(
        name=name, part="small", libraries=libraries, quick=("bcp",), tensors=tensors, rounds=0.3, backgrounds=False
    )


CASES = [
    Case(name=SINGLE, part="single", libraries=tuple(LIBRARIES), quick=tuple(LIBRARIES), brief=False),
    Case(name=RANKS[2], part="ranks", libraries=("bcp", "DCP"), quick=("bcp", "DCP"), ranks=2, rounds=0.6),
    Case(name=RANKS[4], part="ranks", libraries=("bcp", "DCP"), quick=(), ranks=4, rounds=0.6),
    _small(MANY, SMALL_COUNT),
    _small(ONE, 1),
]
