"""Work that goes on while something is being opened for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from bcp.pipeline.failure import is_cancellation

__all__ = ["beside"]

C = TypeVar("C")
T = TypeVar("T")


async def beside(
    context: AbstractAsyncContextManager[C], opened: Callable[[C], None], work: Callable[[], Awaitable[T]]
) -> T:
    """Do the work while the context is being entered; leave the context when the work has ended.

    ``opened`` is called with what the context gives, which nothing uses any more when it is left, cancelled or not. The
    context is entered and left by the calling task, with the work's error where it failed. Whichever of the two fails
    first is raised, as it is, and a second error becomes a note; never an exception group.
    """
    done = anyio.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    async def run() -> None:
        try:
            results.append(await work())
        except BaseException as error:
            if is_cancellation(error):
                raise
            errors.append(error)
        finally:
            done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run, name="bcp work beside an opening")
        try:
            async with context as value:
                opened(value)
                try:
                    await done.wait()
                finally:
                    await _over(done, group)
                if errors:
                    raise errors[0]  # noqa: TRY301 -- it has to pass through the context
        except BaseException as error:
            if is_cancellation(error):
                raise
            group.cancel_scope.cancel()
            if not errors:
                errors.append(error)
            elif error is not errors[0]:
                errors[0].add_note(f"after that, {error!r}")
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # its traceback leads here: a cycle, which would keep the state's tensors alive
    return results[0]


async def _over(done: anyio.Event, group: TaskGroup) -> None:
    """Where the work is not done because this is being cancelled, cancel it as well, and wait until it has ended.

    Before the context is left: that closes files, and a thread that still writes would write to whatever file the
    process opens next, under the same number.
    """
    if not done.is_set():
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            while not done.is_set():
                with suppress(asyncio.CancelledError):  # a second cancellation must not cut the waiting short
                    await done.wait()
