"""A limit of what an agent fetches from other hosts."""

from __future__ import annotations

import time
from dataclasses import dataclass

import anyio

__all__ = ["Pace"]


@dataclass(slots=True)
class Pace:
    """Lets so many bytes a second through.

    Attributes:
        nbytes_per_second: None for no limit.
    """

    nbytes_per_second: float | None
    _free_at: float = 0.0

    async def take(self, nbytes: int) -> None:
        """Wait until so many bytes may go."""
        if self.nbytes_per_second is None:
            return
        now = time.monotonic()
        start = max(now, self._free_at)
        self._free_at = start + nbytes / self.nbytes_per_second
        await anyio.sleep(start - now)
