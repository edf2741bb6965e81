"""A run whose trainer decides by itself when to save, and what to do before the last save."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from forked import run_forked

import bcp
from bcp.format.metadata import METADATA_KEY
from bcp.runtime import bridge


def states() -> dict[str, Any]:
    return {"model": {"w": torch.ones(4)}}


def committed(url: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in url.glob(f"step-*/{METADATA_KEY}"))


def endings(url: Path) -> list[str]:
    return [life["ended"] for life in json.loads((url / "run.json").read_bytes())["lives"]]


def test_the_trainer_decides(tmp_path: Path) -> None:
    with bcp.Run(tmp_path, states(), save=None, keep=10) as run:
        run.resume()
        for step in range(1, 8):
            assert run.maybe_save(step) is None
            if step in (2, 5):
                pending = run.save(step, {"loss": 1 / step})
                assert pending is not None
                assert run.save(step) is None  # it is being saved
            assert not run.should_stop(step)
    assert committed(tmp_path) == [2, 5]
    assert [info.metrics for info in bcp.Run(tmp_path, {}).list()] == [{"loss": 0.5}, {"loss": 0.2}]


def test_a_save_takes_the_place_of_the_policy_s(tmp_path: Path) -> None:
    with bcp.Run(tmp_path, states(), save=3, keep=10) as run:
        run.resume()
        for step in range(1, 7):
            run.save(step) if step in (3, 4) else run.maybe_save(step)
    assert committed(tmp_path) == [3, 4, 6]


def test_a_trainer_that_logs_before_the_last_save(tmp_path: Path) -> None:
    with bcp.Run(tmp_path, states(), save=None) as run:
        run.resume()
        assert not run.stopping(1)
        run.maybe_save(1)
        run.stop("enough")
        assert run.stopping(2)
        assert committed(tmp_path) == []
        assert run.save(2, {"loss": 0.5}) is not None
    assert committed(tmp_path) == [2]
    assert endings(tmp_path) == ["preempted"]
    with bcp.Run(tmp_path, states(), save=None) as run:
        assert run.resume() == 2


def test_should_stop_waits_for_a_save_of_the_trainer(tmp_path: Path) -> None:
    with bcp.Run(tmp_path, states(), save=None) as run:
        run.resume()
        run.stop()
        assert run.stopping(1)
        run.save(1)
        assert run.should_stop(1)
        assert committed(tmp_path) == [1]


def test_a_run_that_stops_without_a_save_was_preempted(tmp_path: Path) -> None:
    with bcp.Run(tmp_path, states(), save=None) as run:
        run.resume()
        run.stop()
        assert run.stopping(1)
    assert endings(tmp_path) == ["preempted"]


def test_from_coroutines(tmp_path: Path) -> None:
    async def train() -> None:
        async with bcp.Run(tmp_path, states(), save=None) as run:
            await run.aresume()
            pending = await run.asave(3)
            assert pending is not None
            await pending
            run.stop()
            assert await run.astopping(4)
            await run.asave(4)

    anyio.run(train)
    assert committed(tmp_path) == [3, 4]


def test_refused(tmp_path: Path) -> None:
    run = bcp.Run(tmp_path, states(), save=None)
    with pytest.raises(bcp.InputError, match=r"call resume\(\)"):
        run.save(1)
    with run:
        run.resume()
        with pytest.raises(bcp.InputError, match="from 1 on"):
            run.save(0)
        run.save(5)
        with pytest.raises(bcp.InputError, match=r"save\(4\) after step 5"):
            run.save(4)
        with pytest.raises(bcp.InputError, match=r"stopping\(4\) after step 5"):
            run.stopping(4)
        with pytest.raises(bcp.InputError, match="loss"):
            run.save(6, {"loss": "low"})  # type: ignore[dict-item]  # on purpose
    with pytest.raises(bcp.InputError, match="closed"):
        run.save(7)
    assert committed(tmp_path) == [5]


# -- callbacks of a save -----------------------------------------------------------------------------------


def test_a_callback_gets_the_save_and_may_wait_for_it(tmp_path: Path) -> None:
    told, seen = threading.Event(), []

    def tell(pending: bcp.Pending[bcp.SaveResult]) -> None:
        seen.append((pending.done(), pending.wait().path, threading.current_thread() is threading.main_thread()))
        told.set()

    pending = bcp.save_async(tmp_path / "a", states())
    pending.add_done_callback(tell)
    pending.wait()
    assert told.wait(60)
    told.clear()
    pending.add_done_callback(tell)  # it has ended
    assert told.wait(60)
    assert seen == [(True, str(tmp_path / "a"), False)] * 2


def test_an_error_of_a_callback_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr(bridge.log, "error", lambda words, *_, **__: told.set() if "callback" in words else None)

    def fail(_: object) -> None:
        raise ValueError("no")

    pending = bcp.save_async(tmp_path / "a", states())
    pending.add_done_callback(fail)
    assert pending.wait().rank == 0
    assert told.wait(60)


def test_a_process_that_ends_waits_for_callbacks(tmp_path: Path) -> None:
    program = f"""
import time, torch, bcp
pending = bcp.save_async({str(tmp_path / "a")!r}, {{"model": {{"w": torch.ones(4)}}}})
pending.add_done_callback(lambda pending: (time.sleep(0.5), print("told", pending.wait().rank)))
"""
    assert run_forked([sys.executable, "-c", program]).stdout.strip() == "told 0"
