from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from goods import Crate, crates, nothing_left

from bcp.errors import StageError, StorageError
from bcp.events import Event, StageEvent
from bcp.pipeline import Budget, Pipeline, Stage, tee
from bcp.runtime.threads import in_thread

pytestmark = pytest.mark.anyio

WHERE = ["first", "middle", "ordered", "last"]


class Odd(BaseException):
    """Stands for KeyboardInterrupt, which would end the event loop of the test as well."""


async def same(item: Any) -> Any:
    await checkpoint()
    return item


async def forever(_: Any) -> Any:
    await anyio.sleep_forever()


def pipeline_with(where: str, stage: Stage[Any, Any]) -> Pipeline[Crate, Any]:
    """Four stages of every kind, with one of them replaced."""
    pipeline = Pipeline[Crate, Any]()
    for name in WHERE:
        pipeline = pipeline.then(Stage(name, same, workers=1 if name == "ordered" else 3, ordered=name == "ordered"))
    return pipeline.replacing(where, stage)


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ordered", [False, True])
async def test_a_failure_at_each_stage_leaves_nothing(where: str, ordered: bool) -> None:  # noqa: FBT001 -- parameter
    cause = OSError(28, "No space left on device")
    events = list[Event]()

    async def fail(item: Crate) -> Crate:
        if item.name == "w3":
            raise cause
        return item

    budget = Budget(20)
    pipeline = pipeline_with(where, Stage(where, fail, workers=1 if ordered else 2, ordered=ordered))
    with nothing_left(budget), pytest.raises(StageError) as caught:
        await pipeline.run(crates(*[5] * 12), budget=budget, observe=events.append)

    assert (caught.value.stage, caught.value.item) == (where, "w3")
    assert caught.value.__cause__ is cause
    assert str(caught.value) == f"stage {where!r} failed on w3: OSError: [Errno 28] No space left on device"
    assert any(entry.name == "fail" for entry in pytest.ExceptionInfo.from_exception(cause).traceback)
    ends = {(event.stage, event.item): event.error for event in events if isinstance(event, StageEvent)}
    assert ends.pop((where, "w3")) == "OSError: [Errno 28] No space left on device"
    assert set(ends.values()) <= {""}


@pytest.mark.parametrize("where", WHERE)
async def test_a_failure_in_thread_code_waits_for_the_other_threads(where: str) -> None:
    budget, let = Budget(100), threading.Event()
    loop = asyncio.get_running_loop()

    with nothing_left(budget) as gauge:

        def slow(item: Crate) -> Crate:
            with gauge.busy():
                if item.name == "w0":
                    assert let.wait(60)  # until w1 has failed
                    return item
                loop.call_soon_threadsafe(loop.call_soon, let.set)
                raise StorageError("put of w1 failed")

        async def put(item: Crate) -> Crate:
            return await in_thread(slow, item)

        with pytest.raises(StageError, match="failed on w1: StorageError: put of w1 failed") as caught:
            await pipeline_with(where, Stage(where, put, workers=2)).run(crates(1, 1), budget=budget)
        assert isinstance(caught.value.__cause__, StorageError)


async def test_failures_of_siblings_become_notes() -> None:
    started = list[str]()

    async def fail(item: Crate) -> Crate:
        started.append(item.name)
        if item.name == "w0":
            while len(started) < 3:
                await checkpoint()
            raise OSError("first")
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError(f"clean-up of {item.name}")

    budget = Budget(10)
    with nothing_left(budget), pytest.raises(StageError, match="failed on w0: OSError: first") as caught:
        await Pipeline[Crate, Any]((Stage("put", fail, workers=3),)).run(crates(1, 1, 1), budget=budget)
    assert sorted(caught.value.__notes__) == [
        "after that, stage 'put' failed on w1: ValueError: clean-up of w1",
        "after that, stage 'put' failed on w2: ValueError: clean-up of w2",
    ]


async def test_an_interrupt_comes_out_as_itself_also_after_a_failure() -> None:
    async def interrupt(item: Crate) -> Crate:
        if item.name == "w1":
            raise OSError("disk")
        try:
            await anyio.sleep_forever()
        finally:
            raise Odd

    budget = Budget(10)
    with nothing_left(budget), pytest.raises(Odd) as caught:
        await Pipeline[Crate, Any]((Stage("put", interrupt, workers=2),)).run(crates(1, 1), budget=budget)
    assert caught.value.__notes__ == ["before that, stage 'put' failed on w1: OSError: disk"]


