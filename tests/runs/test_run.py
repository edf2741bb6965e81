"""Tests of a run in one process: resume, retention, stops, and every error that a user can meet."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from torch import nn

import bcp
from bcp import policies
from bcp.format.metadata import METADATA_KEY
from bcp.runs.folder import Folder, step_name
from bcp.runs.ledger import Ledger
from bcp.runs.saves import Standby, Watchdog
from bcp.runtime.threads import in_thread

STEPS = 12


class Training:
    """A small training with dropout, whose weights depend on the random state of every step."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.model(torch.rand(4, 8)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> torch.Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.model.parameters()])


def trained(url: Path, steps: int = STEPS, *, resumed_from: int | None = None, **options: Any) -> Training:
    """Train in a run up to a step, or until the run stops."""
    training = Training()
    with bcp.Run(str(url), training.states, **{"save": 2, **options}) as run:
        first = run.resume()
        assert resumed_from in (None, first)
        for step in range(first + 1, steps + 1):
            training.step()
            run.maybe_save(step)
            if run.should_stop(step):
                break
    return training


def committed(url: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in url.glob(f"step-*/{METADATA_KEY}"))


@pytest.fixture
def reference() -> torch.Tensor:
    training = Training()
    for _ in range(STEPS):
        training.step()
    return training.weights()


@pytest.mark.parametrize("first_life", [1, 4, 7, 11])
def test_a_resumed_run_ends_with_the_weights_of_an_undisturbed_one(
    tmp_path: Path, reference: torch.Tensor, first_life: int
) -> None:
    trained(tmp_path, first_life, resumed_from=0)
    assert torch.equal(trained(tmp_path, resumed_from=first_life // 2 * 2).weights(), reference)


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (2, [10, 12]),
        (policies.Everything(), [2, 4, 6, 8, 10, 12]),
        (policies.AnyKept(1, policies.EveryKSteps(6)), [6, 12]),
    ],
)
def test_retention_leaves_the_checkpoints_of_the_policy(tmp_path: Path, keep: Any, left: list[int]) -> None:
    trained(tmp_path, keep=keep)
    assert committed(tmp_path) == left
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [step_name(step) for step in left]


