"""A rank's name for the others, the errors and texts of an operation's end, and a record of signs of life."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import anyio

from bcp._messages.coordination import Abort
from bcp.errors import InputError, PeerError

__all__ = ["LEFT", "Heartbeats", "PeerInfo", "describe", "different", "error_of"]


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """One rank that takes part in an operation."""

    rank: int
    operation: str
    host: str
    pid: int

    @classmethod
    def of(cls, rank: int, operation: str) -> PeerInfo:
        """Return the info of this process."""
        return cls(rank, operation, socket.gethostname(), os.getpid())

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def error_of(abort: Abort) -> InputError | PeerError:
    """Return the error that a rank raises when it hears of an abort."""
    return InputError(abort.message) if abort.disagreement else PeerError(abort.rank, abort.message)


def different(rank: int, own_words: str, other: int, theirs: str) -> Abort:
    """Return the abort of an operation in which ``other`` does something else than ``rank``."""
    message = (
        f"the ranks are doing different things: rank {rank}: {own_words}; rank {other}: {theirs}; "
        "every rank has to make the same calls of bcp in the same order, with the same paths"
    )
    return Abort(other, message, disagreement=True)


def describe(error: BaseException) -> str:
    """Return the text of an error for the other ranks."""
    if isinstance(error, anyio.get_cancelled_exc_class()):
        return "the operation was cancelled there"
    return f"{type(error).__name__}: {error}"


LEFT = b"left"
"""The sign of life of a rank that has left the operation."""


@dataclass(slots=True)
class _Heartbeat:
    """The last sign of life of a rank, and the time in seconds at which it was first seen."""

    value: bytes | None
    since: float


class Heartbeats:
    """The signs of life of the ranks that this rank watches.

    A rank's sign changes while it lives. The age of a sign counts from the moment at which this rank *saw* it change,
    so clocks of other hosts do not matter. A watcher that was itself asleep finds no rank silent.
    """

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self._signs = {rank: _Heartbeat(None, now) for rank in ranks}

    def __repr__(self) -> str:
        joined = sum(sign.value is not None for sign in self._signs.values())
        return f"<Heartbeats of {len(self._signs)} ranks: {joined} joined, {len(self.left)} left>"

    @property
    def left(self) -> set[int]:
        """The ranks that have left."""
        return {rank for rank, sign in self._signs.items() if sign.value == LEFT}

    def note(self, rank: int, value: bytes | None, now: float) -> None:
        """Record a rank's sign; None if the rank has given none yet."""
        if value != self._signs[rank].value:
            self._signs[rank] = _Heartbeat(value, now)

    def lost(self, timeout: float, now: float) -> tuple[int, float, bool] | None:
        """Return (rank, seconds, whether it had ever begun) of the rank that is silent longest, or None."""
        late = [(now - sign.since, rank) for rank, sign in self._signs.items() if sign.value != LEFT]
        seconds, rank = max(late, default=(0.0, -1))
        return (rank, seconds, self._signs[rank].value is not None) if seconds > timeout else None
