"""Messages of ranks about themselves, and about the end of an operation."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import anyio

from bcp.errors import InputError, PeerError
from bcp.protocols import REFUSED

__all__ = ["Abort", "Hello", "agrees", "describe", "different", "error_of"]


@dataclass(frozen=True, slots=True)
class Hello:
    """One rank that takes part in an operation."""

    rank: int
    what: str
    host: str
    pid: int

    @classmethod
    def of(cls, rank: int, what: str) -> Hello:
        """Return this process's hello."""
        return cls(rank, what, socket.gethostname(), os.getpid())

    def __str__(self) -> str:
        """Name the rank for a person."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Abort:
    """Why the operation ended: ``rank`` is to blame; ``disagreement`` where the ranks' inputs do not fit together."""

    rank: int
    message: str
    disagreement: bool = False


def error_of(abort: Abort) -> InputError | PeerError:
    """Return the error that an abort is for a rank that is told of it."""
    return InputError(abort.message) if abort.disagreement else PeerError(abort.rank, abort.message)


def agrees(mine: str, theirs: str) -> bool:
    """Say whether two ranks do the same, as far as they can say; one whose arguments were refused cannot."""
    return mine == theirs or REFUSED in (mine, theirs)


def different(rank: int, mine: str, other: int, theirs: str) -> Abort:
    """Return the abort of an operation in which ``other`` does something else than ``rank``."""
    message = (
        f"the ranks are doing different things: rank {rank}: {mine}; rank {other}: {theirs}; "
        "every rank has to make the same calls of bcp in the same order, with the same paths"
    )
    return Abort(other, message, disagreement=True)


def describe(error: BaseException) -> str:
    """Return how an error is told to the other ranks."""
    if isinstance(error, anyio.get_cancelled_exc_class()):
        return "the operation was cancelled there"
    return f"{type(error).__name__}: {error}"
