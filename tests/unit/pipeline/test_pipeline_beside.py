from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from bcp.pipeline import run_while_opening
from bcp.runtime.threads import in_thread

pytestmark = pytest.mark.anyio


class Opening:
    """A context that takes its time to open, and notes how it was left."""

    def __init__(self, *, entry: Exception | None = None, leaving: Exception | None = None) -> None:
        self.may_open = anyio.Event()
        self.left_with: BaseException | str | None = "never left"
        self.opened: list[str] = []
        self.tasks: list[anyio.TaskInfo] = []
        self._entry, self._leaving = entry, leaving

    @asynccontextmanager
    async def context(self) -> AsyncIterator[str]:
        await self.may_open.wait()
        if self._entry:
            raise self._entry
        self.tasks.append(anyio.get_current_task())
        try:
            yield "files"
        except BaseException as error:
            self.left_with = error
            raise
        else:
            self.left_with = None
        finally:
            self.tasks.append(anyio.get_current_task())
        if self._leaving:
            raise self._leaving


async def test_work_begins_before_the_context_is_open() -> None:
    opening, order = Opening(), list[str]()

    async def work() -> int:
        order.append("begun")
        opening.may_open.set()
        while not opening.opened:
            await anyio.lowlevel.checkpoint()
        order.append(opening.opened[0])
        assert opening.left_with == "never left"
        return 7

    assert await run_while_opening(opening.context(), opening.opened.append, work) == 7
    assert order == ["begun", "files"]
    assert opening.left_with is None
    assert opening.tasks == [anyio.get_current_task()] * 2


async def test_the_works_error_passes_through_the_context_and_comes_out_as_itself() -> None:
    opening, boom = Opening(), OSError("boom")
    opening.may_open.set()

    async def work() -> None:
        raise boom

    with pytest.raises(OSError, match="boom") as caught:
        await run_while_opening(opening.context(), opening.opened.append, work)
    assert caught.value is boom
    assert opening.left_with is boom


async def test_where_opening_fails_the_work_is_cancelled() -> None:
    opening, cleaned = Opening(entry=OSError("no space")), list[str]()

    async def work() -> None:
        opening.may_open.set()
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.append("work")

    with pytest.raises(OSError, match="no space"):
        await run_while_opening(opening.context(), opening.opened.append, work)
    assert cleaned == ["work"]
    assert opening.opened == []


async def test_an_error_at_the_end_of_the_context_comes_out() -> None:
    opening = Opening(leaving=OSError("fsync failed"))
    opening.may_open.set()
    with pytest.raises(OSError, match="fsync failed"):
        await run_while_opening(opening.context(), opening.opened.append, anyio.lowlevel.checkpoint)


async def test_a_second_error_becomes_a_note() -> None:
    @asynccontextmanager
    async def clumsy() -> AsyncIterator[None]:
        try:
            yield
        except OSError:
            raise ValueError("cannot clean up") from None

    async def work() -> None:
        raise OSError("boom")

    with pytest.raises(OSError, match="boom") as caught:
        await run_while_opening(clumsy(), id, work)
    assert "cannot clean up" in caught.value.__notes__[0]


async def test_cancellation_ends_both() -> None:
    opening, cleaned = Opening(), list[str]()
    opening.may_open.set()

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.append("work")

    async with anyio.create_task_group() as group:
        group.start_soon(run_while_opening, opening.context(), opening.opened.append, work)
        while not opening.opened:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert cleaned == ["work"]
    assert isinstance(opening.left_with, anyio.get_cancelled_exc_class())


async def turns() -> None:
    """Let everything that can go on do so."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("how", ["scope", "task", "task twice"])
async def test_nothing_uses_what_was_opened_when_it_is_left_by_a_cancellation(how: str) -> None:
    opening, said = Opening(), list[str]()
    began, at_it, may_end = anyio.Event(), threading.Event(), threading.Event()
    opening.may_open.set()

    def write() -> None:
        at_it.set()
        may_end.wait(60)
        said.append(f"written, left: {opening.left_with != 'never left'}")

    async def work() -> None:
        began.set()
        await in_thread(write)

    scope = anyio.CancelScope()

    async def main() -> None:
        with scope:
            await run_while_opening(opening.context(), lambda _: None, work)

    task = asyncio.create_task(main())
    await began.wait()
    await in_thread(at_it.wait, 30)
    if how == "scope":
        scope.cancel()
    else:
        task.cancel()
    await turns()
    if how == "task twice":
        task.cancel()
        await turns()
    assert opening.left_with == "never left"
    may_end.set()
    await asyncio.wait([task])
    assert said == ["written, left: False"]
    assert isinstance(opening.left_with, asyncio.CancelledError)
    assert task.cancelled() or scope.cancelled_caught
