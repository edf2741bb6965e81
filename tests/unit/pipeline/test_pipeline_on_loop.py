"""Coroutines that are awaited on the event loop of another thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator

import anyio
import pytest

from bcp.runtime.threads import on_loop

pytestmark = pytest.mark.anyio


@pytest.fixture
def other() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    assert not asyncio.all_tasks(loop)
    loop.close()


async def test_it_runs_there_with_the_callers_context(other: asyncio.AbstractEventLoop) -> None:
    where = contextvars.ContextVar[str]("where")
    where.set("here")

    async def work(number: int) -> tuple[int, str, bool]:
        return number, where.get(), asyncio.get_running_loop() is other

    assert await on_loop(other, work, 7) == (7, "here", True)


@pytest.mark.parametrize("error", [ValueError("a value"), SystemExit(3), asyncio.CancelledError("a task's own")])
async def test_an_error_comes_out_as_itself(other: asyncio.AbstractEventLoop, error: BaseException) -> None:
    async def work() -> None:
        raise error

    async def well() -> int:
        return 1

    with pytest.raises(type(error), match=str(error)):
        await on_loop(other, work)
    assert await on_loop(other, well) == 1


@pytest.mark.parametrize("twice", [False, True])
async def test_cancelled_it_cancels_the_work_and_waits_for_its_end(
    other: asyncio.AbstractEventLoop,
    twice: bool,  # noqa: FBT001 -- a parameter
) -> None:
    begun, cancelled, may_end, ended = threading.Event(), threading.Event(), asyncio.Event(), []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()
            await may_end.wait()
            ended.append(True)

    task = asyncio.create_task(on_loop(other, work))
    assert await anyio.to_thread.run_sync(begun.wait, 60)
    task.cancel()
    assert await anyio.to_thread.run_sync(cancelled.wait, 60)
    if twice:
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    other.call_soon_threadsafe(may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


async def test_work_that_has_not_begun_never_begins(other: asyncio.AbstractEventLoop) -> None:
    held, begun = threading.Event(), []

    async def work() -> None:
        begun.append(True)

    other.call_soon_threadsafe(held.wait)
    task = asyncio.create_task(on_loop(other, work))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.set()
    assert not begun
