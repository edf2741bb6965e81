from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from typing import NoReturn

import anyio
import pytest

from bcp.runtime import bridge as _bridge
from bcp.runtime import event_loop as _loop
from bcp.runtime.threads import in_thread

Started = Callable[[], None]


class Held:
    """An operation that stays where it is until it is let on; says what became of it."""

    def __init__(self, result: object = "result", error: BaseException | None = None) -> None:
        self.result = result
        self.error = error
        self.inside = threading.Event()
        self.cleaned = threading.Event()
        self._let = threading.Event()

    async def __call__(self, started: Started) -> object:
        self._loop = asyncio.get_running_loop()
        self._go = asyncio.Event()
        self.inside.set()
        try:
            await self._go.wait()
            started()
            started()  # saying it twice does no harm
            await in_thread(self._let.wait, 10)
            if self.error is not None:
                raise self.error
        finally:
            with anyio.CancelScope(shield=True):
                await in_thread(self.cleaned.set)
        return self.result

    def go(self) -> None:
        assert self.inside.wait(60)
        self._loop.call_soon_threadsafe(self._go.set)

    def let(self) -> None:
        self._let.set()


# -- run -------------------------------------------------------------------------------------------


async def twice(number: int) -> int:
    return 2 * await in_thread(int, number)


def test_from_a_plain_thread_on_bcps_own() -> None:
    async def where() -> threading.Thread:
        return threading.current_thread()

    assert _bridge.run(lambda: twice(21)) == 42
    thread = _bridge.run(where)
    assert thread.name == "bcp-loop"
    assert _bridge.run(where) is thread


def test_inside_a_running_loop() -> None:
    async def cell() -> int:
        return _bridge.run(lambda: twice(4))

    assert asyncio.run(cell()) == 8
    assert asyncio.run(cell()) == 8  # in another loop


def test_from_several_threads_at_once() -> None:
    barrier = threading.Barrier(6)

    async def meet() -> int:
        return await in_thread(barrier.wait, 10)  # all six are on the loop at once

    with ThreadPoolExecutor(6) as pool:
        places = list(pool.map(lambda _: _bridge.run(meet), range(6)))
    assert sorted(places) == list(range(6))


def test_a_signal_handler_may_interrupt_one_who_holds_the_lock() -> None:
    with _loop.lock:
        assert _bridge.run(lambda: twice(1)) == 2


def test_an_interrupt_just_before_the_waiting_falls_asleep_comes_out_as_itself() -> None:
    """``Condition.wait`` releases its lock outside of its ``try``; then the ``with`` around the call fails as well."""
    held = Held()
    background = _bridge.start(held, name="save")
    condition = background._finished._condition
    release = condition._release_save

    def release_and_interrupt() -> NoReturn:
        condition._release_save = release
        release()
        raise KeyboardInterrupt

    condition._release_save = release_and_interrupt
    with pytest.raises(KeyboardInterrupt):
        background.wait()
    held.go()
    held.let()
    assert background.wait() == "result"


def test_the_callers_context_is_seen_and_not_changed() -> None:
    where = contextvars.ContextVar[str]("where")
    where.set("outside")

    async def look() -> tuple[str, str]:
        seen = where.get()
        where.set("inside")
        return seen, await in_thread(where.get)

    assert _bridge.run(look) == ("outside", "inside")
    assert where.get() == "outside"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_comes_out_as_itself_with_its_traceback(kind: type[BaseException]) -> None:
    error = kind("no")

    async def fail() -> NoReturn:
        raise error

    with pytest.raises(kind) as caught:
        _bridge.run(fail)
    assert caught.value is error
    assert "fail" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert _bridge.run(lambda: twice(1)) == 2  # the loop survives an interrupt


def test_an_error_is_in_no_cycle_that_keeps_memory() -> None:
    class Tensor:
        pass

    def attempt(tensor: Tensor) -> None:
        async def fail() -> NoReturn:
            raise ValueError(tensor)

        with suppress(ValueError):
            _bridge.run(fail)

    gc.collect()
    gc.disable()
    try:
        tensor = Tensor()
        alive = weakref.ref(tensor)
        attempt(tensor)
        del tensor
        _bridge.run(lambda: twice(1))  # the loop's thread forgets the one before at the latest
        assert alive() is None
    finally:
        gc.enable()


def test_waiting_on_its_own_loop_is_refused() -> None:
    other = Held()
    background = _bridge.start(other, name="save to /ckpt")

    async def nested() -> None:
        with pytest.raises(RuntimeError, match="cannot wait for a synchronous call on bcp's own event loop"):
            _bridge.run(lambda: twice(1))
        with pytest.raises(RuntimeError, match="cannot wait for save to /ckpt on bcp's own"):
            background.wait()
        with pytest.raises(RuntimeError, match="cannot wait for save to /ckpt on bcp's own"):
            background.wait_started()
        other._go.set()
        other.let()
        assert await background == "result"  # awaiting is fine

    _bridge.run(nested)


# -- start -----------------------------------------------------------------------------------------