def test_keyboard_interrupt_comes_out_as_itself() -> None:
    async def interrupt(_: Crate) -> Crate:
        raise KeyboardInterrupt

    async def main() -> None:
        budget = Budget(10)
        with nothing_left(budget), pytest.raises(KeyboardInterrupt):
            await pipeline_with("middle", Stage("middle", interrupt)).run(crates(1, 1), budget=budget)

    asyncio.run(main())


async def test_a_task_group_inside_a_stage_hides_nothing() -> None:
    async def fail() -> None:
        raise OSError("inner")

    async def grouped(item: Crate) -> Crate:
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
        return item

    with pytest.raises(StageError, match="failed on w0: OSError: inner"):
        await Pipeline[Crate, Any]((Stage("put", grouped),)).run(crates(1), budget=Budget(1))


async def test_a_cancelled_error_that_nobody_asked_for_is_a_failure() -> None:
    async def stray(item: Crate) -> Crate:
        future = asyncio.get_running_loop().create_future()
        future.cancel()  # as a gRPC call does that the server ended
        await future
        return item

    budget = Budget(5)
    for stage in (Stage("rpc", stray), tee(Stage("rpc", stray))):
        with nothing_left(budget), pytest.raises(StageError, match="'rpc' failed on w0: CancelledError"):
            await Pipeline[Crate, Any]((stage,)).run(crates(1, 1), budget=budget)


async def test_a_generator_exit_of_a_stage_is_a_failure() -> None:
    async def closed(_: Crate) -> Crate:
        raise GeneratorExit("a generator inside was closed")

    budget = Budget(5)
    for stage in (Stage("read", closed), tee(Stage("read", closed))):
        with nothing_left(budget), pytest.raises(StageError, match="'read' failed on w0: GeneratorExit"):
            await Pipeline[Crate, Any]((stage,)).run(crates(1, 1), budget=budget)


async def test_a_failing_observer_is_no_exception_group() -> None:
    def observe(_: Event) -> None:
        raise RuntimeError("meter")

    with pytest.raises(StageError, match="RuntimeError: meter"):
        await Pipeline[Crate, Any]((Stage("put", same),)).run(crates(1), budget=Budget(1), observe=observe)


async def test_a_kept_error_keeps_no_buffers_but_its_own() -> None:
    class Buffer:
        pass

    alive = weakref.WeakSet[Buffer]()

    async def fill(_: Crate) -> Buffer:
        buffer = Buffer()
        alive.add(buffer)
        return buffer

    async def fail(_: Buffer) -> None:
        while len(alive) < 8:
            await checkpoint()
        raise OSError("disk")

    pipeline = Pipeline[Crate, Any]((Stage("fill", fill), Stage("put", fail)))
    gc.collect()
    gc.disable()
    kept: BaseException | None = None
    try:
        try:
            await pipeline.run(crates(*[1] * 8), budget=Budget(8))
        except StageError as error:
            kept = error
        assert kept is not None
        assert len(alive) == 1  # the one it failed on
        kept = None
        assert len(alive) == 0
    finally:
        gc.enable()


# -- cancellation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [*WHERE, "thread", "entrance"])
@pytest.mark.parametrize("native", [False, True])
async def test_a_cancellation_at_each_stage_leaves_nothing(where: str, native: bool) -> None:  # noqa: FBT001 -- parameter
    budget, reached, let = Budget(9), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    cleaned = list[str]()

    with nothing_left(budget) as gauge:

        def block() -> None:
            with gauge.busy():
                loop.call_soon_threadsafe(reached.set)
                assert let.wait(60)

        async def stay(item: Crate) -> Crate:
            try:
                if where == "thread":
                    await in_thread(block)
                elif where == "entrance" and item.name == "w0":
                    await anyio.wait_all_tasks_blocked()  # by now w1 waits for bytes
                reached.set()
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await checkpoint()
                cleaned.append(item.name)
            return item

        name = where if where in WHERE else "middle"
        pipeline = pipeline_with(name, Stage(name, stay))
        scope = anyio.CancelScope()

        async def main() -> list[Any]:
            with scope:
                return await pipeline.run(crates(9, 9), budget=budget)
            return ["cancelled by the scope"]

        task = asyncio.create_task(main())
        await reached.wait()
        if native:
            task.cancel()
        else:
            scope.cancel()
        if where == "thread":
            for _ in range(5):
                await asyncio.wait([task], timeout=0)
            assert not task.done()
        let.set()
        if native:
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert await task == ["cancelled by the scope"]
    assert cleaned == ["w0"]
    assert "0 waiting" in repr(budget)


