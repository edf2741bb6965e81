"""A run that saves old step numbers again: checkpoints that somebody relies on stay, and the new ones come first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from logs import captured_logs

import bcp

OLD, NEW = 0.0, 100.0


def life(folder: Path, *steps: int, first: float = NEW, keep: int = 100, **resume: Any) -> int:
    """Save some steps, each with its number plus ``first``; return the step of the resumption."""
    model = {"w": torch.zeros(8)}
    with bcp.Run(str(folder), {"model": model}, save=1, keep=keep) as run:
        resumed = run.resume(**resume)
        for step in steps:
            model["w"].fill_(first + step)
            run.maybe_save(step)
    return resumed


def value(path: Path | str | None) -> float:
    assert path is not None
    model = {"w": torch.zeros(8)}
    bcp.load(path, {"model": model})
    return model["w"][0].item()


def name(step: int, digits: int = 8) -> str:
    return f"step-{step:0{digits}d}"


def held(folder: Path) -> dict[str, float]:
    """Return the value of each checkpoint."""
    return {path.name: value(path) for path in sorted(folder.glob("step-*"))}


def warnings(lines: list[Any]) -> list[str]:
    return [
        line["event"] for line in lines if line["log_level"] == "warning" and "is resumed from first" in line["event"]
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of steps 1 to 3."""
    life(tmp_path, 1, 2, 3, first=OLD)
    return tmp_path


def test_a_new_beginning_destroys_no_checkpoint_from_before(run: Path) -> None:
    with captured_logs() as lines:
        assert life(run, 1, 2, 3, keep=1, trust="verified") == 0
    old = {name(step): OLD + step for step in (1, 2, 3)}
    assert held(run) == {**old, **{name(step, 9): NEW + step for step in (1, 2, 3)}}
    (warning,) = warnings(lines)
    for part in ("step 1", "from before", name(1), name(1, 9), "verified"):
        assert part in warning
    assert bcp.latest(run) == f"{run}/{name(3, 9)}"
    # another new beginning spares these, too
    assert life(run, 3, first=2 * NEW, keep=1, trust="verified") == 0
    assert {path: at for path, at in held(run).items() if path.endswith("3")} == {
        name(3): OLD + 3,
        name(3, 9): NEW + 3,
        name(3, 10): 2 * NEW + 3,
    }
    assert value(bcp.latest(run)) == 2 * NEW + 3
    # once a new one is verified, the policy deletes the others
    bcp.Run(str(run), {}).mark(3, "verified")
    assert value(bcp.latest(run, trust="verified")) == 2 * NEW + 3
    assert life(run, 4, keep=1, trust="verified") == 3
    bcp.Run(str(run), {}).mark(4, "verified")
    assert life(run, 5, keep=1) == 4
    assert list(held(run)) == [name(4), name(5)]


def pin(folder: Path) -> None:
    bcp.Run(str(folder), {}).pin(3)


def verify(folder: Path) -> None:
    bcp.Run(str(folder), {}).mark(3, "verified")


@pytest.mark.parametrize("rely", [pin, verify])
def test_a_run_that_went_back_saves_beside_a_checkpoint_that_is_pinned_or_verified(
    run: Path, rely: Callable[[Path], None]
) -> None:
    rely(run)
    with captured_logs() as lines:
        assert life(run, 3, step=2) == 2
    assert held(run) == {name(1): OLD + 1, name(2): OLD + 2, name(3): OLD + 3, name(3, 9): NEW + 3}
    (warning,) = warnings(lines)
    assert "run.pin(3, pinned=False)" in warning
    # a restart goes on from the new one; a mark is about the new one
    assert bcp.latest(run) == f"{run}/{name(3, 9)}"
    assert bcp.latest(run, trust="verified") is None
    assert life(run, 4, 5, keep=1) == 3
    assert list(held(run)) == [name(3, 9), name(3), name(5)]
    bcp.Run(str(run), {}).pin(3, pinned=False)
    assert life(run, 6, keep=1) == 5
    assert list(held(run)) == [name(6)]


def test_a_pin_that_comes_after_the_resumption_counts(run: Path) -> None:
    model = {"w": torch.zeros(8)}
    with bcp.Run(str(run), {"model": model}, save=1, keep=100) as training:
        assert training.resume(step=1) == 1
        model["w"].fill_(NEW)
        pin(run)
        training.maybe_save(2)
        training.maybe_save(3)
    assert held(run) == {name(1): OLD + 1, name(2): NEW, name(3): OLD + 3, name(3, 9): NEW}


def test_the_last_save_before_a_stop_and_a_standby_snapshot_lose_nothing(run: Path) -> None:
    for step in (2, 3):
        bcp.Run(str(run), {}).pin(step)
    model = {"w": torch.zeros(8)}
    with bcp.Run(str(run), {"model": model}, save=100, standby_steps=1) as training:
        assert training.resume(step=1) == 1
        model["w"].fill_(NEW)
        training.maybe_save(2)  # a snapshot, which is given up
        training.stop()
        training.maybe_save(3)
        assert training.should_stop(3)
    assert held(run) == {name(1): OLD + 1, name(2): OLD + 2, name(3): OLD + 3, name(3, 9): NEW}


def test_other_checkpoints_that_were_passed_over_are_replaced(run: Path) -> None:
    bcp.save(run / name(3, 9), {"model": {"w": torch.full((8,), 33.0)}})
    bcp.Run(str(run), {}).mark(3, "suspect", "the loss rose")
    with captured_logs() as lines:
        assert life(run, 3) == 2
    assert not warnings(lines)
    assert held(run) == {name(1): OLD + 1, name(2): OLD + 2, name(3): OLD + 3, name(3, 9): NEW + 3}
    assert bcp.latest(run) == f"{run}/{name(3, 9)}", "the new one comes first"
