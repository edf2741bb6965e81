from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bcp
from bcp.backends import LocalBackend
from bcp.runtime.threads import in_thread
from bcp.state.guard import StepHold, _gate, torch_optimizers
from bcp.testing.storage_fakes import CountingBackend


class Brake:
    """Keeps parts from being copied until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.reached = threading.Event()

    async def __call__(self, item: Any) -> Any:
        self.reached.set()
        await in_thread(self.go.wait)
        return item

    @property
    def options(self) -> bcp.SaveOptions:
        return bcp.SaveOptions(edit=lambda graph: graph.before("d2h", bcp.extend.Stage("brake", self)))


@contextmanager
def stepping(optimizer: torch.optim.Optimizer) -> Iterator[threading.Thread]:
    """Step in another thread, as training would."""
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()


def until_waiting(optimizer: torch.optim.Optimizer, step: threading.Thread) -> None:
    while not _gate(optimizer).waiting:
        step.join(0.001)
        assert step.is_alive()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def trained() -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    return model, optimizer


def backward(model: nn.Module) -> None:
    model(torch.randn(32, 8)).square().mean().backward()


def copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def loaded(path: Path) -> tuple[Any, Any]:
    model, optimizer = trained()
    bcp.load(path, {"model": model, "optimizer": optimizer})
    return model.state_dict(), optimizer.state_dict()


def test_the_next_step_waits_until_everything_is_copied(tmp_path: Path) -> None:
    model, optimizer = trained()
    brake = Brake()
    before = copied(model.state_dict()), copied(optimizer.state_dict())
    states = {"model": model, "optimizer": optimizer}
    pending = bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy", options=brake.options)
    backward(model)  # changes running means and gradients, and neither parameters nor moments
    assert not model.norm.running_mean.equal(before[0]["norm.running_mean"])
    with stepping(optimizer) as step:
        assert brake.reached.wait(60)
        until_waiting(optimizer, step)
        step.join(0.2)
        assert step.is_alive()
        assert_same(copied(dict(model.named_parameters())), {n: before[0][n] for n, _ in model.named_parameters()})
        brake.go.set()
    report = pending.wait()
    assert not model.last.weight.equal(before[0]["last.weight"])
    assert report.step_wait_seconds >= 0.1
    assert report.step_wait_seconds <= report.seconds
    assert_same(loaded(tmp_path), before)


def test_an_eager_snapshot_holds_nothing_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    report = bcp.save(tmp_path, {"model": model, "optimizer": optimizer}, async_checkpoint=True).wait()
    optimizer.step()
    assert report.step_wait_seconds == 0.0


def test_values_are_those_of_the_call(tmp_path: Path) -> None:
    model, optimizer = trained()
    extra = {"step": [1, 2]}
    optimizer.param_groups[0]["note"] = ["at", "the", "call"]
    brake = Brake()
    states = {"model": model, "optimizer": optimizer, "extra_states": extra}
    pending = bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy", options=brake.options)
    optimizer.param_groups[0]["lr"] = 77.0
    optimizer.param_groups[0]["note"].append("later")
    extra["step"].append(3)
    brake.go.set()
    pending.wait()
    other, found = Net(), {"step": [0]}
    fresh = torch.optim.AdamW(other.parameters())
    fresh.param_groups[0]["note"] = []
    bcp.load(tmp_path, {"model": other, "optimizer": fresh, "extra_states": found})
    assert fresh.param_groups[0]["lr"] == 0.1
    assert fresh.param_groups[0]["note"] == ["at", "the", "call"]
    assert found["step"] == [1, 2]


def test_any_other_write_to_a_parameter_fails_the_save_and_not_the_older_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained()
    states = {"model": model, "optimizer": optimizer}
    bcp.save(tmp_path, states)
    before = copied(model.state_dict()), copied(optimizer.state_dict())
    brake = Brake()
    pending = bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy", overwrite=True, options=brake.options)
    with torch.no_grad():
        model.first.weight.add_(1)
    brake.go.set()
    with pytest.raises(bcp.StateChangedError, match=r"first\.weight"):
        pending.wait()
    optimizer.step()
    assert_same(loaded(tmp_path), before)


def test_parameters_of_other_optimizers_are_copied_at_once(tmp_path: Path) -> None:
    model, _ = trained()
    passed = torch.optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=0.1)
    other = torch.optim.SGD(model.last.parameters(), lr=0.1)
    before = copied(model.state_dict())
    brake = Brake()
    states = {"model": model, "optimizer": passed}
    pending = bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy", options=brake.options)
    other.step()  # is not held back
    assert not model.last.weight.equal(before["last.weight"])
    brake.go.set()
    pending.wait()
    fresh = Net()
    bcp.load(tmp_path, {"model": fresh})
    assert_same(copied(fresh.state_dict()), before)


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_steps_go_on_when_the_save(tmp_path: Path, how: str) -> None:
    model, optimizer = trained()
    begun = threading.Event()

    async def stop(item: Any) -> Any:
        begun.set()
        if how == "fails":
            raise OSError("no space left")
        await in_thread(threading.Event().wait, 1)
        return item

    options = bcp.SaveOptions(edit=lambda graph: graph.before("d2h", bcp.extend.Stage("stop", stop)))
    states = {"model": model, "optimizer": optimizer}
    pending = bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy", options=options)
    assert begun.wait(60)
    if how == "is cancelled":
        pending.cancel()
    with stepping(optimizer):
        pass
    with pytest.raises((bcp.StageError, BaseException), match=r"no space|cancelled"):
        pending.wait()


class Stuck(CountingBackend):
    """Cannot open files, and takes its time to clean up."""

    def __init__(self, root: Path) -> None:
        super().__init__(LocalBackend(root))
        self.failed, self.cleaning, self.go = False, threading.Event(), threading.Event()

    async def before(self, operation: str, key: str) -> None:
        await super().before(operation, key)
        if operation == "open_write":
            self.failed = True
            raise bcp.StorageError("the disk is gone")
        if self.failed:
            self.cleaning.set()
            await in_thread(self.go.wait)


def test_no_step_waits_for_a_failed_save_to_clean_up(tmp_path: Path) -> None:
    model, optimizer = trained()
    backend = Stuck(tmp_path)
    states = {"model": model, "optimizer": optimizer}
    pending = bcp.save(backend, states, async_checkpoint=True, snapshot="lazy")
    assert backend.cleaning.wait(60)
    with stepping(optimizer) as step:
        step.join(60)
        assert not step.is_alive()
    assert not pending.done()
    backend.go.set()
    with pytest.raises(bcp.StorageError, match="the disk is gone"):
        pending.wait()


def test_a_refused_save_holds_nothing_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    states = {"model": model, "optimizer": optimizer}
    bcp.save(tmp_path, states)
    pending = bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy")
    with pytest.raises(bcp.ExistsError):
        pending.wait()
    optimizer.step()


def test_two_snapshots_at_once_both_hold_the_step_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    before = copied(model.state_dict()), copied(optimizer.state_dict())
    states = {"model": model, "optimizer": optimizer}
    brakes = [Brake(), Brake()]
    pending = [
        bcp.save(tmp_path / str(n), states, async_checkpoint=True, snapshot="lazy", options=brake.options)
        for n, brake in enumerate(brakes)
    ]
    with stepping(optimizer) as step:
        brakes[0].go.set()
        pending[0].wait()
        step.join(0.1)
        assert step.is_alive()
        brakes[1].go.set()
    pending[1].wait()
    assert_same([loaded(tmp_path / str(n)) for n in (0, 1)], [before, before])


def test_with_little_staging_memory_the_step_waits_for_storage(tmp_path: Path) -> None:
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    before = copied(model.state_dict())
    options = bcp.SaveOptions(budget_bytes=1 << 20, part_bytes=1 << 20)
    states = {"model": model, "optimizer": optimizer}
    pending = bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy", options=options)
    model(torch.randn(4, 1024)).sum().backward()
    optimizer.step()
    pending.wait()
    fresh = nn.Linear(1024, 1024)
    bcp.load(tmp_path, {"model": fresh})
    assert_same(copied(fresh.state_dict()), before)


@pytest.mark.anyio
async def test_from_a_coroutine(tmp_path: Path) -> None:
    model, optimizer = trained()
    before = copied(model.state_dict()), copied(optimizer.state_dict())
    states = {"model": model, "optimizer": optimizer}
    pending = await bcp.asave(tmp_path, states, async_checkpoint=True, snapshot="lazy")
    optimizer.step()  # blocks this loop until everything is copied, which another loop does
    await pending
    assert_same(await in_thread(loaded, tmp_path), before)


class Wrapper:
    """What Accelerate, DeepSpeed and Megatron-LM make of an optimizer."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