def test_started_then_done() -> None:
    held = Held()
    background = _bridge.start(held, name="save to /ckpt")
    held.go()
    background.wait_started()
    assert not background.done()
    assert not background.failed()
    assert background.exception() is None
    assert repr(background) == "<Background save to /ckpt: running>"
    with pytest.raises(TimeoutError, match=r"save to /ckpt is not done after 0\.01 s; it goes on"):
        background.wait(0.01)
    held.let()
    assert background.wait(60) == "result"
    assert background.wait() == "result"
    background.wait_started()
    background.cancel()  # too late, and harmless
    assert background.done()
    assert not background.failed()
    assert repr(background) == "<Background save to /ckpt: done>"


def test_an_operation_that_ends_without_saying_started() -> None:
    background = _bridge.start(lambda _: twice(1), name="short")
    background.wait_started()
    assert background.wait() == 2


def test_a_failure_before_started_is_raised_by_wait_started() -> None:
    async def fail(_: Started) -> NoReturn:
        raise ValueError("early")

    background = _bridge.start(fail, name="save")
    for _ in range(2):
        with pytest.raises(ValueError, match="early"):
            background.wait_started()
    with pytest.raises(ValueError, match="early"):
        asyncio.run(background.astarted())


def test_a_failure_after_started_is_raised_by_wait_only() -> None:
    error = OSError("late")
    held = Held(error=error)
    background = _bridge.start(held, name="save")
    held.go()
    background.wait_started()
    held.let()
    for _ in range(2):
        with pytest.raises(OSError, match="late"):
            background.wait()
    with pytest.raises(OSError, match="late"):
        asyncio.run(background.result())
    background.wait_started()
    assert background.failed()
    assert background.exception() is error
    assert repr(background) == "<Background save: OSError('late')>"


def test_cancel_cleans_up_and_is_told_as_an_error_that_cancels_no_waiter() -> None:
    held = Held()
    background = _bridge.start(held, name="save")
    assert held.inside.wait(60)
    background.cancel()
    with pytest.raises(CancelledError, match="save was cancelled"):
        background.wait()
    assert held.cleaned.is_set()
    assert isinstance(background.exception(), CancelledError)

    async def outside() -> str:
        with pytest.raises(CancelledError):  # not asyncio's, which would end this task
            await background
        return "goes on"

    assert asyncio.run(outside()) == "goes on"


def test_cancel_at_once_is_not_lost() -> None:
    for _ in range(50):
        background = _bridge.start(Held(), name="save")
        background.cancel()
        with pytest.raises(CancelledError):
            background.wait(60)


def test_from_any_loop_without_blocking_it() -> None:
    held = Held()

    async def main() -> object:
        background = _bridge.start(held, name="save")
        async with anyio.create_task_group() as group:
            group.start_soon(background.astarted)
            await anyio.wait_all_tasks_blocked()
            held.go()
        assert not background.done()
        held.let()
        return await background

    assert asyncio.run(main()) == "result"


def test_cancelling_astarted_cancels_the_operation_and_waits_for_its_clean_up() -> None:
    held = Held()

    async def main() -> None:
        background = _bridge.start(held, name="save")
        task = asyncio.create_task(background.astarted())
        await in_thread(held.inside.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert background.done()
        assert held.cleaned.is_set()

    asyncio.run(main())


def test_cancelling_who_awaits_the_result_leaves_it_running() -> None:
    held = Held()
    background = _bridge.start(held, name="save")
    held.go()
    background.wait_started()

    async def give_up() -> None:
        with anyio.move_on_after(0) as scope:
            await background
        assert scope.cancelled_caught

    asyncio.run(give_up())
    assert not background.done()
    held.let()
    assert background.wait(60) == "result"


# -- errors that nobody looks at -------------------------------------------------------------------


def forget(
    function: Callable[[Started], Awaitable[object]], look: Callable[[_bridge.Background[object]], object]
) -> None:
    """Start an operation, wait for its end, look, and forget it."""
    background = _bridge.start(function, name="save to /ckpt/7")
    background._finished.result(10)
    look(background)
    del background
    _bridge.run(lambda: twice(1))  # the loop's thread forgets it too
    gc.collect()


async def fail(_: Started) -> NoReturn:
    raise OSError("disk full")


def test_an_error_that_nobody_looked_at_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    forget(fail, lambda _: None)
    [record] = caplog.records
    assert (record.name, record.levelno) == ("bcp", logging.ERROR)
    assert record.getMessage() == "save to /ckpt/7 failed, and nobody waited for it"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "disk full"


def test_an_error_is_logged_at_once_without_the_garbage_collector(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    gc.disable()
    try:
        _bridge.start(fail, name="save")
        _bridge.run(lambda: twice(1))
        _bridge.run(lambda: twice(1))
        assert [record.getMessage() for record in caplog.records] == ["save failed, and nobody waited for it"]
    finally:
        gc.enable()


def waited(background: _bridge.Background[object]) -> None:
    with pytest.raises(OSError, match="disk full"):
        background.wait()


@pytest.mark.parametrize("look", [waited, _bridge.Background.exception])
def test_an_error_that_was_looked_at_is_not_logged(
    look: Callable[[_bridge.Background[object]], object], caplog: pytest.LogCaptureFixture
) -> None:
    forget(fail, look)
    assert caplog.records == []


def test_a_cancellation_that_was_asked_for_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    background = _bridge.start(Held(), name="save")
    background.cancel()
    background._finished.result(10)
    del background
    _bridge.run(lambda: twice(1))
    gc.collect()
    assert caplog.records == []
