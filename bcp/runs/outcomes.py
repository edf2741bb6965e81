"""The outcome of the saves of a run, until the trainer has learned it."""

from __future__ import annotations

from bcp._messages.running import Durable

__all__ = ["Outcomes"]


class Outcomes:
    """The saves that have begun, and those that have ended, on one rank.

    A save ends on another thread than the trainer's.

    Example:
        >>> outcomes = Outcomes()
        >>> outcomes.begun(10)
        >>> outcomes.told()
        Durable(steps=(), failed=())
        >>> outcomes.ended(10, is_durable=True)
        >>> outcomes.taken(outcomes.told()), outcomes.awaited
        ((10,), False)

    """

    def __init__(self) -> None:
        self._awaited: set[int] = set()
        self._durable: set[int] = set()
        self._failed: set[int] = set()

    @property
    def awaited(self) -> bool:
        """Whether the trainer has not learned the outcome of a save. All ranks have begun the same saves."""
        return bool(self._awaited)

    def begun(self, step: int) -> None:
        """Note that a save of the trainer has begun."""
        self._failed.discard(step)
        self._awaited.add(step)

    def ended(self, step: int, *, is_durable: bool) -> None:
        """Note how a save, or a standby snapshot, has ended."""
        (self._durable if is_durable else self._failed).add(step)

    def told(self) -> Durable:
        """Return the saves that have ended. Rank 0 tells the others."""
        return Durable(tuple(sorted(self._durable)), tuple(sorted(self._failed - self._durable)))

    def taken(self, told: Durable) -> tuple[int, ...]:
        """Forget the saves that rank 0 has told of; return those that are durable."""
        for steps in (self._awaited, self._durable, self._failed):
            steps.difference_update(told.steps, told.failed)
        return told.steps
