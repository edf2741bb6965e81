"""Signs of life of ranks: judges silence by the times of the last signs, with the clock as an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["LEFT", "Liveness"]

LEFT = b"left"
"""The sign of life of a rank that has left the operation."""


@dataclass(slots=True)
class _Sign:
    """The last sign of life of a rank: what it was, and when it was first seen, in seconds."""

    value: bytes | None
    since: float


class Liveness:
    """The signs of life of the ranks that this rank watches.

    A rank's sign changes while it lives. Ages are counted from when this rank *saw* a change, so clocks of
    other hosts do not matter, and a watcher that was itself asleep blames nobody for it.
    """

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        """Watch these ranks; a rank that gives no sign at all is late, counted from ``now``."""
        self._signs = {rank: _Sign(None, now) for rank in ranks}

    def __repr__(self) -> str:
        """Show how many are here and how many have left."""
        joined = sum(sign.value is not None for sign in self._signs.values())
        return f"<Liveness of {len(self._signs)} ranks: {joined} joined, {len(self.left)} left>"

    @property
    def left(self) -> set[int]:
        """The ranks that have left."""
        return {rank for rank, sign in self._signs.items() if sign.value == LEFT}

    @property
    def watched(self) -> list[int]:
        """The ranks that have not left."""
        return [rank for rank, sign in self._signs.items() if sign.value != LEFT]

    def note(self, rank: int, value: bytes | None, now: float) -> None:
        """Take note of a rank's sign, or of None where it has given none yet."""
        if value != self._signs[rank].value:
            self._signs[rank] = _Sign(value, now)

    def lost(self, timeout: float, now: float) -> tuple[int, float, bool] | None:
        """Return (rank, seconds, whether it had ever begun) of the rank that is silent longest, or None."""
        late = [(now - sign.since, rank) for rank, sign in self._signs.items() if sign.value != LEFT]
        seconds, rank = max(late, default=(0.0, -1))
        return (rank, seconds, self._signs[rank].value is not None) if seconds > timeout else None
