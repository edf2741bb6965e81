"""The position of a run, on one rank: its step, and the seconds that it took to come here."""

from __future__ import annotations

import time

__all__ = ["Clock"]


class Clock:
    """Counts steps and seconds since the resumption; monotonic, so that no change of the host's time harms.

    Attributes:
        began: the resumption, in monotonic seconds.
        step: the newest step that has ended.
        restart: seconds that the resumption took; 0 for a new run.
    """

    def __init__(self) -> None:
        """Begin now, at step 0."""
        self.began = time.monotonic()
        self.step = self._first = 0
        self.restart = 0.0

    def start(self, step: int, restart: float) -> None:
        """Begin to count behind a step."""
        self.began, self.step, self._first, self.restart = time.monotonic(), step, step, restart

    @property
    def seconds(self) -> float:
        """Seconds since the resumption."""
        return time.monotonic() - self.began

    @property
    def steps(self) -> int:
        """Steps since the resumption."""
        return self.step - self._first

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step since the resumption; 0 before the first one."""
        return self.seconds / self.steps if self.steps else 0.0
