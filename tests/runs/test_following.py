"""Readers of a run: they wait for its next checkpoint, and list all of them, while another job trains."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import bcp
from bcp.backends import MemoryBackend, prefixed, register
from bcp.testing.storage_fakes import CountingBackend

QUICK = 0.01


def save(path: Path | str, step: int) -> None:
    bcp.save(f"{path}/step-{step:08d}", {"model": {"w": torch.full((3,), step)}})


def unfinished(path: Path, step: int) -> Path:
    """Make the folder of a save that has not committed yet."""
    file = path / f"step-{step:08d}" / "model" / "00000-0123456789abcdef.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"data")
    return file


def name(path: Path, step: int) -> str:
    return f"{path}/step-{step:08d}"


def marked_run(path: Path) -> None:
    """Train a run whose checkpoints are suspect, pinned and verified."""
    with bcp.Run(path, {"model": {"w": torch.ones(3)}}, save=10, keep=9) as run:
        run.resume()
        for step in (10, 20, 30):
            run.maybe_save(step)
    run = bcp.Run(path, {})
    run.mark(10, "suspect", "loss")
    run.pin(20)
    run.mark(30, "verified")


# -- wait -----------------------------------------------------------------------------------------


def test_the_oldest_that_is_newer_comes_first_and_none_is_left_out(tmp_path: Path) -> None:
    for step in (0, 10, 20, 30):
        save(tmp_path, step)
    step, found = -1, []
    while path := bcp.wait_for_next(tmp_path, after=step, timeout=0):
        step = bcp.Checkpoint(path).step or 0
        found.append(path)
    assert found == [name(tmp_path, step) for step in (0, 10, 20, 30)]


def test_it_returns_once_the_save_is_committed(tmp_path: Path) -> None:
    save(tmp_path, 10)
    found: list[str | None] = []
    waiting = threading.Thread(
        target=lambda: found.append(bcp.wait_for_next(tmp_path, after=10, poll_seconds=QUICK, timeout=60))
    )
    waiting.start()
    unfinished(tmp_path, 20)
    waiting.join(0.2)
    assert waiting.is_alive(), "it took a save that had not committed"
    save(tmp_path, 30)
    waiting.join(60)
    assert found == [name(tmp_path, 30)]


def test_the_folder_may_come_later(tmp_path: Path) -> None:
    assert bcp.wait_for_next(tmp_path / "run", timeout=0) is None
    timer = threading.Timer(0.1, save, (tmp_path / "run", 5))
    timer.start()
    assert bcp.wait_for_next(tmp_path / "run", poll_seconds=QUICK, timeout=60) == name(tmp_path / "run", 5)
    timer.join()


def test_after_the_timeout_there_is_none(tmp_path: Path) -> None:
    save(tmp_path, 10)
    assert bcp.wait_for_next(tmp_path, after=10, poll_seconds=QUICK, timeout=0.05) is None
    assert bcp.wait_for_next(tmp_path, after=10, timeout=0) is None


def test_suspect_checkpoints_are_passed_over_and_trust_may_be_asked_for(tmp_path: Path) -> None:
    marked_run(tmp_path)
    assert bcp.wait_for_next(tmp_path, timeout=0) == name(tmp_path, 20)
    assert bcp.wait_for_next(tmp_path, timeout=0, trust="verified") == name(tmp_path, 30)


def test_as_long_as_nothing_is_new_a_poll_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    MemoryBackend.forget("polled")
    save("memory://polled/run", 10)
    counted = CountingBackend(prefixed.child(MemoryBackend("polled"), "run"))
    register("polled", lambda _url: counted)
    slept: list[float] = []
    others = anyio.sleep  # of whoever else sleeps on bcp's loop

    async def sleep(seconds: float) -> None:
        if seconds != 7.0:
            await others(seconds)
            return
        slept.append(seconds)
        counted.calls["polls"] += 1
        if len(slept) == 5:
            await bcp.asave("memory://polled/run/step-00000020", {"model": {"w": torch.ones(3)}})

    monkeypatch.setattr(anyio, "sleep", sleep)
    assert bcp.wait_for_next("polled://run", after=10, poll_seconds=7.0) == "polled://run/step-00000020"
    assert slept == [7.0] * 5
    assert counted.calls["list"] + counted.calls["folders"] == 6
    assert not counted.written


def test_a_coroutine_waits_without_holding_its_loop_up(tmp_path: Path) -> None:
    async def waited() -> str | None:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, save, tmp_path, 3)
            return await bcp.await_for_next(tmp_path, poll_seconds=QUICK, timeout=60)

    assert asyncio.run(waited()) == name(tmp_path, 3)


def test_a_cancelled_wait_ends(tmp_path: Path) -> None:
    async def cancelled() -> bool:
        with anyio.move_on_after(0.05) as scope:
            await bcp.await_for_next(tmp_path, poll_seconds=100)
        return scope.cancelled_caught

    assert asyncio.run(cancelled())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"after": "10"}, "after='10'"),
        ({"after": -2}, "after=-2"),
        ({"poll_seconds": -1}, "poll_seconds=-1"),
        ({"poll_seconds": float("nan")}, "poll_seconds=nan"),
        ({"timeout": "1"}, "timeout='1'"),
        ({"timeout": True}, "timeout=True"),
        ({"trust": "all"}, "trust='all'"),
        ({"path": 5}, "path=5"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(bcp.InputError, match=says):
        bcp.wait_for_next(**({"path": tmp_path, "timeout": 0} | arguments))


# -- list -----------------------------------------------------------------------------------------


def test_a_list_has_times_sizes_metrics_and_marks(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    marked_run(tmp_path)
    unfinished(tmp_path, 40)
    infos = bcp.Run(tmp_path, {}).list()
    assert [(info.step, info.is_committed) for info in infos] == [(10, True), (20, True), (30, True), (40, False)]
    assert [(info.trust, info.reason) for info in infos[:3]] == [("suspect", "loss"), ("unknown", ""), ("verified", "")]
    assert [info.pinned for info in infos] == [False, True, False, False]
    for info in infos[:3]:
        assert info.path == name(tmp_path, info.step)
        assert bcp.Checkpoint(info.path).step == info.step
        files = [file for file in Path(info.path).rglob("*") if file.is_file()]
        assert info.nbytes == sum(file.stat().st_size for file in files)
        assert info.committed is not None
        assert before <= info.committed <= datetime.now(UTC)
    assert (infos[3].committed, infos[3].nbytes, infos[3].metrics) == (None, 4, {})


def test_checkpoints_without_a_ledger_are_listed_too(tmp_path: Path) -> None:
    save(tmp_path, 7)
    (info,) = bcp.Run(tmp_path, {}).list()
    assert (info.step, info.is_committed, info.committed, info.trust) == (7, True, None, "unknown")
    assert not (tmp_path / "run.json").exists()
    assert bcp.Run(tmp_path / "nothing", {}).list() == []


def test_a_link_out_of_the_run_is_told_and_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "other", 7)
    folder = tmp_path / "run" / "step-00000007"
    folder.mkdir(parents=True)
    (folder / "metadata.arrow").symlink_to(tmp_path / "other/step-00000007/metadata.arrow")
    (info,) = bcp.Run(tmp_path / "run", {}).list()
    assert not info.is_committed
    assert "link" in info.reason


def test_a_run_that_trains_lists_itself(tmp_path: Path) -> None:
    with bcp.Run(tmp_path, {"model": {"w": torch.ones(3)}}, save=1, keep=2) as run:
        run.resume()
        for step in (1, 2):
            run.maybe_save(step)
        assert [info.step for info in run.list() if info.is_committed] in ([1], [1, 2])
    assert [info.step for info in run.list()] == [1, 2]
