"""The same save from coroutines, from ordinary code, and from both at once; waiting for it, and stopping it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from checkpoints import MIB, SECONDS, Gate, entries, equal, files, model, tensors, training

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import FaultyBackend

RUNNERS: list[Callable[[Coroutine[Any, Any, Any]], Any]] = [asyncio.run, lambda work: anyio.run(lambda: work)]
runners = pytest.mark.parametrize("run", RUNNERS, ids=["asyncio", "anyio"])


def loads(path: Path, value: float, count: int = 1000) -> bool:
    """Say whether the checkpoint is the model of that value."""
    target = model(-1, count)
    bcp.load(path, target)
    return bool(target["model"]["w"].eq(value).all())


# -- every way to call -------------------------------------------------------------------------------


@runners
def test_from_a_coroutine(tmp_path: Path, run: Callable[..., Any]) -> None:
    states, target = training(), training(seed=1)

    async def work() -> tuple[bcp.SaveReport, bcp.LoadReport]:
        return await bcp.asave(tmp_path, states), await bcp.aload(tmp_path, target)

    saved, loaded = run(work())
    assert equal(tensors(target), tensors(states))
    assert saved.operation == loaded.operation


@runners
def test_in_the_background_from_a_coroutine(tmp_path: Path, run: Callable[..., Any]) -> None:
    gate = Gate()

    async def work() -> bcp.SaveReport:
        states = model(1)
        pending = await bcp.asave(tmp_path, states, async_checkpoint=True, options=gate.options)
        states["model"]["w"].zero_()
        assert not pending.done()
        gate.opened.set()
        return await pending

    report = run(work())
    assert isinstance(report, bcp.SaveReport)
    assert loads(tmp_path, 1)


@runners
def test_a_background_save_outlives_the_loop_that_started_it(tmp_path: Path, run: Callable[..., Any]) -> None:
    gate = Gate()
    pending = run(bcp.asave(tmp_path, model(1), async_checkpoint=True, options=gate.options))
    assert not pending.done()
    gate.opened.set()
    pending.wait(SECONDS)
    assert loads(tmp_path, 1)


def test_ordinary_calls_inside_a_running_loop(tmp_path: Path) -> None:
    async def cell() -> bool:
        bcp.save(tmp_path / "a", model(1))
        with bcp.save(tmp_path / "b", model(2), async_checkpoint=True):
            pass
        return loads(tmp_path / "a", 1) and loads(tmp_path / "b", 2)

    assert asyncio.run(cell())


def test_from_several_threads_at_once(tmp_path: Path) -> None:
    threads = [threading.Thread(target=bcp.save, args=(tmp_path / str(n), model(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert all(loads(tmp_path / str(n), n) for n in range(4))


def test_two_at_once_in_one_loop(tmp_path: Path) -> None:
    async def work() -> None:
        async with anyio.create_task_group() as group:
            for n in range(2):
                group.start_soon(bcp.asave, tmp_path / str(n), model(n))

    asyncio.run(work())
    assert all(loads(tmp_path / str(n), n) for n in range(2))


@runners
def test_a_task_group_starts_it_and_goes_on_at_the_snapshot(tmp_path: Path, run: Callable[..., Any]) -> None:
    gate = Gate()

    async def work() -> None:
        states = model(1)
        async with anyio.create_task_group() as group:
            await group.start(partial(bcp.asave, tmp_path, states, options=gate.options))
            states["model"]["w"].zero_()
            assert not (tmp_path / "metadata.arrow").exists()
            gate.opened.set()

    run(work())
    assert loads(tmp_path, 1)


@runners
def test_what_fails_before_the_snapshot_fails_at_the_call(tmp_path: Path, run: Callable[..., Any]) -> None:
    broken = {"model": {"w": torch.empty(3, device="meta")}}
    with pytest.raises(bcp.StateError, match="meta device"):
        bcp.save(tmp_path, broken, async_checkpoint=True)
    with pytest.raises(bcp.StateError, match="meta device"):
        run(bcp.asave(tmp_path, broken, async_checkpoint=True))
    assert entries(tmp_path) == []


def test_a_second_save_to_a_path_that_is_busy_is_refused(tmp_path: Path) -> None:
    gate = Gate()
    pending = bcp.save(tmp_path, model(1), async_checkpoint=True, options=gate.options)
    with pytest.raises(bcp.InputError, match=r"a save to .* is still running \(rank 0\); wait for it"):
        bcp.save(tmp_path, model(2), overwrite=True)
    gate.opened.set()
    pending.wait(SECONDS)
    bcp.save(tmp_path, model(2), overwrite=True)
    assert loads(tmp_path, 2)


# -- Pending -----------------------------------------------------------------------------------------


def test_waiting_with_a_timeout_leaves_it_running(tmp_path: Path) -> None:
    gate = Gate()
    pending = bcp.save(tmp_path, model(), async_checkpoint=True, options=gate.options)
    assert repr(pending) == f"<Pending save to {tmp_path}: running>"
    for _ in range(2):
        with pytest.raises(TimeoutError):
            pending.wait(0.01)
    assert not pending.done()
    gate.opened.set()
    report = pending.wait(SECONDS)
    assert pending.done()
    assert pending.wait() is report
    assert repr(pending) == f"<Pending save to {tmp_path}: done>"


def test_awaiting_it_twice_and_in_two_tasks(tmp_path: Path) -> None:
    gate = Gate()
    pending = bcp.save(tmp_path, model(), async_checkpoint=True, options=gate.options)

    async def work() -> list[bcp.SaveReport]:
        async def wait() -> bcp.SaveReport:
            return await pending

        waiting = [asyncio.create_task(wait()) for _ in range(2)]
        await asyncio.sleep(0)
        gate.opened.set()
        return [*await asyncio.gather(*waiting), await pending]

    first, second, third = asyncio.run(work())
    assert first is second is third is pending.wait()


def test_cancelling_who_waits_leaves_it_running(tmp_path: Path) -> None:
    gate = Gate()
    pending = bcp.save(tmp_path, model(1), async_checkpoint=True, options=gate.options)

    async def give_up() -> None:
        with anyio.move_on_after(0.01):
            await pending

    asyncio.run(give_up())
    assert not pending.done()
    gate.opened.set()
    pending.wait(SECONDS)
    assert loads(tmp_path, 1)


def test_a_with_block_ends_when_the_checkpoint_is_there(tmp_path: Path) -> None:
    gate = Gate()
    with bcp.save(tmp_path, model(1), async_checkpoint=True, options=gate.options) as pending:
        assert not pending.done()
        gate.opened.set()
    assert pending.done()
    assert loads(tmp_path, 1)


def test_the_error_of_a_with_block_comes_first(tmp_path: Path) -> None:
    backend = FaultyBackend(LocalBackend(tmp_path), "commit", OSError("broken"))
    with pytest.raises(KeyError, match="of the block") as caught, bcp.save(backend, model(), async_checkpoint=True):
        raise KeyError("of the block")
    assert "broken" in caught.value.__notes__[0]


def test_a_with_block_raises_what_went_wrong(tmp_path: Path) -> None:
    backend = FaultyBackend(LocalBackend(tmp_path), "commit", OSError("broken"))
    with pytest.raises(OSError, match="broken"), bcp.save(backend, model(), async_checkpoint=True):
        pass


# -- stopping ----------------------------------------------------------------------------------------

POINTS = [("open_write", "model"), ("write_part", "model"), ("commit", "model"), ("put", "receipts")]


class Hanging(FaultyBackend):
    """A backend in which one operation never ends."""

    def __init__(self, path: Path, operation: str, key: str) -> None:
        super().__init__(LocalBackend(path), operation, self._hang, key=key)
        self.there = threading.Event()

    async def _hang(self, _: str) -> None:
        self.there.set()
        await anyio.sleep_forever()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("operation", "key"), POINTS[1:])  # files are opened before the snapshot: no Pending yet
def test_a_cancelled_save_leaves_nothing_behind(tmp_path: Path, operation: str, key: str) -> None:
    bcp.save(tmp_path, model(1))
    before = files(tmp_path)
    backend = Hanging(tmp_path, operation, key)
    pending = bcp.save(backend, model(0), overwrite=True, async_checkpoint=True)
    assert backend.there.wait(SECONDS)
    pending.cancel()
    with pytest.raises(CancelledError):
        pending.wait(SECONDS)
    assert files(tmp_path) == before
    assert loads(tmp_path, 1)


@pytest.mark.parametrize(("operation", "key"), POINTS)
@runners
def test_a_cancelled_coroutine_leaves_nothing_behind(
    tmp_path: Path, run: Callable[..., Any], operation: str, key: str
) -> None:
    backend = Hanging(tmp_path, operation, key)

    async def work() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(bcp.asave, backend, model(0))
            assert await anyio.to_thread.run_sync(backend.there.wait, SECONDS)
            group.cancel_scope.cancel()

    run(work())
    assert files(tmp_path) == {}
    bcp.save(tmp_path, model(2))
    assert loads(tmp_path, 2)


@pytest.mark.parametrize(("operation", "key", "value"), [("put", "metadata", 1), ("list", "", 2)])
def test_a_save_that_is_cancelled_in_its_commit_is_there_whole_or_not_at_all(
    tmp_path: Path, operation: str, key: str, value: float
) -> None:
    bcp.save(tmp_path, model(1))
    before = files(tmp_path)
    backend = Hanging(tmp_path, operation, key)
    pending = bcp.save(backend, model(2), overwrite=True, async_checkpoint=True)
    assert backend.there.wait(SECONDS)
    pending.cancel()
    with pytest.raises(CancelledError):
        pending.wait(SECONDS)
    assert {name for name in before if name != "metadata.arrow"} <= set(files(tmp_path))
    assert loads(tmp_path, value)
    bcp.save(tmp_path, model(3), overwrite=True)
    assert len(files(tmp_path)) == 3, "the next save sweeps what could not be taken away"
    assert loads(tmp_path, 3)


def test_a_save_that_is_cancelled_before_its_snapshot(tmp_path: Path) -> None:
    gate = Gate("d2h")

    async def work() -> None:
        async with anyio.create_task_group() as group:
            save = partial(bcp.asave, tmp_path, model(0), async_checkpoint=True, options=gate.options)
            group.start_soon(save)
            assert await anyio.to_thread.run_sync(gate.reached.wait, SECONDS)
            group.cancel_scope.cancel()

    asyncio.run(work())
    assert files(tmp_path) == {}


def test_a_cancelled_load_says_that_the_target_is_half_loaded(tmp_path: Path) -> None:
    names = [f"w{n}" for n in range(4)]
    bcp.save(tmp_path, {"model": {name: torch.ones(MIB) for name in names}})
    target = {name: torch.zeros(MIB) for name in names}
    reached = threading.Event()

    async def hang(loaded: Any) -> Any:
        reached.set()
        await anyio.sleep_forever()
        return loaded

    options = bcp.LoadOptions(edit=lambda graph: graph.after("h2d", bcp.Stage("hang", hang)), read_bytes=MIB)

    async def work() -> list[str]:
        task = asyncio.create_task(bcp.aload(tmp_path, {"model": target}, options=options))
        assert await anyio.to_thread.run_sync(reached.wait, SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        return list(getattr(caught.value, "__notes__", []))

    notes = asyncio.run(work())
    assert any("half loaded" in note for note in notes)


# -- the caller's loop -------------------------------------------------------------------------------


class Heart:
    """Beats on the running loop, every millisecond, and knows its longest pause in seconds."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0

    async def __call__(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(0.001)
            now = loop.time()
            self.longest_seconds = max(self.longest_seconds, now - last)
            last = now


async def longest_pause(work: Coroutine[Any, Any, Any]) -> float:
    """Do the work, and return the longest pause of a heart beside it."""
    heart = Heart()
    beating = asyncio.create_task(heart())
    await asyncio.sleep(0.01)
    await work
    beating.cancel()
    return heart.longest_seconds


@pytest.mark.slow
def test_the_callers_loop_stays_responsive_during_a_save_of_one_gibibyte(tmp_path: Path) -> None:
    states = {"model": {f"w{n}": torch.full((8 * MIB,), float(n)) for n in range(32)}}

    def copy_and_write() -> None:
        with (tmp_path / "control").open("wb", buffering=0) as file:
            for tensor in states["model"].values():
                file.write(tensor.clone().numpy())

    async def work() -> tuple[list[float], list[float]]:
        controls, saves = [], []
        for _ in range(3):
            controls.append(await longest_pause(asyncio.to_thread(copy_and_write)))
            saves.append(await longest_pause(bcp.asave(tmp_path / "checkpoint", states, overwrite=True)))
        return controls, saves

    controls, saves = asyncio.run(work())
    assert min(saves) <= max(0.050, *controls), f"pauses in seconds: {saves=} {controls=}"
