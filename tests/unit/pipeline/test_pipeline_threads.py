from __future__ import annotations

import asyncio
import contextvars
import ctypes
import gc
import os
import platform
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import anyio
import pytest

from bcp.runtime import threads
from bcp.runtime.threads import (
    MAX_THREADS,
    in_thread,
    in_thread_even_if_cancelled,
    low_priority_threads,
    thread_count,
    with_thread_setup,
)

pytestmark = pytest.mark.anyio


async def test_runs_elsewhere_and_returns() -> None:
    assert await in_thread(divmod, 7, 3) == (2, 1)
    assert await in_thread(threading.get_ident) != threading.get_ident()


async def test_sees_the_callers_context() -> None:
    where = contextvars.ContextVar[str]("where")
    where.set("here")
    assert await in_thread(where.get) == "here"


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_threads_give_way_inside_of_the_block_and_only_there() -> None:
    own = niceness()
    with low_priority_threads(nice=3):
        assert await in_thread(niceness) == min(own + 3, 19)
        with low_priority_threads(nice=5):
            assert await in_thread(niceness) == min(own + 5, 19)
        assert await in_thread(niceness) == min(own + 3, 19)
    assert await in_thread(niceness) == own == niceness()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of ioprio_get differs elsewhere")
async def test_threads_give_way_to_other_reads_and_writes() -> None:
    def priority() -> int:
        return int(ctypes.CDLL(None).syscall(252, 1, 0)) >> 13

    with low_priority_threads(io="best-effort"):
        assert await in_thread(priority) == 2
    with low_priority_threads(io="idle"):
        assert await in_thread(priority) == 3
    assert await in_thread(priority) == 0


async def test_calls_begin_with_what_the_block_says() -> None:
    mine = threading.local()

    def seen() -> str:
        return getattr(mine, "word", "")

    def say(word: str) -> None:
        mine.word = word

    with with_thread_setup(lambda: say("one")):
        assert await in_thread(seen) == "one"
        with with_thread_setup(lambda: say("two")):
            assert await in_thread(seen) == "two"
        assert await in_thread(seen) == "one"
    assert seen() == ""


async def test_a_beginning_that_fails_fails_the_call() -> None:
    calls: list[int] = []

    def fail() -> None:
        raise RuntimeError("device lost")

    with with_thread_setup(fail), pytest.raises(RuntimeError, match="device lost"):
        await in_thread(calls.append, 1)
    assert calls == []


async def test_what_is_done_at_last_is_done_when_cancelled() -> None:
    done: list[str] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await in_thread_even_if_cancelled(done.append, "by a scope")
    task = asyncio.ensure_future(in_thread_even_if_cancelled(done.append, "by asyncio"))
    await asyncio.sleep(0)
    task.cancel()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert done == ["by a scope", "by asyncio"]


async def test_what_is_done_at_last_is_done_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refused)
    await in_thread_even_if_cancelled(done.append, "here")
    assert done == ["here"]


async def test_an_error_of_what_is_done_at_last_comes_out_once() -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        await in_thread_even_if_cancelled(fail)
    assert calls == [1]


async def test_threads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = await in_thread(threading.current_thread)
    others = [threading.Thread(name=name) for name in ("bcp-store", "user", "MainThread")]
    monkeypatch.setattr(threading, "enumerate", lambda: [mine, *others])
    assert thread_count() == 2


class Odd(BaseException):
    pass


