"""Calls bcp's coroutines for those who have no event loop, or do not want to wait: on a loop of bcp's own.

This loop knows nothing of the caller's loop, so a synchronous call works inside a running one too. The hard moment is
here, Ctrl-C while waiting; forks and the end of the process are in :mod:`bcp.runtime.event_loop`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import structlog

from bcp._log import log, was_logged
from bcp.errors import InputError
from bcp.runtime import event_loop as _loop
from bcp.runtime.event_loop import Loop, refuse_on_own_thread, wait_for
from bcp.runtime.threads import in_thread

__all__ = ["Background", "run", "start", "start_handed_over"]

T = TypeVar("T")
Operation = Callable[[Callable[[], None]], Awaitable[T]]
Outcome = tuple[T, None] | tuple[None, BaseException]

_within: ContextVar[tuple[object, ...]] = ContextVar("bcp operations around", default=())
"""Tokens of the operations whose code runs here, callbacks in threads included. None of them can be waited for."""

CLEAN_UP_SECONDS = 1.0
"""An interrupted caller is told if its operation takes longer than this to clean up."""


def run(function: Callable[[], Awaitable[T]], *, name: str = "a synchronous call") -> T:
    """Await ``function()`` on bcp's loop; block until it has ended, and return its result or raise its error.

    It sees the caller's context variables. Works inside a running event loop too, which it blocks meanwhile, as any
    synchronous call does. Whatever interrupts the waiting (Ctrl-C, a signal handler that raises) cancels the operation,
    waits until that has cleaned up, and goes on its way; a second Ctrl-C cuts this waiting short. Under
    ``asyncio.run`` it takes one more: Python turns the first into a cancellation of the main task, which is blocked.

    Raises RuntimeError on bcp's own loop, which would wait for itself.
    """
    refuse_on_own_thread(f"wait for {name}")
    return Background[T](name)._join(lambda _: function())  # noqa: SLF001 -- the two are one


def start(function: Operation[T], *, name: str, daemon: bool = False) -> Background[T]:
    """Await ``function(started)`` on bcp's loop, in the background; it calls ``started()`` when the caller may go on.

    ``name`` stands for the operation in messages, as in ``"save to /ckpt/100"``. ``function`` sees the caller's
    context variables. A daemon operation is cancelled at the end of the process; any other one is waited for.
    """
    background = Background[T](name, daemon=daemon)
    background._launch(function)  # noqa: SLF001 -- the two are one
    return background


def start_handed_over(
    function: Callable[[Callable[[], None], Callable[[], None]], Awaitable[T]], *, name: str
) -> Background[T]:
    """Do the same with an operation that others end if this process does not.

    ``function(started, handed_over)`` calls its second argument once they can. From then on the end of the process does
    not wait for it.
    """
    background = Background[T](name)
    background._launch(partial(_with_both, function, background._handed_over))  # noqa: SLF001 -- the two are one
    return background


class Background(Generic[T]):
    """An operation on bcp's loop. Awaitable from any event loop.

    ``progress`` says what is done and what is left, for whoever has to wait. A failure without a waiter is logged as an
    error when the object is forgotten or the process ends. In a forked child it raises RuntimeError wherever it would
    have to wait: the operation goes on in the parent only.
    """

    _pid = 0  # until the object is whole: one whose making was interrupted is nobody's

    def __init__(self, name: str, *, daemon: bool = False) -> None:
        self.name = name
        self._daemon = daemon
        self._handed_over: Future[bool] = Future()  # False: ended before it got so far
        self._loop: Loop | None = None
        self._task: asyncio.Task[Outcome[T]] | None = None
        self._started: Future[bool] = Future()  # False: ended before it got so far
        self._finished: Future[None] = Future()
        for future in (self._started, self._handed_over, self._finished):
            future.set_running_or_notify_cancel()  # from now on, cancelling a waiter cannot cancel them
        self._result: T | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._cancelled = False
        self._seen = False
        self._token = object()
        self.progress: Callable[[], str] = str
        self._pid = os.getpid()

    @property
    def daemon(self) -> bool:
        """Whether the end of the process cancels it, in the place of waiting."""
        return self._daemon or self.handed_over

    @property
    def handed_over(self) -> bool:
        """Whether others will end it if this process does not."""
        return self._handed_over.done() and self._handed_over.result()

    def wait_handed_over(self, timeout: float | None = None) -> None:
        """Block until others can end the operation, or until it has ended; raise its error if it failed before.

        TimeoutError after ``timeout`` seconds, or Ctrl-C, end the waiting and leave the operation running.
        """
        self._check()
        if not wait_for(self._handed_over, timeout):
            raise TimeoutError(f"{self.name} is not safe after {timeout} s; it goes on")
        if not self.handed_over:
            self._take()

    async def settled(self) -> None:
        """Wait until others can end the operation, or until it has ended, well or not, from any event loop."""
        self._check_process()
        self._refuse_within()
        if not await asyncio.wrap_future(self._handed_over):
            await self.ended()

    def wait_started(self) -> None:
        """Block until the operation says that the caller may go on, or has ended; raise its error if it failed before.

        An interrupt of the waiting cancels the operation, as in :func:`run`.
        """
        self._check()
        try:
            wait_for(self._started)
        except BaseException:
            self._abort()
            raise
        if not self._started.result():
            self._take()

    async def astarted(self) -> None:
        """Do the same from any event loop, without blocking it.

        Cancelling this cancels the operation and waits until it has cleaned up.
        """
        self._check_process()
        self._refuse_within()
        try:
            await asyncio.wrap_future(self._started)
        except asyncio.CancelledError:
            self.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wrap_future(self._finished)
            raise
        if not self._started.result():
            self._take()

    def wait(self, timeout: float | None = None) -> T:
        """Block until the operation has ended; return its result or raise its error. May be called many times.

        TimeoutError after ``timeout`` seconds, or Ctrl-C, end the waiting and leave the operation running.
        Raises ``concurrent.futures.CancelledError`` if it was cancelled.
        """
        self._check()
        if not wait_for(self._finished, timeout):
            raise TimeoutError(f"{self.name} is not done after {timeout} s; it goes on")
        return self._take()

    async def result(self) -> T:
        """Do the same from any event loop, without blocking it. Cancelling this leaves the operation running."""
        await self.ended()
        return self._take()

    async def ended(self) -> None:
        """Wait until it has ended, well or not, from any event loop. Cancelling this leaves the operation running."""
        self._check_process()
        self._refuse_within()
        await asyncio.wrap_future(self._finished)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    def add_done_callback(self, function: Callable[[], object]) -> None:
        """Call a function in a thread once the operation has ended, well or not; log its error.

        The call is an operation of its own, so the end of the process waits for it.
        """

        async def call(_: Callable[[], None]) -> None:
            try:
                await in_thread(function)
            except Exception as error:  # noqa: BLE001 -- nobody waits for a callback
                log.error("the callback %r of %s failed", function, self.name, exc_info=error)

        context = copy_context()  # the caller's: the function may wait for what has ended
        begin = partial(start, call, name=f"a callback of {self.name}")
        self._finished.add_done_callback(lambda _: context.run(begin))

    def done(self) -> bool:
        """Say whether it has ended, well or not. Never waits, never raises."""
        return self._ended

    def failed(self) -> bool:
        """Say whether it has ended with an error or was cancelled. Never waits, never raises."""
        return self._ended and self._error is not None

    def exception(self) -> BaseException | None:
        """Return the error that it ended with; None if it ended well or still runs. Never waits."""
        self._seen = self._seen or self._ended
        return self._error

    def cancel(self) -> None:
        """Ask the operation to stop. It ends when it has cleaned up; ``wait`` then raises CancelledError."""
        self._check_process()
        if self._loop is not None and not self._ended:
            self._cancelled = True
            self._loop.asyncio_loop.call_soon_threadsafe(self._cancel_task)

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Block until it has ended, at most ``timeout`` seconds; say whether it has. Never raise its error."""
        self._refuse_within()
        return wait_for(self._finished, timeout)

    def tell_unseen(
        self,
        log: structlog.stdlib.BoundLogger = log,
        cancelled: type[BaseException] = CancelledError,
        was_logged: Callable[[BaseException], bool] = was_logged,
    ) -> bool:
        """Log an error that no caller has received, and say whether there is one.

        A cancellation that was asked for is none.
        """
        if self._error is None or self._seen:
            return False
        self._seen = True
        if self.handed_over:  # its owner has told
            return False
        if self._cancelled and isinstance(self._error, cancelled):
            return False
        tell = log.warning if was_logged(self._error) else log.error  # one error line for one failure
        tell("%s failed, and nobody waited for it", self.name, exc_info=self._error)
        return True

    def __repr__(self) -> str:
        if self._pid != os.getpid():
            state = f"belongs to process {self._pid}"
        elif not self._ended:
            state = "cancelling" if self._cancelled else "running"
        else:
            state = "done" if self._error is None else repr(self._error)
        return f"<Background {self.name}: {state}>"

    def __del__(
        self, getpid: Callable[[], int] = os.getpid, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        """Do not let an error go unnoticed.

        Defaults stand in for module globals, which may be None while the interpreter ends. Errors that nobody asked for
        have been logged by then: see :func:`bcp.runtime.event_loop._finish_at_exit`.
        """
        if self._pid == getpid() and not is_finalizing():
            self.tell_unseen()

    # -- the caller's side ---------------------------------------------------------------------

    def _check_process(self) -> None:
        """Refuse in a forked child, where no thread would ever wake a waiter."""
        if self._pid != os.getpid():
            raise RuntimeError(
                f"{self.name} was begun by process {self._pid}, and this is its forked child {os.getpid()}: "
                "wait for it or cancel it in the parent"
            )

    def _check(self) -> None:
        """Refuse to wait where that would last for ever."""
        self._check_process()
        self._refuse_within()
        refuse_on_own_thread(f"wait for {self.name}")

    def _refuse_within(self) -> None:
        """Refuse to wait in a callback of the operation itself."""
        if not self._ended and self._token in _within.get():
            raise InputError(
                f"waiting for {self.name} in its own callback would never end: return from the callback, and wait "
                "elsewhere"
            )

    def _launch(self, function: Operation[T]) -> None:
        try:
            with _loop.lock:
                self._loop = _loop.current_loop()
                self._loop.running.add(self)
                # This copies the caller's context variables, and the task copies them from there.
                self._loop.asyncio_loop.call_soon_threadsafe(self._begin, function)
        except BaseException:
            self._abort()
            raise

    def _join(self, function: Operation[T]) -> T:
        """Launch, wait and return or raise the outcome."""
        try:
            self._launch(function)
            wait_for(self._finished)
        except BaseException:
            self._abort()
            raise
        try:
            return self._take()
        finally:
            self._error = None  # its traceback leads here: a cycle, which would keep the state's tensors alive

    def _abort(self) -> None:
        """Cancel, and wait until the operation has cleaned up."""
        if self._loop is not None:
            self.cancel()
            if not wait_for(self._finished, CLEAN_UP_SECONDS):
                log.warning("interrupted; %s cleans up before the call ends. Ctrl-C again leaves at once", self.name)
                wait_for(self._finished)

    def _take(self) -> T:
        """Return or raise the outcome of the ended operation."""
        self._seen = True
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set, where there is no error

    # -- the loop's side -----------------------------------------------------------------------

    def _begin(self, function: Operation[T]) -> None:
        # The task must not know this object: its error would, and an error nobody asks for could not be told in time.
        settled = _settled(function, partial(_set_once, self._started), self._token)
        self._task = asyncio.get_running_loop().create_task(settled, name=f"bcp {self.name}")
        self._task.add_done_callback(self._end)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._ended:  # the launch was interrupted
            self._settle(None, asyncio.CancelledError())

    def _end(self, task: asyncio.Task[Outcome[T]]) -> None:
        self._task = None
        # A task that is cancelled before its first step never gets to return an outcome.
        result, error = (None, asyncio.CancelledError()) if task.cancelled() else task.result()
        self._settle(result, error)

    def _settle(self, result: T | None, error: BaseException | None) -> None:
        """Keep the outcome and wake who waits."""
        assert self._loop is not None  # noqa: S101 -- this runs on it
        if isinstance(error, asyncio.CancelledError):
            cancelled = CancelledError(f"{self.name} was cancelled")  # asyncio's own would cancel the one who waits
            cancelled.__cause__ = error
            error = cancelled
        self._result, self._error, self._ended = result, error, True
        if error is not None:
            self._loop.failed.add(self)
        self._loop.running.discard(self)
        _set_once(self._started, reached=False)
        _set_once(self._handed_over, reached=False)
        self._finished.set_result(None)


async def _settled(function: Operation[T], started: Callable[[], None], token: object) -> Outcome[T]:
    """Await the function; hand an error over as a value, since an interrupt raised in a task would stop the loop."""
    _within.set((*_within.get(), token))  # of this task and its threads
    try:
        return await function(started), None
    except BaseException as error:  # noqa: BLE001 -- raised again by who waits, and logged if nobody does
        return None, error


async def _with_both(
    function: Callable[[Callable[[], None], Callable[[], None]], Awaitable[T]],
    handed_over: Future[bool],
    started: Callable[[], None],
) -> T:
    return await function(started, partial(_set_once, handed_over))


def _set_once(future: Future[bool], *, reached: bool = True) -> None:
    with suppress(InvalidStateError):
        future.set_result(reached)
