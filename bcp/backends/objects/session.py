"""Connections belong to an event loop and a process; a backend may outlive both."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

__all__ = ["PerLoop"]

S = TypeVar("S")


class PerLoop(Generic[S]):
    """Opens a session for each event loop that asks for one, and forgets those of a parent process.

    fsspec's own cache has the thread in its key and not the loop, so that a second ``asyncio.run`` gets a session of a
    loop that is closed. A session is closed with its loop: ``asyncio.run`` ends the asynchronous generators that are
    still open, and each session lives in one. It is also closed when nothing refers to it any more.
    """

    def __init__(self, opened: Callable[[], Awaitable[S]], closed: Callable[[S], Awaitable[None]]) -> None:
        """Take the functions that open and close a session, both called on its loop."""
        self._opened = opened
        self._closed = closed
        self._pid = os.getpid()
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[_Living[S]]] = WeakKeyDictionary()
        self._inherited: list[object] = []

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<PerLoop: {len(self._sessions)} sessions>"

    async def here(self) -> S:
        """Return the session of the running loop; several tasks that ask at once get the same one."""
        if self._pid != os.getpid():  # a forked child: to close the parent's would talk over its connections
            self._inherited.append(self._sessions)
            self._sessions, self._pid = WeakKeyDictionary(), os.getpid()
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
            keeper = _keep(self._opened, self._closed)
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
        mine = asyncio.get_running_loop()
        sessions, self._sessions = self._sessions, WeakKeyDictionary()
        if self._pid != os.getpid():
            self._inherited.append(sessions)
            return
        for loop, opened in sessions.items():
            if not opened.done() or opened.cancelled() or opened.exception() is not None:
                continue
            if loop is mine:
                await opened.result().keeper.aclose()
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(_close(opened.result()), loop)


@dataclass(frozen=True, slots=True)
class _Living(Generic[S]):
    """A session, and the generator that closes it."""

    session: S
    keeper: AsyncGenerator[S, None]


async def _keep(opened: Callable[[], Awaitable[S]], closed: Callable[[S], Awaitable[None]]) -> AsyncGenerator[S, None]:
    """Yield a session, and close it when the generator is closed or dropped, or its loop ends."""
    session = await opened()
    try:
        yield session
    finally:
        await closed(session)


async def _close(living: _Living[S]) -> None:
    await living.keeper.aclose()
