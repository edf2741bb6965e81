"""Turns the events of one operation into the figures of its report."""

from __future__ import annotations

import time
from collections.abc import Mapping

from bcp.events import Observer, StageEvent

__all__ = ["Timeline"]


class Timeline:
    """Collects the events of one operation, and passes them on."""

    def __init__(self, *observers: Observer) -> None:
        """Start the clock."""
        self.started = time.monotonic()
        self._observers = list(observers)
        self._spans: dict[str, tuple[float, float]] = {}

    def __call__(self, event: StageEvent) -> None:
        """Take note of one item that went through one stage."""
        start, end = self._spans.get(event.stage, (event.started, event.ended))
        self._spans[event.stage] = (min(start, event.started), max(end, event.ended))
        for observer in self._observers:
            observer(event)

    def add(self, observer: Observer) -> None:
        """Pass later events on to one more observer."""
        self._observers.append(observer)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def stage_seconds(self) -> Mapping[str, float]:
        """Wall seconds from the first start to the last end of each stage."""
        return {stage: end - start for stage, (start, end) in self._spans.items()}