@pytest.mark.parametrize("error", [OSError("disk"), KeyError("k"), Odd("odd"), asyncio.CancelledError("stray")])
async def test_an_error_comes_out_as_itself(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await in_thread(fail)
    assert caught.value is error
    assert any(entry.name == "fail" for entry in caught.traceback)


async def test_stop_iteration_does_not_hang() -> None:
    with anyio.fail_after(60), pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(next, iter(()))


class Buffer:
    """Stands for 32 MiB of staging memory."""


def fail(_: Buffer) -> None:
    raise OSError("disk")


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_arguments_and_results_are_in_no_cycle_that_keeps_memory() -> None:
    with without_collector():
        buffer = Buffer()
        alive = weakref.ref(buffer)
        with suppress(OSError):
            await in_thread(fail, buffer)
        result = await in_thread(Buffer)
        result_alive = weakref.ref(result)
        del buffer, result
        await in_thread(int)  # a worker forgets its call with its next one at the latest
        assert alive() is None
        assert result_alive() is None


class Gate:
    """A call that says when it has begun, and ends when it is let."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.begun = asyncio.Event()
        self.let = threading.Event()
        self.ended = False

    def __call__(self) -> None:
        self.loop.call_soon_threadsafe(self.begun.set)
        assert self.let.wait(60)
        self.ended = True


async def still_waits(task: asyncio.Task[None]) -> bool:
    for _ in range(5):
        await asyncio.wait([task], timeout=0)
    return not task.done()


async def test_cancelled_by_a_scope_it_waits_for_the_thread() -> None:
    gate, scope = Gate(), anyio.CancelScope()

    async def call() -> None:
        with scope:
            await in_thread(gate)

    task = asyncio.create_task(call())
    await gate.begun.wait()
    scope.cancel()
    assert await still_waits(task)
    gate.let.set()
    await task
    assert gate.ended
    assert scope.cancelled_caught


async def test_cancelled_by_asyncio_even_twice_it_waits_for_the_thread() -> None:
    gate = Gate()
    task = asyncio.create_task(in_thread(gate))
    await gate.begun.wait()
    for _ in range(3):
        task.cancel()
        assert await still_waits(task)
    gate.let.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.ended


async def test_a_call_that_no_thread_has_begun_is_not_begun_any_more() -> None:
    gates = [Gate() for _ in range(MAX_THREADS)]
    calls = list[str]()
    async with anyio.create_task_group() as group:
        for gate in gates:
            group.start_soon(in_thread, gate)
        for gate in gates:
            await gate.begun.wait()
        waiting = asyncio.create_task(in_thread(calls.append, "begun"))
        await asyncio.wait([waiting], timeout=0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for gate in gates:
            gate.let.set()
    assert calls == []


async def test_a_call_that_cannot_have_a_thread_is_not_made_later_either() -> None:
    class Exhausted(ThreadPoolExecutor):
        """Has one thread and gets no second, as where the number of processes is limited."""

        def _adjust_thread_count(self) -> None:
            if self._threads:
                raise RuntimeError("can't start new thread")
            super()._adjust_thread_count()

    gate, calls = Gate(), list[str]()
    with Exhausted() as pool:
        token = threads._pools.set({(threads._AS_THE_PROCESS, threads.MAX_THREADS): pool})
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(in_thread, gate)
                await gate.begun.wait()
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    await in_thread(calls.append, "late")
                gate.let.set()
        finally:
            threads._pools.reset(token)
    assert calls == []


async def test_calls_that_share_few_threads_wait_for_each_other() -> None:
    gates, seen = [Gate() for _ in range(4)], set[int]()

    def call(gate: Gate) -> None:
        seen.add(threading.get_ident())
        gate()

    async with anyio.create_task_group() as group:
        for gate in gates:
            group.start_soon(threads.in_thread_of_few, 2, call, gate)
        await gates[0].begun.wait()
        await gates[1].begun.wait()
        assert not gates[2].begun.is_set()
        assert await in_thread(threading.get_ident) not in seen  # other calls have threads of their own
        for gate in gates:
            gate.let.set()
    assert len(seen) == 2


def test_more_threads_than_anyio_gives_and_none_left_when_the_loop_is_gone() -> None:
    async def main() -> None:
        gates = [Gate() for _ in range(60)]
        async with anyio.create_task_group() as group:
            for gate in gates:
                group.start_soon(in_thread, gate)
            for gate in gates:
                await gate.begun.wait()  # all sixty at once: none can end before
            for gate in gates:
                gate.let.set()

    before = set(threading.enumerate())
    asyncio.run(main())
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before
