"""Runs the scenarios and the figures of ``tests/gpu`` on the emulation, at a small scale: they run, and they can fail.

Not shown here: the time that CUDA takes; NCCL and FSDP2 on a device (FSDP2 runs on the CPU, with gloo); a new
interpreter (its scenario runs in this one); what torch and the driver call page-locked memory; the abort of a forked
child, which the emulation reports as a defect; autograd and fused optimizers, in whose place gradients are drawn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import late
import pytest
from gpu import bounds
from gpu.scenarios import EMULATED, SCENARIOS, Scenario, figures, order, sharded
from gpu.scenarios.scale import once
from late import accelerators
from samples import sample

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python 3.12; DataLoader forks
ROOM = figures.Room(runs=2, nbytes=3_000_000, raw_nbytes=1 << 20)


@pytest.fixture
def machine() -> Iterator[late.Machine]:
    with accelerators(devices=2, seed=1) as machine:
        yield machine


IN_THIS_PROCESS = Scenario("first load", order.first_load)


@pytest.mark.parametrize(
    "scenario",
    [*(each for each in SCENARIOS if each.emulated), IN_THIS_PROCESS],
    ids=lambda scenario: scenario.name,
)
def test_scenario(machine: late.Machine, tmp_path: Path, scenario: Scenario) -> None:
    scenario.run(tmp_path, EMULATED)
    assert not machine.defects


def test_fsdp2(tmp_path: Path) -> None:
    sharded.eval_forward_save_load_forward(tmp_path, EMULATED, kind="cpu")


# -- figures


@pytest.mark.usefixtures("machine")
class TestFigures:
    def test_blocking_time(self, tmp_path: Path) -> None:
        figures.blocking_time_of_a_snapshot(tmp_path, ROOM)

    def test_load_time(self, tmp_path: Path) -> None:
        figures.load_time(tmp_path, ROOM)

    def test_many_small_tensors(self, tmp_path: Path) -> None:
        figures.many_small_tensors(tmp_path, EMULATED, ROOM, most=1.0)
        with pytest.raises(AssertionError, match="not batched"):
            figures.many_small_tensors(tmp_path, EMULATED, ROOM, most=1e-9)

    @pytest.mark.parametrize("snapshot", sample(["eager", "lazy"], "lazy"))
    def test_training(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: str) -> None:
        begun, step = threading.Semaphore(0), figures.Training.step

        def counted(training: figures.Training) -> float:
            begun.release()
            return step(training)

        def edit(graph: Any) -> Any:
            """Let the save go on when a step has begun."""
            while begun.acquire(blocking=False):
                pass
            return once("upload", lambda: begun.acquire(timeout=60))(graph)

        monkeypatch.setattr(figures.Training, "step", counted)
        figures.training_beside_a_save(tmp_path, EMULATED, ROOM, snapshot=snapshot, edit=edit)

    def test_sizes_fit_the_machine(self, tmp_path: Path) -> None:
        assert figures.disk_speed(tmp_path, 1 << 20) > 0
        assert figures.room(tmp_path, seconds=20, runs=5, speed=3e6).nbytes == 10_000_000
        assert figures.room(tmp_path, seconds=20, runs=5, speed=1e12).nbytes <= figures.MOST

    def test_a_load_of_something_else_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(figures.bcp, "load", lambda *_, **__: None)
        with pytest.raises(AssertionError, match="large0"):
            figures.blocking_time_of_a_snapshot(tmp_path, ROOM)


def test_a_save_without_any_step_is_named() -> None:
    assert figures.worst_step([0.1, 0.3], seconds=1.0, alone=0.1) == 0.3
    with pytest.raises(AssertionError, match=r"no training step ran beside a save of 0\.050 s; a step takes 0\.200 s"):
        figures.worst_step([], seconds=0.05, alone=0.2)


def test_all_gpu_tests_end_within_eight_minutes() -> None:
    assert bounds.limit(0) == bounds.MOST
    assert bounds.limit(bounds.SECONDS - 10) == 10
    assert 0 < bounds.limit(bounds.SECONDS + 10) < 1
