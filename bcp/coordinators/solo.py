"""One rank that agrees with itself."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from bcp.errors import InputError
from bcp.pipeline import in_thread
from bcp.protocols import Agreement, Buffer, flat_view

__all__ = ["SoloCoordinator"]


class SoloCoordinator:
    """Rank 0 of 1: a :class:`~bcp.protocols.Coordinator` without a channel, whose operations never time out."""

    rank = 0
    world_size = 1

    def __repr__(self) -> str:
        """Show what it is."""
        return "SoloCoordinator()"

    @asynccontextmanager
    async def begin(self, what: str, timeout: float) -> AsyncIterator[Agreement]:  # noqa: ASYNC109 -- the protocol's
        """Begin an operation; nobody else takes part in it."""
        del what, timeout
        yield _Alone()


class _Alone:
    """An operation of one rank."""

    async def divide(self, step: str, mine: bytes, divide: Callable[[Sequence[bytes]], Sequence[bytes]]) -> bytes:
        """Call ``divide`` in a thread."""
        del step
        [answer] = await in_thread(divide, [mine])
        return answer

    async def decide(self, step: str, mine: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]) -> bytes:
        """Await ``decide``."""
        del step
        return await decide([mine])

    async def all_to_all(self, send: Sequence[Buffer], receive: Sequence[Buffer]) -> None:
        """Copy the bytes that are sent."""
        [outgoing], [incoming] = map(flat_view, send), map(flat_view, receive)
        if len(outgoing) != len(incoming):
            raise InputError(f"one rank expects {len(incoming)} bytes of itself, and sends itself {len(outgoing)}")
        incoming[:] = outgoing

    async def bandwidth(self) -> float:
        """Return inf: there is no other host."""
        return math.inf
