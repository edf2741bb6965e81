"""The cells of the table: one save each, in which chosen requests get chosen answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["ALWAYS", "Answer", "Cell", "Fault", "Faults", "Mode"]

ALWAYS = 1 << 30
Mode = Literal["fresh", "overwrite", "remains"]
"""The path of a save: without anything, with a checkpoint, with the remains of a killed save and a checkpoint."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A request's answer: its name, and whether the request is carried out."""

    name: str
    acted: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {'carried out' if self.acted else 'not carried out'}"


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer that a request of some kind gets, for so many times, after so many requests of its kind."""

    request: str
    answer: Answer
    skip: int = 0
    times: int = 1

    def __str__(self) -> str:
        which = "every one" if self.times == ALWAYS else f"number {self.skip + 1}"
        return f"{self.request} ({which}): {self.answer}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One save: what is at its path, whether its files are large, and its faults, each after the one before."""

    mode: Mode
    large: bool
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        size = ", large" if self.large else ""
        return f"{self.mode}{size}: {'; then '.join(map(str, self.faults))}"


@dataclass(slots=True)
class Faults:
    """Faults that wait for their requests; any thread may ask.

    Attributes:
        hits: how often each fault was met. A fault waits until the one before was met.
    """

    hits: list[int] = field(default_factory=list)
    _waiting: Sequence[Fault] = ()
    _passed: list[int] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, faults: Sequence[Fault]) -> None:
        """Wait for these, and no others."""
        with self._lock:
            self._waiting = list(faults)
            self.hits, self._passed = [0] * len(faults), [0] * len(faults)

    def disarm(self) -> list[int]:
        """Wait for none any more; return the hits."""
        with self._lock:
            self._waiting = ()
            return self.hits

    def take(self, request: str) -> Fault | None:
        """Return the fault of a request; None if its answer is the server's own."""
        with self._lock:
            for number, fault in enumerate(self._waiting):
                if fault.request == request and self.hits[number] < fault.times:
                    if self._passed[number] == fault.skip:
                        self.hits[number] += 1
                        return fault
                    self._passed[number] += 1
                if not self.hits[number]:
                    return None
        return None
