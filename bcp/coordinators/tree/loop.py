"""The one event loop on which all gRPC coordinators of a process talk, separate from the loops of their callers.

gRPC's asyncio side serves one loop well and several badly. A busy loop of a caller delays no word of another rank.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar, TypeVarTuple
from weakref import WeakSet

from bcp.errors import InputError
from bcp.runtime.event_loop import Loop
from bcp.runtime.process import in_forked_child, process_lock

__all__ = ["CoordinatorLoop", "current_loop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_EXIT_SECONDS = 8.0  # longer than any node's own limit


class Closable(Protocol):
    """Nodes that are closed when the process ends."""

    async def aclose(self) -> None:
        """Close all connections and release everything."""


class CoordinatorLoop(Loop):
    """The loop of all coordinators."""

    def __init__(self) -> None:
        self.residents: WeakSet[Closable] = WeakSet()  # the coordinators' nodes, which are closed at exit
        super().__init__("bcp-coordinators")

    def __repr__(self) -> str:
        return f"<Loop of {len(self.residents)} coordinators, {'alive' if self.thread.is_alive() else 'ended'}>"

    @property
    def alive(self) -> bool:
        """Return whether calls get through."""
        return self.thread.is_alive() and not self.asyncio_loop.is_closed()

    @property
    def is_here(self) -> bool:
        """Return whether the caller runs on this loop."""
        return asyncio._get_running_loop() is self.asyncio_loop  # noqa: SLF001 -- the public one raises where there is none

    def post(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call a function on the loop, after all that was posted earlier; from any thread."""
        try:
            if self.is_here:  # costs a tenth of waking another thread
                self.asyncio_loop.call_soon(function, *args)
            else:
                self.asyncio_loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:
            raise InputError("the process is ending: ranks can agree on nothing any more") from error

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; from any other thread."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.asyncio_loop)
        except RuntimeError as error:
            work.close()
            raise InputError("the process is ending: ranks can agree on nothing any more") from error

    def close(self) -> None:
        """Close all residents, then end the thread."""
        with suppress(TimeoutError, InputError):
            self.run(self._close_residents()).result(_EXIT_SECONDS)
        with suppress(RuntimeError):
            self.asyncio_loop.call_soon_threadsafe(self.asyncio_loop.stop)
        self.thread.join(_EXIT_SECONDS)

    async def _close_residents(self) -> None:
        closing: list[Awaitable[None]] = [resident.aclose() for resident in list(self.residents)]
        await asyncio.gather(*closing, return_exceptions=True)


_lock = process_lock()
_current: CoordinatorLoop | None = None
_inherited: list[object] = []


def current_loop() -> CoordinatorLoop:
    """Return the loop of this process, which the first call starts."""
    global _current  # noqa: PLW0603 -- one a process
    with _lock:
        if _current is None or not _current.alive:
            _current = CoordinatorLoop()
        return _current


def _forget_in_child() -> None:
    """Give a forked child a fresh start; keep its copies of the parent's objects: deleting them would use the loop."""
    global _current  # noqa: PLW0603 -- one a process
    if _current is not None:
        _inherited.extend((_current, *_current.residents))
    _current = None


def _close_at_exit() -> None:
    if _current is not None:
        _current.close()


in_forked_child(_forget_in_child)
atexit.register(_close_at_exit)
