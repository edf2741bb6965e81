"""The frame of a tool: a synchronous call of its coroutine, its progress, and the end of a failure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from bcp._plain import plain
from bcp.errors import BcpError
from bcp.runtime import bridge as _bridge

__all__ = ["Progress", "called", "counting", "ignore_progress", "say_what_is_left"]

T = TypeVar("T")

Progress = Callable[[int, int], object]
"""Called with the bytes that are done, and with the bytes of all the work."""


def ignore_progress(_done: int, _total: int) -> None:
    """Draw nothing."""


def counting(progress: Progress, total: int) -> Callable[[int], object]:
    """Return a function that is told the bytes of each part, and tells ``progress`` the sum and the total.

    The sum may exceed the estimated total at the end: then it is the total.
    """
    done = 0

    def told(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, max(total, done))

    return told


def called(function: Callable[[], Awaitable[T]], name: str) -> T:
    """Run a tool's coroutine on bcp's loop, and raise errors without the frames of the loop."""
    try:
        return _bridge.run(function, name=name)
    except BcpError as error:
        raise plain(error) from error.__cause__


@contextmanager
def say_what_is_left(error: BaseException, words: str) -> Iterator[None]:
    """Note in an error that the clean-up after it has failed, too. The body is the clean-up.

    Args:
        error: the error that has ended the work.
        words: say what may be left, and where.

    """
    try:
        yield
    except BcpError as failed:
        error.add_note(f"{words}: {failed}")
