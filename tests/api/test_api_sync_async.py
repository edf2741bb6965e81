"""The same save from coroutines, from ordinary code, and from both at once; waiting for it, and stopping it."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from checkpoints import MIB, SECONDS, Gate, entries, equal, loads, model, runners, tensors, training

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import FaultyBackend

# -- every way to call -------------------------------------------------------------------------------


@runners
def test_from_a_coroutine(tmp_path: Path, run: Callable[..., Any]) -> None:
    states, target = training(), training(seed=1)

    async def work() -> tuple[bcp.SaveResult, bcp.LoadResult]:
        return await bcp.asave(tmp_path, states), await bcp.aload(tmp_path, target)

    saved, loaded = run(work())
    assert equal(tensors(target), tensors(states))
    assert saved.operation == loaded.operation


@runners
def test_in_the_background_from_a_coroutine(tmp_path: Path, run: Callable[..., Any]) -> None:
    gate = Gate()

    async def work() -> bcp.SaveResult:
        states = model(1)
        pending = await bcp.asave(tmp_path, states, async_checkpoint=True, options=gate.options)
        states["model"]["w"].zero_()
        assert not pending.done()
        gate.opened.set()
        return await pending

    report = run(work())
    assert isinstance(report, bcp.SaveResult)
    assert loads(tmp_path, 1)


@runners
def test_a_background_save_outlives_the_loop_that_started_it(tmp_path: Path, run: Callable[..., Any]) -> None:
    gate = Gate()
    pending = run(bcp.asave(tmp_path, model(1), async_checkpoint=True, options=gate.options))
    assert not pending.done()
    gate.opened.set()
    pending.wait(SECONDS)
    assert loads(tmp_path, 1)


def test_in_the_background_from_ordinary_code(tmp_path: Path) -> None:
    gate = Gate()
    states = model(1)
    pending = bcp.save_async(tmp_path, states, options=gate.options)
    states["model"]["w"].zero_()
    assert not pending.done()
    gate.opened.set()
    report = pending.wait(SECONDS)
    assert report.blocking_seconds <= report.seconds
    assert loads(tmp_path, 1)


def test_a_background_save_takes_the_keywords_of_a_save(tmp_path: Path) -> None:
    keywords = dict(inspect.signature(bcp.save).parameters)
    del keywords["async_checkpoint"]
    assert dict(inspect.signature(bcp.save_async).parameters) == keywords
    bcp.save_async(tmp_path, model(1), role="actor", framework="plain", progress=False, snapshot="eager").wait(SECONDS)
    with pytest.raises(bcp.ExistsError):
        bcp.save_async(tmp_path, model(2), role="actor")
    bcp.save_async(tmp_path, model(2), role="actor", overwrite=True).wait(SECONDS)
    assert loads(tmp_path / "actor", 2)


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
    with pytest.raises(bcp.InputError, match=r"a save to .* is still running on rank 0; pending"):
        bcp.save(tmp_path, model(2), overwrite=True)
    gate.opened.set()
    pending.wait(SECONDS)
    bcp.save(tmp_path, model(2), overwrite=True)
    assert loads(tmp_path, 2)


def test_two_backends_of_one_type_are_two_places(tmp_path: Path) -> None:
    gate = Gate()
    pending = bcp.save(LocalBackend(tmp_path / "a"), model(1), async_checkpoint=True, options=gate.options)
    bcp.save(LocalBackend(tmp_path / "b"), model(2))
    gate.opened.set()
    pending.wait(SECONDS)
    assert loads(tmp_path / "a", 1)
    assert loads(tmp_path / "b", 2)


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

    async def work() -> list[bcp.SaveResult]:
        async def wait() -> bcp.SaveResult:
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


# -- the caller's loop -------------------------------------------------------------------------------


FILE_CALLS = (
    "open",
    "pread",
    "preadv",
    "pwrite",
    "pwritev",
    "fsync",
    "rename",
    "unlink",
    "mkdir",
    "listdir",
    "scandir",
)
"""Calls of :mod:`os` that wait for a disk."""


def test_the_callers_loop_waits_for_no_disk_and_copies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, target = (
        {"model": {f"w{n}": torch.full((8 * MIB,), float(n * factor)) for n in range(8)}} for factor in (1, 0)
    )
    calls: list[tuple[str, int]] = []

    def told(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def tell(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, threading.get_ident()))
            return call(*args, **kwargs)

        return tell

    for name in FILE_CALLS:
        monkeypatch.setattr(os, name, told(name))

    async def work() -> float:
        """Return the seconds of CPU that the loop itself takes."""
        began = time.thread_time()
        await bcp.asave(tmp_path, states, overwrite=True)
        await bcp.aload(tmp_path, target)
        return time.thread_time() - began

    own = threading.get_ident()
    began = time.thread_time()
    copies = [tensor.clone() for tensor in (*states["model"].values(), *target["model"].values())]
    copying = time.thread_time() - began
    del copies
    looping = min(asyncio.run(work()) for _ in range(3))
    assert {name for name, _ in calls} >= {"open", "fsync", "rename"}
    assert [name for name, thread in calls if thread == own] == []
    assert looping < copying
