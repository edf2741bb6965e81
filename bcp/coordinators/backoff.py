"""Pauses between two attempts."""

from __future__ import annotations

from dataclasses import dataclass

import anyio

__all__ = ["Backoff"]


@dataclass(slots=True)
class Backoff:
    """Pauses that double until they are as long as the longest.

    Attributes:
        pause: seconds of the next one.
        longest: the limit; it may be changed between two pauses.
    """

    pause: float
    longest: float

    @classmethod
    def of_store(cls, world_size: int) -> Backoff:
        """Return the pauses between two looks at a store by each of ``world_size`` ranks."""
        # 20 looks a second by each of 1,000 ranks are as many as one store answers; more ranks look less often
        return cls(0.001, 0.05 * max(1.0, world_size / 1000))

    async def sleep(self) -> None:
        """Pause."""
        await anyio.sleep(self.pause)
        self.pause = min(2 * self.pause, self.longest)
