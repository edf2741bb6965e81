"""Connections belong to an event loop and a process; a backend may outlive both."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, finalize

__all__ = ["PerLoop", "drop_connection"]

S = TypeVar("S")
_Sessions = WeakKeyDictionary[asyncio.AbstractEventLoop, "asyncio.Future[_Living[S]]"]

_inherited: list[object] = []
"""Sessions of a parent process. To close them, or to drop them, would talk over its connections."""

_closing: set[asyncio.Task[None]] = set()


def drop_connection(transport: asyncio.WriteTransport) -> None:
    """Abort a connection, so that it sends and keeps nothing of its buffer any more.

    One that has closed already is left alone: ``abort`` of asyncio fails on a transport that closed after it had sent
    the rest of its buffer.
    """
    if transport.get_write_buffer_size() or not transport.is_closing():
        transport.abort()


class PerLoop(Generic[S]):
    """Opens a session for each event loop that asks for one, and forgets those of a parent process.

    The key of fsspec's own cache has the thread, and not the loop. So a second ``asyncio.run`` gets a session of a loop
    that is closed. A session is closed with its loop: ``asyncio.run`` ends the asynchronous generators that are still
    open, and each session lives in one. It is also closed when this object is dropped. Until then its finalizer refers
    to the sessions: as part of the same garbage, connections would be finalized before anything closes them.
    """

    def __init__(self, opened: Callable[[], Awaitable[S]], closed: Callable[[S], Awaitable[None]]) -> None:
        """Take the functions that open and close a session, both called on its loop.

        ``closed`` must not refer to this object, nor to its owner.
        """
        self._opened = opened
        self._closed = closed
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._sessions: _Sessions[S] = WeakKeyDictionary()
        self._at_end = finalize(self, _drop, self._sessions, self._pid)
        self._at_end.atexit = False

    def __repr__(self) -> str:
        return f"<PerLoop: {len(self._sessions)} sessions>"

    async def here(self) -> S:
        """Return the session of the running loop; several tasks that ask at once get the same one."""
        if self._pid != os.getpid():  # a forked child: to close the parent's would talk over its connections
            self._at_end()
            self._begin()
        loop = asyncio.get_running_loop()
        for closed in [other for other in self._sessions if other.is_closed()]:
            del self._sessions[closed]  # a future refers to its loop, so that none of both would ever go by itself
        while (session := self._sessions.get(loop)) is not None:
            if not session.done():
                await asyncio.wait([session])  # unlike a shield, raises nothing here if whoever opens it is cancelled
            if not session.cancelled():
                return session.result().session
        return await self._open(loop)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> S:
        session = self._sessions[loop] = loop.create_future()
        try:
            keeper = _keep(await self._opened(), self._closed)
            opened = _Living(await anext(keeper), keeper)
        except BaseException as error:
            del self._sessions[loop]
            if isinstance(error, Exception):
                session.set_exception(error)
                session.exception()  # nobody else may wait for it
            else:
                session.cancel()
            raise
        session.set_result(opened)
        return opened.session

    async def aclose(self) -> None:
        """Close the session of the running loop, and have those of other running loops closed there."""
        loop = asyncio.get_running_loop()
        if self._pid == os.getpid():
            living = self._sessions.pop(loop, None)
            if living is not None and _is_open(living):
                await living.result().keeper.aclose()
        self._at_end()
        self._begin()


@dataclass(frozen=True, slots=True)
class _Living(Generic[S]):
    """A session, and the generator that closes it."""

    session: S
    keeper: AsyncGenerator[S, None]


async def _keep(session: S, closed: Callable[[S], Awaitable[None]]) -> AsyncGenerator[S, None]:
    """Yield a session, and close it when the generator is closed or dropped, or its loop ends."""
    try:
        yield session
    finally:
        await closed(session)


def _is_open(session: asyncio.Future[_Living[S]]) -> bool:
    return session.done() and not session.cancelled() and session.exception() is None


def _drop(sessions: _Sessions[S], pid: int) -> None:
    """Have sessions closed on their loops; any thread may call this. Those of a parent process are kept for good."""
    if pid != os.getpid():
        _inherited.append(sessions)
        return
    for loop, living in list(sessions.items()):
        if _is_open(living) and not loop.is_closed():
            loop.call_soon_threadsafe(_close_soon, loop, living.result())


def _close_soon(loop: asyncio.AbstractEventLoop, living: _Living[S]) -> None:
    task = loop.create_task(_close(living))
    _closing.add(task)
    task.add_done_callback(_closing.discard)


async def _close(living: _Living[S]) -> None:
    await living.keeper.aclose()
