"""One rank's watch over its neighbours in one operation."""

from __future__ import annotations

from collections.abc import Iterable

from bcp.coordinators.liveness import LEFT, Liveness

__all__ = ["Vigil"]


class Vigil:
    """Signs of life, counted on a clock that stands still while this rank itself sleeps.

    A rank that was stopped, or whose interpreter stood still, finds its neighbours' signs only after it has woken up:
    it must not judge by the time that it has missed.

    Attributes:
        awake: seconds that this rank has been awake since it began.
        timeout: seconds that a neighbour may be late or silent.
    """

    def __init__(self, timeout: float, pause: float, now: float) -> None:
        """Begin at ``now`` seconds; :meth:`look` will be called every ``pause`` seconds, as long as this rank lives."""
        self.awake = 0.0
        self.timeout = timeout
        self._pause = pause
        self._looked = now
        self._signs = 0
        self._liveness = Liveness((), 0.0)

    def __repr__(self) -> str:
        """Show the clock, and who is here."""
        return f"<Vigil for {self.awake:.1f} s, {self._liveness!r}>"

    def watch(self, neighbours: Iterable[int]) -> None:
        """Watch these ranks from now on; they are late if they give no sign within the timeout."""
        self._liveness = Liveness(neighbours, self.awake)

    def note(self, rank: int) -> None:
        """Take note of a sign of life."""
        self._signs += 1
        self._liveness.note(rank, str(self._signs).encode(), self.awake)

    def leave(self, rank: int) -> None:
        """Watch a rank no more."""
        self._liveness.note(rank, LEFT, self.awake)

    def look(self, now: float) -> tuple[int, float, bool] | None:
        """Return (rank, seconds, whether it had ever begun) of the rank that is late or silent longest, or None."""
        self.awake += min(now - self._looked, 2 * self._pause)
        self._looked = now
        return self._liveness.lost(self.timeout, self.awake)