class Chained:
    def __init__(self, *optimizers: object) -> None:
        self.chained_optimizers = list(optimizers)


class Stub:
    optimizer = None
    is_stub_optimizer = True


def test_optimizers_are_found_in_wrappers_and_containers() -> None:
    one, two = (torch.optim.SGD(nn.Linear(2, 2).parameters()) for _ in range(2))
    assert torch_optimizers(one) == ([one], False)
    assert torch_optimizers([one, two]) == ([one, two], False)
    assert torch_optimizers({"a": one, "b": two}) == ([one, two], False)
    assert torch_optimizers(Wrapper(one)) == ([one], True)
    assert torch_optimizers(Chained(Wrapper(one), Stub(), Wrapper(two))) == ([one, two], True)


@pytest.mark.parametrize("given", [{}, {"state": {}, "param_groups": []}, object(), Wrapper(None), {"lr": 0.1}])
def test_what_cannot_be_held_back_is_refused_before_anything_is_written(tmp_path: Path, given: object) -> None:
    with pytest.raises(bcp.InputError, match=r"snapshot='eager'|optimizer"):
        bcp.save(tmp_path / "c", {"model": Net(), "optimizer": given}, async_checkpoint=True, snapshot="lazy")
    assert not (tmp_path / "c").exists()


def test_lazy_needs_an_optimizer_a_background_and_steps_with_hooks(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.raises(bcp.InputError, match=r"states\['optimizer'\]"):
        bcp.save(tmp_path, {"model": model}, async_checkpoint=True, snapshot="lazy")
    with pytest.raises(bcp.InputError, match="async_checkpoint=True"):
        bcp.save(tmp_path, {"model": model, "optimizer": optimizer}, snapshot="lazy")
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(bcp.InputError, match="capturable"):
        bcp.save(tmp_path, {"model": model, "optimizer": optimizer}, async_checkpoint=True, snapshot="lazy")
    with pytest.raises(bcp.InputError, match="snapshot='late'"):
        bcp.SaveOptions(snapshot="late")  # type: ignore[arg-type]  # that is the point


def test_a_hold_is_released_once_and_says_how_it_stands() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    one, two = StepHold([optimizer]), StepHold([optimizer])
    assert "1 held" in repr(one)
    one.release()
    one.release()
    assert "0 held" in repr(one)
    with stepping(optimizer) as step:
        until_waiting(optimizer, step)
        two.release()
    assert two.waited_seconds > 0
    assert len(optimizer._optimizer_step_pre_hooks) == 1
