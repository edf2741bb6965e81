"""A save or load that is cancelled, wherever it is: nothing is left behind, and an older checkpoint is as it was."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from checkpoints import MIB, SECONDS, Gate, files, loads, model, runners

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import FaultyBackend

POINTS = [("open_write", "model"), ("write_part", "model"), ("commit", "model"), ("put", "receipts")]


class Hanging(FaultyBackend):
    """A backend in which one operation never ends."""

    def __init__(self, path: Path, operation: str, key: str) -> None:
        super().__init__(LocalBackend(path), operation, self._hang, key=key)
        self.there = threading.Event()

    async def _hang(self, _: str) -> None:
        self.there.set()
        await anyio.sleep_forever()


@pytest.mark.timeout(240)
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


@pytest.mark.parametrize(("operation", "key", "value"), [("put_if", "metadata", 1), ("delete", "", 2)])
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

    options = bcp.LoadOptions(edit=lambda graph: graph.after("h2d", bcp.extend.Stage("hang", hang)), read_bytes=MIB)

    async def work() -> list[str]:
        task = asyncio.create_task(bcp.aload(tmp_path, {"model": target}, options=options))
        assert await anyio.to_thread.run_sync(reached.wait, SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        return list(getattr(caught.value, "__notes__", []))

    notes = asyncio.run(work())
    assert any("half loaded" in note for note in notes)
