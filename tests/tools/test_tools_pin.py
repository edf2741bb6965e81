"""A checkpoint of a run is pinned from outside, while the run's own job goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bcp


def pinned(run: Path) -> list[int]:
    return [step.step for step in bcp.tools.list_steps(run) if step.pinned]


def test_a_pin_of_another_process_is_kept_by_the_job(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with bcp.Run(path, {"model": torch.nn.Linear(2, 2)}, save=1, keep=1) as run:
        run.resume()
        for step in range(1, 6):
            saving = run.maybe_save(step)
            assert saving is not None
            saving.wait()
            if step in (1, 3):
                bcp.tools.pin(path, step)
        bcp.tools.pin(path, 3, pinned=False)
        assert pinned(path) == [1]
        run.maybe_save(6)
    assert [step.step for step in bcp.tools.list_steps(path)] == [1, 6]


def test_a_pin_without_a_checkpoint_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(bcp.InputError, match="has no checkpoint of step 7"):
        bcp.tools.pin(tmp_path / "nowhere", 7)
    with pytest.raises(bcp.InputError, match="is no step"):
        bcp.tools.pin(tmp_path / "nowhere", -1)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.anyio
async def test_a_coroutine_pins_too(tmp_path: Path) -> None:
    await bcp.asave(tmp_path / "run" / "step-00000003", {"model": {"w": torch.ones(2)}})
    await bcp.tools.apin(tmp_path / "run", 3)
    assert [step.pinned for step in await bcp.tools.alist_steps(tmp_path / "run")] == [True]