def test_the_best_checkpoint_by_a_metric_stays(tmp_path: Path) -> None:
    training = Training()
    with bcp.Run(str(tmp_path), training.states, save=1, keep=policies.AnyKept(1, policies.Best("loss"))) as run:
        run.resume()
        for step, loss in enumerate([3.0, 1.0, 2.0, 2.5], 1):
            run.maybe_save(step, {"loss": loss})
    assert committed(tmp_path) == [2, 4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_run_with_a_checkpoint_of_the_step(
    tmp_path: Path, reference: torch.Tensor, number: int
) -> None:
    training, stopped = Training(), 0
    with bcp.Run(str(tmp_path), training.states, save=100) as run:
        run.resume()
        for step in range(1, STEPS + 1):
            training.step()
            if step == 5:
                os.kill(os.getpid(), number)
                while run._meetings is not None and run._meetings.reason is None:  # else it stops at 6
                    time.sleep(0.001)
            run.maybe_save(step)
            if run.should_stop(step):
                stopped = step
                assert committed(tmp_path) == [step]  # durable already
                break
    assert stopped == 5
    assert torch.equal(trained(tmp_path, resumed_from=5).weights(), reference)


def test_should_stop_alone_saves_the_last_step(tmp_path: Path) -> None:
    training = Training()
    with bcp.Run(str(tmp_path), training.states, save=policies.OnPreemption()) as run:
        run.resume()
        assert not run.should_stop(1)
        run.stop("the quota is used up")
        assert run.should_stop(2)
        assert run.should_stop(2)
    assert committed(tmp_path) == [2]


def test_the_asynchronous_methods_do_the_same(tmp_path: Path, reference: torch.Tensor) -> None:
    async def train(steps: int) -> Training:
        training = Training()
        async with bcp.Run(str(tmp_path), training.states, save=2) as run:
            for step in range(await run.aresume() + 1, steps + 1):
                training.step()
                await run.amaybe_save(step)
                if await run.ashould_stop(step):
                    break
        return training

    asyncio.run(train(7))
    assert torch.equal(asyncio.run(train(STEPS)).weights(), reference)


@pytest.mark.parametrize(
    "save",
    [policies.EverySeconds(1e-4), policies.Continuously(), policies.AnyOf(policies.FirstStep(), policies.Tuned())],
)
def test_policies_that_look_at_a_clock_save(tmp_path: Path, save: policies.SavePolicy, reference: torch.Tensor) -> None:
    trained(tmp_path, 8, save=save)
    assert committed(tmp_path)
    assert torch.equal(trained(tmp_path, save=save).weights(), reference)


def test_a_damaged_checkpoint_is_passed_over_and_replaced(tmp_path: Path, reference: torch.Tensor) -> None:
    trained(tmp_path, 8, keep=10)
    data = next((tmp_path / step_name(8) / "model").iterdir())
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    training = Training()
    with bcp.Run(str(tmp_path), training.states, save=2, keep=10) as run:
        assert run.resume() == 6
        (passed,) = run.resumed.passed_over
        assert passed.step == 8
        assert "CorruptError" in passed.reason
        for step in range(7, STEPS + 1):
            training.step()
            run.maybe_save(step)
    assert torch.equal(training.weights(), reference)
    trained(tmp_path, 8, resumed_from=STEPS)


def test_an_uncommitted_save_is_passed_over_and_removed_later(tmp_path: Path) -> None:
    trained(tmp_path, 8, keep=10)
    (tmp_path / step_name(8) / METADATA_KEY).unlink()
    (tmp_path / "run.json").unlink()
    training = Training()
    with bcp.Run(str(tmp_path), training.states, save=5, keep=10) as run:
        assert run.resume() == 6
        assert [choice.step for choice in run.resumed.passed_over] == [8]
        run.maybe_save(10)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [step_name(step) for step in (2, 4, 6, 10)]


def test_another_model_ends_the_resumption(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    with bcp.Run(str(tmp_path), {"model": nn.Linear(3, 3)}) as run, pytest.raises(bcp.FqnMismatchError):
        run.resume()


def test_marks_decide_about_the_resumption(tmp_path: Path) -> None:
    trained(tmp_path, 6, keep=10)
    with bcp.Run(str(tmp_path), Training().states) as run:
        run.resume()
        run.mark(6, "suspect", "the loss rose")
        run.mark(2, "verified")
        with pytest.raises(bcp.InputError, match="7"):
            run.mark(7, "verified")
    with bcp.Run(str(tmp_path), Training().states) as run:
        assert run.resume() == 4
        assert "the loss rose" in str(run.resumed)
    with bcp.Run(str(tmp_path), Training().states) as run:
        assert run.resume(trust="verified") == 2


def test_a_pinned_checkpoint_stays(tmp_path: Path) -> None:
    training = Training()
    with bcp.Run(str(tmp_path), training.states, save=2, keep=1) as run:
        run.resume()
        for step in range(1, 9):
            training.step()
            pending = run.maybe_save(step)
            if step == 4 and pending is not None:
                pending.wait()
                run.pin(4)
    assert committed(tmp_path) == [4, 8]


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 4, run_id="first")
    with (
        bcp.Run(str(tmp_path), Training().states, run_id="second") as run,
        pytest.raises(bcp.RunTakenError, match="first"),
    ):
        run.resume()
    trained(tmp_path, 6, run_id="first", resumed_from=4)


def test_a_job_whose_folder_was_taken_ends(tmp_path: Path) -> None:
    training = Training()
    run = bcp.Run(str(tmp_path), training.states, save=1, keep=10)
    run.resume()
    pending = run.maybe_save(1)
    assert pending is not None
    pending.wait()
    trained(tmp_path, 4, save=4, keep=10)
    with pytest.raises(bcp.RunTakenError):
        _save_on(run, 2)
    with pytest.raises(bcp.RunTakenError):
        run.close()
    assert {1, 4} <= set(committed(tmp_path))


def _save_on(run: bcp.Run, first: int) -> None:
    """Save step after step, until one fails."""
    for step in range(first, 100):
        run.maybe_save(step)


def _save_three(run: bcp.Run) -> None:
    for step in range(1, 4):
        run.maybe_save(step)
    run.close()


class _Failing:
    """Lets the saves of some steps fail, before a stage."""

    def __init__(self, steps: int, stage: str = "checksum") -> None:
        self.left, self.stage = steps, stage

    def edit(self, graph: bcp.extend.Graph) -> bcp.extend.Graph:
        self.left -= 1
        if self.left < 0:
            return graph

        async def fail(_part: Any) -> Any:
            raise OSError("the disk is gone")

        return graph.before(self.stage, bcp.extend.Stage("fail", fail))


def test_a_failed_save_is_raised_by_the_next_call(tmp_path: Path) -> None:
    failures: list[int] = []
    options = bcp.SaveOptions(edit=_Failing(1).edit)
    run = bcp.Run(
        str(tmp_path),
        Training().states,
        save=1,
        save_options=options,
        on_failure=lambda step, _error: failures.append(step),
    )
    run.resume()
    run.maybe_save(1)
    with pytest.raises(bcp.StageError, match="the disk is gone"):
        _save_on(run, 2)
    assert failures[0] == 1
    run.close()


@pytest.mark.parametrize("stage", ["d2h", "checksum"])
@pytest.mark.parametrize(("failing", "raises"), [(2, False), (3, True)])
def test_some_failed_saves_in_a_row_are_tolerated(tmp_path: Path, stage: str, failing: int, *, raises: bool) -> None:
    options = bcp.SaveOptions(edit=_Failing(failing, stage).edit)
    commits: list[int] = []
    run = bcp.Run(
        str(tmp_path),
        Training().states,
        save=1,
        tolerate=2,
        save_options=options,
        on_commit=lambda step, _report: commits.append(step),
    )
    run.resume()
    with pytest.raises(bcp.StageError) if raises else nullcontext():
        _save_three(run)
    run.close()
    assert commits == ([] if raises else [3])


def test_the_standby_snapshot_is_written_if_no_step_ends(tmp_path: Path, reference: torch.Tensor) -> None:
    training = Training()
    with bcp.Run(
        str(tmp_path), training.states, save=100, standby_steps=1, preemption=bcp.Preemption(grace_seconds=1.0)
    ) as run:
        run.resume()
        for step in range(1, 6):
            training.step()
            run.maybe_save(step)
        assert committed(tmp_path) == []
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 60
        while not committed(tmp_path) and time.monotonic() < deadline:  # an evaluation that does not end
            time.sleep(0.01)
    assert committed(tmp_path) == [5]
    assert torch.equal(trained(tmp_path, resumed_from=5).weights(), reference)


def test_a_standby_snapshot_leaves_nothing(tmp_path: Path) -> None:
    trained(tmp_path, 8, save=4, standby_steps=1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [step_name(4), step_name(8)]


def test_calls_in_a_wrong_order_are_refused(tmp_path: Path) -> None:
    run = bcp.Run(str(tmp_path), Training().states, save=2)
    with pytest.raises(bcp.InputError, match=r"resume\(\)"):
        run.maybe_save(1)
    run.resume()
    run.maybe_save(2)
    with pytest.raises(bcp.InputError, match="a step is saved once"):
        run.maybe_save(2)
    with pytest.raises(bcp.InputError, match="already"):
        run.resume()
    run.close()
    run.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"save": 0},
        {"keep": 0},
        {"save": "often"},
        {"standby_steps": 0},
        {"tolerate": -1},
        {"while_saving": "never"},
        {"keep": policies.Latest},
        {"standby_steps": 1.5},
        {"tolerate": None},
        {"preemption": 30},
        {"on_commit": None},
    ],
)
def test_wrong_arguments_are_refused_before_a_byte_is_written(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(bcp.InputError):
        bcp.Run(str(tmp_path / "run"), Training().states, **wrong)
    assert not (tmp_path / "run").exists()


def test_extra_states_that_change_between_saves_are_saved_and_come_back(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"epoch": 0, "seen": [1]}
    with bcp.Run(str(tmp_path / "run"), {"model": nn.Linear(2, 2), "extra_states": extra}, save=1) as run:
        run.resume()
        for step in (1, 2):
            extra["epoch"] = step
            extra["seen"] = [*extra["seen"], step]
            extra["late"] = step
            run.maybe_save(step)
    fresh: dict[str, Any] = {"epoch": 0, "seen": [], "late": None}
    with bcp.Run(str(tmp_path / "run"), {"model": nn.Linear(2, 2), "extra_states": fresh}, save=1) as run:
        assert run.resume() == 2
    assert fresh == {"epoch": 2, "seen": [1, 1, 2], "late": 2}


def _damage(url: Path, *steps: int) -> None:
    for step in steps:
        data = next((url / step_name(step) / "model").iterdir())
        data.write_bytes(data.read_bytes()[:-1] + b"\xff")


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    _damage(tmp_path, 2, 4)
    run = bcp.Run(str(tmp_path), Training().states)
    with pytest.raises(bcp.CorruptError, match=r"none of 2 checkpoints .* another folder: step 4: "):
        run.resume()
    run.close()
    assert committed(tmp_path) == [2, 4]


@pytest.mark.parametrize("damage", ["gone", "broken"])
def test_a_lost_ledger_costs_no_checkpoint_that_was_pinned_or_verified(tmp_path: Path, damage: str) -> None:
    with bcp.Run(str(tmp_path), Training().states, save=2, keep=10) as run:
        run.resume()
        for step in (2, 4, 6):
            run.maybe_save(step)
        run.pin(2)
        run.mark(4, "verified")
    if damage == "gone":
        (tmp_path / "run.json").unlink()
    else:
        (tmp_path / "run.json").write_bytes(b"{")
    trained(tmp_path, 10, keep=1, resumed_from=6)
    assert committed(tmp_path) == [2, 4, 6, 10]
    with bcp.Run(str(tmp_path), Training().states, save=2, keep=1) as run:
        run.resume()
        run.pin(2, pinned=False)
        run.maybe_save(12)
    assert committed(tmp_path) == [4, 6, 12]


def test_checkpoints_that_were_passed_over_take_no_place_of_new_ones(tmp_path: Path) -> None:
    trained(tmp_path, 8, keep=10)
    _damage(tmp_path, 4, 6, 8)
    remains = tmp_path / step_name(7) / "model" / "part"
    remains.parent.mkdir(parents=True)
    remains.write_bytes(b"of a save that may be running again")
    with bcp.Run(str(tmp_path), Training().states, save=1, keep=2) as run:
        assert run.resume() == 2
        run.maybe_save(3)
        with pytest.raises(bcp.InputError):
            run.maybe_save(3)
    assert committed(tmp_path) == [2, 3, 4, 6, 8]
    assert remains.exists()
    trained(tmp_path, 10, keep=2, resumed_from=3)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [step_name(8), step_name(10)]


def test_a_standby_snapshot_that_is_given_up_takes_no_checkpoint_with_it(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    with bcp.Run(str(tmp_path), Training().states) as run:
        run.resume()
        run.mark(2, "verified")
    with bcp.Run(str(tmp_path), Training().states, save=100, standby_steps=1) as run:
        assert run.resume(trust="verified") == 2
        for step in (3, 4, 5):
            run.maybe_save(step)
    assert committed(tmp_path) == [2, 4]


def test_a_standby_snapshot_that_is_written_is_told(tmp_path: Path) -> None:
    commits: list[int] = []
    with bcp.Run(
        str(tmp_path), Training().states, standby_steps=1, on_commit=lambda step, _report: commits.append(step)
    ) as run:
        run.resume()
        run.maybe_save(1)
        run.maybe_save(2)
        run._standby.release()
    assert (commits, committed(tmp_path)) == ([2], [2])
    assert '"step": 2' in (tmp_path / "run.json").read_text()


def test_a_standby_snapshot_is_released_although_an_earlier_one_was() -> None:
    standby, written = Standby(), list[int]()

    async def committed(step: int, _: Any) -> None:
        written.append(step)

    for step in (1, 2):
        goes_on = threading.Event()

        async def save(_: Any, goes_on: threading.Event = goes_on) -> None:
            await in_thread(goes_on.wait)

        standby.options(bcp.SaveOptions())
        call, saves = SimpleNamespace(run=save, name="save"), SimpleNamespace(committed=committed)
        held = standby.begin(step, call, saves)  # type: ignore[arg-type]  # as much of them as is needed
        released = [standby.release(), standby.release()]
        goes_on.set()
        held.wait_ended()
        assert released == [True, False]
    assert written == [1, 2]


@pytest.mark.parametrize("released", [True, False])
def test_a_standby_snapshot_that_fails_is_told_if_it_was_to_be_written(tmp_path: Path, *, released: bool) -> None:
    failures: list[int] = []
    is_held = threading.Event()

    async def fail(_: Any) -> Any:
        await in_thread(is_held.wait)
        raise ValueError("no room")

    def failing(graph: bcp.extend.Graph) -> bcp.extend.Graph:
        stage = bcp.extend.Stage("mine", fail)
        return graph.after("upload", stage) if released else graph.before("upload", stage)

    with bcp.Run(
        str(tmp_path),
        Training().states,
        save=100,
        standby_steps=1,
        save_options=bcp.SaveOptions(edit=failing),
        on_failure=lambda step, _error: failures.append(step),
    ) as run:
        run.resume()
        run.maybe_save(1)
        held = run._standby._held
        assert held is not None
        is_held.set()
        if released:
            run._standby.release()
        held.wait_ended()
    assert failures == ([1] if released else [])


@pytest.mark.parametrize("stage", ["d2h", "checksum"])
def test_a_last_save_that_fails_is_not_tolerated(tmp_path: Path, stage: str) -> None:
    options = bcp.SaveOptions(edit=_Failing(1, stage).edit)
    with bcp.Run(str(tmp_path), Training().states, tolerate=2, save_options=options) as run:
        run.resume()
        assert not run.should_stop(1)
        run.stop()
        with pytest.raises(bcp.StageError, match="the disk is gone"):
            run.should_stop(2)


@pytest.mark.parametrize("stage", ["d2h", "checksum"])
def test_the_end_of_a_run_raises_the_error_of_its_last_save_although_it_was_tolerated(
    tmp_path: Path, stage: str
) -> None:
    options = bcp.SaveOptions(edit=_Failing(1, stage).edit)
    run = bcp.Run(str(tmp_path), Training().states, save=2, tolerate=2, save_options=options)
    run.resume()
    run.maybe_save(2)
    with pytest.raises(bcp.StageError, match="the disk is gone"):
        run.close()
    assert committed(tmp_path) == []
    run.close()


def test_a_verified_checkpoint_that_is_replaced_is_verified_no_more(tmp_path: Path) -> None:
    """Its entry is that of the old one, if the job is killed before the ledger has the new one."""
    trained(tmp_path, 4, keep=10)
    with bcp.Run(str(tmp_path), Training().states) as run:
        run.resume()
        run.mark(4, "verified")
    data = next((tmp_path / step_name(4) / "model").iterdir())
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    options = bcp.SaveOptions(edit=_Failing(1).edit)
    with bcp.Run(str(tmp_path), Training().states, save=2, tolerate=2, save_options=options) as run:
        assert run.resume() == 2
        run.maybe_save(4)
        run.maybe_save(6)
    ledger = Ledger.from_bytes((tmp_path / "run.json").read_bytes(), "run.json")
    assert [(entry.step, entry.trust) for entry in ledger.entries if entry.step == 4] == [(4, "unknown")]


def test_a_pin_waits_for_the_housekeeping_that_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a checkpoint could be deleted after it was pinned: it is chosen first, and deleted later."""
    chosen, may_delete = threading.Event(), threading.Event()
    remove = Folder.remove

    async def wait_and_remove(folder: Folder, step: int, **options: bool) -> None:
        chosen.set()
        await in_thread(may_delete.wait)
        await remove(folder, step, **options)

    monkeypatch.setattr(Folder, "remove", wait_and_remove)
    errors: list[BaseException] = []

    def pin(run: bcp.Run) -> None:
        try:
            run.pin(1)
        except bcp.InputError as error:
            errors.append(error)

    with bcp.Run(str(tmp_path), Training().states, save=1, keep=1) as run:
        run.resume()
        run.maybe_save(1)
        run.maybe_save(2)
        assert chosen.wait(60)
        monkeypatch.setattr(run._saves, "_keeping", set())  # as a pin sees it that comes just before the commit
        thread = threading.Thread(target=pin, args=[run])
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        may_delete.set()
        thread.join(60)
    assert committed(tmp_path) == [2]
    assert len(errors) == 1


def test_a_stop_signal_may_come_while_a_step_is_counted(tmp_path: Path) -> None:
    """A user's handler of a signal runs in the middle of any line of the main thread."""
    with bcp.Run(str(tmp_path), Training().states) as run:
        run.resume()
        assert run._meetings is not None
        with run._meetings._lock:
            run.stop()
        assert run.should_stop(1)


@pytest.mark.parametrize(("first", "then"), [(None, 0.2), (3600.0, 0.2)])
def test_the_watchdog_follows_the_soonest_deadline(first: float | None, then: float) -> None:
    released, looked, deadlines = threading.Event(), threading.Event(), [first]

    def release() -> bool:
        released.set()
        return True

    def deadline() -> float | None:
        looked.set()
        return None if deadlines[-1] is None else began + deadlines[-1]

    began = time.monotonic()
    watchdog = Watchdog(release, deadline, 0.0)
    assert looked.wait(60)
    assert not released.is_set()
    deadlines.append(then)
    assert released.wait(60)
    watchdog.step_ended()


def test_the_watchdog_releases_nothing_once_a_step_has_ended() -> None:
    released = threading.Event()
    watchdog = Watchdog(lambda: bool(released.set()), lambda: None, 0.0)
    watchdog.step_ended()
    for thread in threading.enumerate():
        if thread.name == "bcp watchdog":
            thread.join(60)
    assert not released.is_set()


def test_a_stop_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        with bcp.Run(str(tmp_path), Training().states) as run:
            assert run.resume() == 0
            run.stop()
            assert run.should_stop(0)
    assert committed(tmp_path) == []


def test_a_step_that_is_over_cannot_be_the_last(tmp_path: Path) -> None:
    with bcp.Run(str(tmp_path), Training().states) as run:
        run.resume()
        run.maybe_save(6)
        run.stop()
        with pytest.raises(bcp.InputError, match=r"should_stop\(2\) after step 6"):
            run.should_stop(2)
    assert committed(tmp_path) == []


def test_a_run_is_used_between_its_resumption_and_its_end(tmp_path: Path) -> None:
    run = bcp.Run(str(tmp_path), Training().states, save=1)
    with pytest.raises(bcp.InputError, match="no checkpoint of step 1"):
        run.mark(1, "verified")
    run.resume()
    run.maybe_save(1)
    run.close()
    for call in (lambda: run.maybe_save(2), lambda: run.should_stop(1), lambda: run.pin(1)):
        with pytest.raises(bcp.InputError, match="closed"):
            call()
    run.stop()


@pytest.mark.parametrize("wrong", [True, 2.0, 2.5, "2", None, -1, float("nan")])
def test_steps_are_whole_numbers(tmp_path: Path, wrong: Any) -> None:
    with bcp.Run(str(tmp_path), Training().states, save=1) as run:
        run.resume()
        run.maybe_save(torch.tensor(1))  # type: ignore[arg-type]  # as range() of torch and numpy have it
        with pytest.raises(bcp.InputError, match="is no step"):
            run.maybe_save(wrong)
    assert committed(tmp_path) == [1]


@pytest.mark.parametrize("wrong", [2.5, [("loss", 1.0)], {"loss": "low"}, {1: 2.0}, {"loss": torch.ones(2)}])
def test_metrics_that_cannot_be_noted_are_refused_by_the_call(tmp_path: Path, wrong: Any) -> None:
    with bcp.Run(str(tmp_path), Training().states, save=1) as run:
        run.resume()
        with pytest.raises(bcp.InputError, match="metrics"):
            run.maybe_save(1, wrong)


def test_metrics_are_those_of_the_call(tmp_path: Path) -> None:
    metrics = {"loss": 1.0}
    with bcp.Run(str(tmp_path), Training().states, save=1) as run:
        run.resume()
        run.maybe_save(1, metrics)
        metrics["loss"] = 9.0
    assert '"loss": 1.0' in (tmp_path / "run.json").read_text()


def test_steps_of_a_policy_beside_a_clock_are_exact(tmp_path: Path) -> None:
    save = policies.AnyOf(policies.EverySeconds(0.01), policies.AtSteps([9, STEPS]))
    with bcp.Run(str(tmp_path), Training().states, save=save, keep=policies.Everything()) as run:
        run.resume()
        for step in range(1, STEPS + 1):
            time.sleep(0.003)
            run.maybe_save(step)
    assert {9, STEPS} <= set(committed(tmp_path))


def test_a_run_stays_where_it_is_if_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with bcp.Run("run", Training().states, save=1) as run:
        run.resume()
        run.maybe_save(1)
        monkeypatch.chdir("elsewhere")
        run.maybe_save(2)
    assert committed(tmp_path / "run") == [1, 2]


def test_a_signal_during_the_end_of_a_run_stops_no_save(tmp_path: Path) -> None:
    async def slow(part: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        with anyio.fail_after(60):
            while run._preemption.reason is None:  # noqa: ASYNC110 -- the main thread hears of it
                await anyio.sleep(0.001)
        return part

    options = bcp.SaveOptions(edit=lambda graph: graph.before("upload", bcp.extend.Stage("slow", slow)))
    heard: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, _frame: heard.append(number))
    try:
        run = bcp.Run(str(tmp_path), Training().states, save=1, save_options=options)
        run.resume()
        run.maybe_save(1)
        run.close()
        assert run._preemption.reason == "SIGTERM"
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert committed(tmp_path) == [1]


def test_a_forked_child_that_leaves_the_block_closes_nothing(tmp_path: Path) -> None:
    with bcp.Run(str(tmp_path), Training().states, save=1) as run:
        run.resume()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            run.close()
            try:
                run.maybe_save(1)
            except bcp.InputError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        run.maybe_save(1)
    assert committed(tmp_path) == [1]


def test_a_policy_that_keeps_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, 6, keep=policies.Best("los"))
    assert committed(tmp_path) == [2, 4, 6]
    assert len([record for record in caplog.records if "keeps none" in record.getMessage()]) == 1


def test_an_entry_that_could_not_be_stored_is_stored_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, failing = Folder.change, [True, True]

    async def changed(folder: Folder, how: Any) -> Any:
        if failing and folder.ledger is not None:
            failing.pop()
            raise bcp.StorageError("not now")
        return await change(folder, how)

    monkeypatch.setattr(Folder, "change", changed)
    with bcp.Run(str(tmp_path), Training().states, save=1) as run:
        run.resume()
        for step in (1, 2, 3):
            pending = run.maybe_save(step, {"loss": float(step)})
            assert pending is not None
            pending.wait()
    ledger = Ledger.from_bytes((tmp_path / "run.json").read_bytes(), "run.json")
    assert [(entry.step, dict(entry.metrics)) for entry in ledger.entries] == [
        (s, {"loss": float(s)}) for s in (1, 2, 3)
    ]