async def test_cancelled_before_it_begins() -> None:
    budget = Budget(1)
    with nothing_left(budget), anyio.CancelScope() as scope:
        scope.cancel()
        await Pipeline[Crate, Any]((Stage("put", forever),)).run(crates(1, 1), budget=budget)
    assert scope.cancelled_caught


async def test_cancellation_wins_over_failures_in_clean_up() -> None:
    budget, reached = Budget(5), asyncio.Event()

    async def untidy(_: Crate) -> None:
        try:
            reached.set()
            await anyio.sleep_forever()
        finally:
            raise OSError("clean-up")

    with nothing_left(budget):
        task = asyncio.create_task(Pipeline[Crate, Any]((Stage("put", untidy),)).run(crates(1), budget=budget))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_worker_cancelled_behind_the_pipelines_back_gives_no_half_result() -> None:
    budget, reached = Budget(5), asyncio.Event()

    async def stay(item: Crate) -> Crate:
        if item.name == "w0":
            return item
        reached.set()
        await anyio.sleep_forever()
        return item

    with nothing_left(budget):
        pipeline = Pipeline[Crate, Any]((Stage("put", stay), Stage("idle", same)))
        task = asyncio.create_task(pipeline.run(crates(1, 1), budget=budget))
        await reached.wait()
        for other in asyncio.all_tasks():
            if other.get_name() == "bcp stage idle":
                other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# -- branches --------------------------------------------------------------------------------------


async def test_every_stage_of_a_tee_sees_the_item_and_it_goes_on_unchanged() -> None:
    seen = list[tuple[str, Crate]]()
    both = anyio.Event()

    async def left(item: Crate) -> str:
        seen.append(("left", item))
        await both.wait()  # only the other one can end this: they run at once
        return "ignored"

    async def right(item: Crate) -> None:
        seen.append(("right", item))
        both.set()

    items = crates(1, 2)
    branch = tee(Stage("left", left, workers=3), Stage("right", right, workers=2))
    assert (branch.name, branch.workers, branch.ordered) == ("tee(left, right)", 2, False)
    assert await Pipeline[Crate, Crate]().then(branch).run(items, budget=Budget(9)) == items
    assert sorted(seen, key=str) == sorted([(name, item) for item in items for name in ("left", "right")], key=str)


async def test_a_tee_is_ordered_if_one_of_its_stages_is() -> None:
    branch = tee(Stage("a", same, workers=4), Stage("b", same, ordered=True))
    assert (branch.workers, branch.ordered) == (1, True)


def test_a_tee_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        tee()


@pytest.mark.parametrize("nested", [False, True])
async def test_a_failure_inside_a_tee_names_the_inner_stage_and_cancels_the_others(nested: bool) -> None:  # noqa: FBT001 -- parameter
    ended = list[str]()

    async def fail(_: int) -> None:
        raise OSError("disk")

    async def stay(_: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("stay")
            raise ValueError("untidy")

    async def count(_: Crate) -> int:
        return 1

    branch: Stage[int, int] = tee(Stage("stay", stay), Stage("fail", fail))
    if nested:
        branch = tee(Stage("ok", same), branch)
    budget = Budget(5)
    with nothing_left(budget), pytest.raises(StageError) as caught:
        await Pipeline[Crate, Any]((Stage("count", count), branch)).run(crates(1), budget=budget)
    assert type(caught.value) is StageError
    assert (caught.value.stage, caught.value.item) == ("fail", "w0")
    assert isinstance(caught.value.__cause__, OSError)
    assert ended == ["stay"]
    assert caught.value.__notes__ == ["after that, stage 'stay' failed on int: ValueError: untidy"]


async def test_an_interrupt_inside_a_tee_comes_out_as_itself() -> None:
    async def interrupt(_: Crate) -> None:
        raise Odd

    budget = Budget(5)
    with nothing_left(budget), pytest.raises(Odd):
        await Pipeline[Crate, Any]((tee(Stage("a", forever), Stage("b", interrupt)),)).run(crates(1), budget=budget)


async def test_a_cancelled_tee_passes_the_cancellation_on() -> None:
    budget = Budget(5)
    with nothing_left(budget), anyio.CancelScope() as scope:

        async def end(_: Crate) -> None:
            scope.cancel()
            with suppress(OSError):
                await anyio.sleep_forever()

        await Pipeline[Crate, Any]((tee(Stage("a", forever), Stage("b", end)),)).run(crates(1), budget=budget)
    assert scope.cancelled_caught
