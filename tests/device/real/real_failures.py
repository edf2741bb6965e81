"""Scenarios of operations that fail or are cancelled, and of forks."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from real_backend import Backend
from real_support import LARGE, MIB, WAYS, all_are, each, later, loaded, mixed, patched, save, scenario, synchronize

import bcp
from bcp.runtime import accelerator as _accelerator
from bcp.stages import gather
from bcp.stages.place import LoadBuffers


def failing(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that copies, and fails after its second copy was queued."""
    done = itertools.count(1)

    def run(*args: Any) -> Any:
        result = copy(*args)
        if next(done) == 2:
            raise RuntimeError("the device has failed")
        return result

    return run


def tensors() -> dict[str, torch.Tensor]:
    found = {f"w{n}": torch.full((LARGE,), float(n), device="late") for n in range(8)}
    synchronize()
    return found


@each(*WAYS)
def a_save_that_fails_leaves_no_copy_under_way(late: Backend, path: Path, how: str) -> None:
    model = tensors()
    late.delay(0.1)
    try:
        with patched(gather, "flat_to_bytes", failing(gather.flat_to_bytes)):
            save(path, {"model": model}, how, options=bcp.SaveOptions(part_bytes=16 * MIB))
    except bcp.BcpError:
        assert late.pending == 0
    else:
        raise AssertionError("it was saved")


@scenario
def a_load_that_fails_leaves_no_copy_under_way(late: Backend, path: Path) -> None:
    model = tensors()
    bcp.save(path, {"model": model})
    late.delay(0.1)
    try:
        with patched(LoadBuffers, "place", failing(LoadBuffers.place)):
            bcp.load(path, {"model": model}, options=bcp.LoadOptions(read_bytes=MIB))
    except bcp.BcpError:
        assert late.pending == 0
    else:
        raise AssertionError("it was loaded")


@each("asave", "aload")
def what_is_cancelled_leaves_no_copy_under_way(late: Backend, path: Path, how: str) -> None:
    model = tensors()
    bcp.save(path / "before", {"model": model})

    def held(*args: Any) -> Any:
        late.hold()
        return place(*args)

    async def run() -> None:
        late.copies()
        if how == "asave":
            late.hold()
            task = asyncio.ensure_future(bcp.asave(path / "now", {"model": model}))
        else:
            task = asyncio.ensure_future(bcp.aload(path / "before", {"model": model}))
        while not any(late.copies().values()):  # noqa: ASYNC110 -- the streams are no part of the loop
            await asyncio.sleep(0.001)
        task.cancel()
        timer = later(0.05, late.release)
        try:
            await task
        except asyncio.CancelledError:
            assert late.pending == 0
        else:
            raise AssertionError("it was not cancelled")
        timer.join()

    place = LoadBuffers.place
    with patched(LoadBuffers, "place", held):
        asyncio.run(run())


@each("save", "background", "load")
def a_fork_afterwards(_: Backend, path: Path, how: str) -> None:
    model = mixed()
    synchronize()
    save(path, {"model": model}, "save" if how == "load" else how)
    if how == "load":
        bcp.load(path, {"model": model})
    pid = os.fork()
    if not pid:
        os._exit(_child(model, path))
    assert os.waitpid(pid, 0)[1] == 0
    bcp.save(path, {"model": model}, overwrite=True)
    assert all_are(loaded(path, model), 0)


@scenario
def a_fork_during_a_save(late: Backend, path: Path) -> None:
    model = mixed()
    synchronize()
    late.delay(0.02)
    pending = bcp.save(path, {"model": model}, async_checkpoint=True)
    pid = os.fork()
    if not pid:
        os._exit(_child(dict(model), path))
    assert os.waitpid(pid, 0)[1] == 0
    pending.wait()
    assert all_are(loaded(path, model), 0)


def _child(model: dict[str, torch.Tensor], path: Path) -> int:
    try:
        assert _accelerator.devices_in_use() == []
        model.clear()
        gc.collect()
        bcp.save(path / "child", {"model": {"w": torch.ones(1000)}})
        return int(loaded(path / "child", {"w": torch.ones(1000)})["w"].sum() != 1000)
    except BaseException:  # noqa: BLE001 -- the child ends here
        traceback.print_exc()
        return 1
