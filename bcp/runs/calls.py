"""One body for a method and its asynchronous twin.

A body is a generator. It runs in the caller's thread, where the caller's device and streams can be seen, and yields
functions to await. Both drivers await them on bcp's own loop, so a caller's loop is never blocked by a twin.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, TypeVar

from bcp._plain import plain
from bcp.errors import BcpError
from bcp.runtime import bridge as _bridge

__all__ = ["Body", "adrive", "drive", "noting", "once"]

T = TypeVar("T")
Body = Generator[Callable[[], Awaitable[Any]], Any, T]


def drive(body: Body[T], name: str) -> T:
    """Run a body to its end; block while it awaits."""
    try:
        function = next(body)
        while True:
            function = _sent(body, partial(_bridge.run, function, name=name))
    except StopIteration as end:
        result: T = end.value
        return result
    except BcpError as error:
        raise plain(error) from error.__cause__


async def adrive(body: Body[T], name: str) -> T:
    """Run a body to its end from a coroutine, without blocking its loop."""
    try:
        function = next(body)
        while True:
            try:
                answer = await _bridge.start(_awaiting(function), name=name)
            except Exception as error:  # noqa: BLE001 -- the body decides
                function = body.throw(error)
            else:
                function = body.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    except BcpError as error:
        raise plain(error) from error.__cause__


def _sent(body: Body[T], answer: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
    """Send the result or the error of the last function into the body; return its next function."""
    try:
        value = answer()
    except BaseException as error:  # noqa: BLE001 -- the body decides, about a Ctrl-C as well
        return body.throw(error)
    return body.send(value)


def _awaiting(function: Callable[[], Awaitable[Any]]) -> Callable[[Callable[[], None]], Awaitable[Any]]:
    return lambda _: function()


def once(function: Callable[[], Awaitable[T]]) -> Body[T]:
    """Make a body of one function."""
    result: T = yield function
    return result


def noting(errors: list[Exception], function: Callable[[], Awaitable[object]]) -> Body[None]:
    """Make a body of one function, which adds its error to a list instead of raising it."""
    try:
        yield function
    except Exception as error:  # noqa: BLE001 -- the caller raises it
        errors.append(error)
