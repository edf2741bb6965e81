"""One event loop on one thread, for the whole process.

Two hard moments are here: a fork while something is under way (dataloader workers), and the end of the process.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401 -- registers an exit hook, which has to be there before ours: last in, first out
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol
from weakref import WeakSet

import anyio._backends._asyncio  # noqa: F401 -- imported at first use: a fork just then leaves the child half a module

from bcp._log import log
from bcp.runtime.process import in_forked_child, process_rlock

asyncio.new_event_loop().close()  # the first one takes a lock of asyncio, which a fork just then leaves taken for ever

__all__ = ["Loop", "Running", "current_loop", "lock", "refuse_on_own_thread", "wait_for", "words_of"]

NAP_SECONDS = 0.2
TELL_SECONDS = 10.0
"""Between two lines about an operation that the end of the process waits for."""


class Running(Protocol):
    """An operation on the loop, as the end of the process sees it."""

    name: str

    @property
    def daemon(self) -> bool:
        """Whether it is cancelled at the end of the process, in the place of being waited for."""

    @property
    def progress(self) -> Callable[[], str]:
        """A function that says what is done and what is left; nothing if that is not known."""

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Block until it has ended, at most so many seconds; say whether it has."""

    def cancel(self) -> None:
        """Ask it to stop."""

    def tell_unseen(self) -> bool:
        """Log its error, if no caller has received it."""


def wait_for(future: Future[Any], timeout: float | None = None) -> bool:
    """Block until the future is done, at most ``timeout`` seconds; say whether it is.

    Sleeps in short naps: of a signal that arrives just before it falls asleep it would learn only when it wakes up.
    """
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while not future.done() and (left := deadline - time.monotonic()) > 0:
        try:
            future.result(min(left, NAP_SECONDS))
        except TimeoutError:
            pass
        except RuntimeError as error:
            # a handler that raises between two lines of Condition.wait: the lock is free already, and its exit fails
            raise error if error.__context__ is None else error.__context__ from None
    return future.done()


def words_of(background: Running) -> str:
    """Return the name of an operation and its progress.

    Example::

        words_of(background)  # "save to /ckpt/100 (1.2 GB of 3.4 GB written)"

    """
    progress = background.progress()
    return f"{background.name} ({progress})" if progress else background.name


class Loop:
    """An event loop on a daemon thread, which does not keep the process alive while it is idle."""

    def __init__(self, name: str = "bcp-loop") -> None:
        self.asyncio_loop = asyncio.new_event_loop()
        self.running: set[Running] = set()  # not ended; any thread may change it: sets change atomically
        self.failed: WeakSet[Running] = WeakSet()  # failed, and somebody may still ask for the error
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.asyncio_loop):  # leaving it closes all that the loop has open
            self.asyncio_loop.run_forever()

    def wait_until_idle(self) -> None:
        """Block until no operation is running; say now and then what is left."""
        while self.running:
            for background in list(self.running):
                while not background.wait_ended(TELL_SECONDS):
                    log.warning("still waiting for %s", words_of(background))

    def close(self) -> None:
        """Log failures that no caller has asked for, stop the loop and wait for its thread."""
        lost = [background.name for background in list(self.failed) if background.tell_unseen()]
        if lost:
            log.error(
                "%s failed, and the exit status of the process does not tell of it: call wait() on the handle, or use "
                "it in a with block, before the program ends",
                ", ".join(lost),
            )
        if self.thread.is_alive():
            self.asyncio_loop.call_soon_threadsafe(self.asyncio_loop.stop)
            self.thread.join()


lock = process_rlock()  # re-entrant: a signal handler may save, and interrupt one who holds it
_current: Loop | None = None
_inherited: list[Loop] = []


def current_loop() -> Loop:
    """Return the loop of this process; start one where there is none. It does not end while the caller has the lock."""
    global _current  # noqa: PLW0603 -- one a process
    if _current is None or not _current.thread.is_alive():  # a SystemExit in somebody's task ends a loop
        _current = Loop()
    return _current


def refuse_on_own_thread(action: str) -> None:
    """Raise where waiting would block the very thread that is waited for."""
    if _current is not None and threading.current_thread() is _current.thread:
        raise RuntimeError(f"cannot {action} on bcp's own event loop: it would wait for itself; await the async twin")


def _forget_in_child() -> None:
    """Give a forked child a fresh start: it has the objects of the parent's loop, but not its thread.

    They are kept: were they collected, the parent's coroutines would run their ``finally`` blocks here, too.
    """
    global _current  # noqa: PLW0603 -- one a process
    if _current is not None:
        _inherited.append(_current)
    _current = None


def _finish_at_exit(*, late: bool) -> None:
    """Wait for running operations before the process ends; the first Ctrl-C cancels them, the second gives them up.

    Daemon operations are cancelled. ``late``: Python has shut its thread pools down already, so that operations which
    need one will fail.
    """
    global _current  # noqa: PLW0603 -- one a process
    while (loop := _current) is not None:
        for background in list(loop.running):
            if background.daemon:
                background.cancel()
        try:
            _tell_what_is_left(loop, late=late)
            loop.wait_until_idle()
        except KeyboardInterrupt:
            try:
                log.error("interrupted; cancelling %s. Ctrl-C again leaves at once", _operations(len(loop.running)))
                for background in list(loop.running):
                    background.cancel()
                loop.wait_until_idle()
            except KeyboardInterrupt:
                _current = None  # for the late hook, which would wait again
                raise
        with lock:
            if loop.running:
                continue  # another thread has started something meanwhile
            _current = None
        loop.close()


def _tell_what_is_left(loop: Loop, *, late: bool) -> None:
    names = [words_of(background) for background in list(loop.running) if not background.daemon]
    if names:
        log.warning(
            "waiting for %s before the process ends: %s. Ctrl-C cancels them, and their files go",
            _operations(len(names)),
            ", ".join(names),
        )
        if late:
            log.error("what they still need worker threads for is lost; wait() for them before the program ends")


def _operations(count: int) -> str:
    return f"{count} operation" if count == 1 else f"{count} operations"


in_forked_child(_forget_in_child)
# atexit alone is too late for worker threads. The better hook is private; where it is missing, the late one tells.
atexit.register(_finish_at_exit, late=True)
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_finish_at_exit, late=False)  # noqa: SLF001 -- the only hook that comes in time
