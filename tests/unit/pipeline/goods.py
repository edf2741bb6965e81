"""Items for pipelines, and what a run must not leave behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bcp.pipeline import Budget


@dataclass(frozen=True)
class Crate:
    name: str
    nbytes: int


def crates(*sizes: int) -> list[Crate]:
    return [Crate(f"w{index}", nbytes) for index, nbytes in enumerate(sizes)]


class Gauge:
    """Counts threads that are in user code."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside = 0

    @contextmanager
    def busy(self) -> Iterator[None]:
        with self._lock:
            self.inside += 1
        try:
            yield
        finally:
            with self._lock:
                self.inside -= 1


@contextmanager
def nothing_left(budget: Budget) -> Iterator[Gauge]:
    """Check that the block leaves no task, no thread in user code (as counted by the gauge) and no borrowed byte."""
    gauge = Gauge()
    before = asyncio.all_tasks()
    yield gauge
    assert gauge.inside == 0
    assert budget.in_use == 0
    assert asyncio.all_tasks() == before
