from __future__ import annotations

import asyncio
import gc
import os

import anyio
import anyio.from_thread
import pytest

from bcp.backends.objects.session import PerLoop


class Sessions:
    def __init__(self, failures: int = 0) -> None:
        self.opened: list[object] = []
        self.closed: list[object] = []
        self.failures = failures
        self.one_is_closed = asyncio.Event()
        self.per_loop = PerLoop(self.open, self.close)

    async def open(self) -> object:
        await asyncio.sleep(0.01)
        if self.failures:
            self.failures -= 1
            raise OSError("no way")
        self.opened.append(session := object())
        return session

    async def close(self, session: object) -> None:
        self.closed.append(session)
        self.one_is_closed.set()


@pytest.mark.anyio
async def test_tasks_that_ask_at_once_get_the_same_session() -> None:
    sessions = Sessions()
    got = await asyncio.gather(*(sessions.per_loop.here() for _ in range(5)))
    assert set(got) == set(sessions.opened)
    assert len(sessions.opened) == 1
    await sessions.per_loop.aclose()
    await sessions.per_loop.aclose()
    assert sessions.closed == sessions.opened


def test_each_loop_has_its_own_which_ends_with_it() -> None:
    sessions = Sessions()
    for _ in range(3):
        asyncio.run(sessions.per_loop.here())
        assert sessions.closed == sessions.opened
    assert len(sessions.opened) == 3


@pytest.mark.anyio
async def test_one_that_is_dropped_is_closed() -> None:
    sessions = Sessions()
    await sessions.per_loop.here()
    del sessions.per_loop
    gc.collect()
    await sessions.one_is_closed.wait()
    assert sessions.closed == sessions.opened


@pytest.mark.anyio
async def test_one_that_cannot_be_opened_is_tried_again() -> None:
    sessions = Sessions(failures=1)
    with pytest.raises(OSError, match="no way"):
        await sessions.per_loop.here()
    assert await sessions.per_loop.here() in sessions.opened


@pytest.mark.anyio
async def test_whoever_opens_it_may_be_cancelled() -> None:
    sessions = Sessions()
    with anyio.move_on_after(0.001):
        await sessions.per_loop.here()
    assert await sessions.per_loop.here() in sessions.opened


@pytest.mark.anyio
async def test_if_the_task_that_opens_it_is_cancelled_another_one_does() -> None:
    sessions, got = Sessions(), []

    async def ask() -> None:
        got.append(await sessions.per_loop.here())

    opener = asyncio.create_task(ask())
    await asyncio.sleep(0)
    others = [asyncio.create_task(ask()) for _ in range(3)]
    await asyncio.sleep(0)
    opener.cancel()
    await asyncio.gather(*others)
    assert opener.cancelled()
    assert got == sessions.opened * 3


def test_sessions_of_closed_loops_are_forgotten() -> None:
    sessions = Sessions()
    for _ in range(3):
        asyncio.run(sessions.per_loop.here())
        sessions.opened.clear()
    assert repr(sessions.per_loop) == "<PerLoop: 1 sessions>"


def test_closing_closes_the_session_of_a_loop_in_another_thread() -> None:
    sessions = Sessions()
    with asyncio.Runner() as runner, anyio.from_thread.start_blocking_portal() as portal:
        theirs = portal.call(sessions.per_loop.here)
        mine = runner.run(sessions.per_loop.here())
        runner.run(sessions.per_loop.aclose())
        portal.call(asyncio.sleep, 0.01)
    assert set(sessions.closed) == {mine, theirs}


def test_a_forked_child_opens_its_own_and_closes_none_of_its_parents() -> None:
    sessions = Sessions()
    with asyncio.Runner() as runner:
        mine = runner.run(sessions.per_loop.here())
        pid = os.fork()
        if not pid:
            theirs = asyncio.new_event_loop().run_until_complete(sessions.per_loop.here())
            os._exit(0 if theirs is not mine and not sessions.closed else 1)
        assert os.waitpid(pid, 0)[1] == 0
        runner.run(sessions.per_loop.aclose())
    assert sessions.closed == [mine]


@pytest.mark.anyio
async def test_one_that_is_dropped_in_a_cycle_is_closed_before_it_is_finalized() -> None:
    """Connections warn if they are finalized open; all finalizers of garbage run before anything else of it does."""
    order: list[str] = []
    finalized = asyncio.Event()

    class Connection:
        def __del__(self) -> None:
            order.append("finalized")
            finalized.set()

    class Owner:
        def __init__(self) -> None:
            self.me = self  # a cycle, as clients have many
            self.per_loop = PerLoop(self.open, close)

        async def open(self) -> Connection:
            return Connection()

    async def close(_: Connection) -> None:
        order.append("closed")

    owner = Owner()
    await owner.per_loop.here()
    del owner
    gc.collect()
    await finalized.wait()
    assert order == ["closed", "finalized"]
