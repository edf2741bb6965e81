"""Calls of which some are made at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import anyio

from bcp.backends.objects.store import RequestError

__all__ = ["in_turns"]

T = TypeVar("T")
AT_ONCE = 16


async def in_turns(calls: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """Make calls, some at a time; return their results in order.

    A transient error does not end the other calls, so that the next attempt finds more of the work done. It is raised
    after them. Any other error ends those that have not begun.
    """
    waiting = list(enumerate(calls))[::-1]
    results: dict[int, T] = {}
    transient: list[RequestError] = []
    final: list[Exception] = []

    async def work() -> None:
        while waiting and not final:
            number, call = waiting.pop()
            try:
                results[number] = await call()
            except Exception as error:  # noqa: BLE001 -- raised below
                if isinstance(error, RequestError) and error.transient:
                    transient.append(error)
                else:
                    final.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(min(AT_ONCE, len(waiting))):
            group.start_soon(work)
    if errors := final + transient:
        raise errors[0]
    return [results[number] for number in sorted(results)]
