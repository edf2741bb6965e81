from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from lazy_jobs import Brake
from logical import logical
from torch import nn, optim
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import bcp
from bcp._save.snapshot import OptimizerOwnedMemory
from bcp.state import guard as steps
from bcp.state.guard import StepHold, torch_optimizers


@contextmanager
def saving(path: Path, model: nn.Module, optimizer: object) -> Iterator[Brake]:
    """Save lazily; nothing is copied in the background while the block runs."""
    brake = Brake()
    states = {"model": model, "optimizer": optimizer}
    pending = bcp.save(path, states, async_checkpoint=True, snapshot="lazy", options=brake.options)
    yield brake
    brake.go()
    pending.wait()


@contextmanager
def stepping(step: Any) -> Iterator[threading.Thread]:
    """Step in another thread, as training would."""
    thread = threading.Thread(target=step)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()


def assert_waiting(optimizer: optim.Optimizer, step: threading.Thread) -> None:
    while not steps._gate(optimizer).waiting:
        step.join(0.001)
        assert step.is_alive()


def assert_saved(path: Path, name: tuple[str, str], value: torch.Tensor) -> None:
    torch.testing.assert_close(logical(path)[name], value, rtol=0, atol=0)


def stepped(model: nn.Module, kind: type[optim.Optimizer] = optim.SGD, **how: Any) -> optim.Optimizer:
    """Return an optimizer for which there are gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return kind(model.parameters(), **{"lr": 0.1, **how})


class Codebook(nn.Module):
    """Learns in the forward pass, without a gradient, and in a way that torch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x)
        self.codes.data.mul_(0.5).add_(out.detach().mean(0))
        return out + self.codes


def test_frozen_parameters_that_a_forward_pass_changes_are_those_of_the_call(tmp_path: Path) -> None:
    model = Codebook()
    optimizer = optim.SGD(model.first.parameters(), lr=0.1)
    with saving(tmp_path, model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        assert not torch.equal(model.codes, torch.ones(4))
    assert_saved(tmp_path, ("model", "codes"), torch.ones(4))


def test_a_learning_rate_that_is_a_tensor_is_that_of_the_call(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = stepped(model, optim.AdamW, lr=torch.tensor(0.5))
    schedule = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    with saving(tmp_path, model, optimizer):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert_saved(tmp_path, ("optimizer", "param_groups.weight.lr"), torch.tensor(0.5))


class Flat(nn.Module):
    """Has two parameters side by side in one storage, as FSDP1 does."""

    def __init__(self) -> None:
        super().__init__()
        row = torch.zeros(20)
        self.mine, self.others = nn.Parameter(torch.empty(10)), nn.Parameter(torch.empty(10))
        self.mine.data, self.others.data = row[:10], row[10:]


def test_a_parameter_of_another_optimizer_is_copied_at_once_also_beside_one_that_is_held(tmp_path: Path) -> None:
    model = Flat()
    other = stepped(model)
    with saving(tmp_path, model, optim.SGD([model.mine], lr=0.1)):
        other.param_groups[0]["params"].remove(model.mine)
        other.step()
        assert model.others.detach().any()
    assert_saved(tmp_path, ("model", "others"), torch.zeros(10))


class Accelerated(optim.Optimizer):
    """What Accelerate makes of an optimizer: one in name, without hooks."""

    def __init__(self, optimizer: optim.Optimizer) -> None:  # which does not initialise the rest
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, _: object = None) -> None:
        self.optimizer.step()


def test_a_wrapper_that_is_an_optimizer_in_name_only_is_looked_into(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    wrapper, other = Accelerated(stepped(model[0])), stepped(model[1])
    before = [part.weight.detach().clone() for part in model]
    with saving(tmp_path, model, wrapper) as brake:
        other.step()
        with stepping(wrapper.step) as step:
            assert_waiting(wrapper.optimizer, step)
            brake.go()
    assert_saved(tmp_path, ("model", "0.weight"), before[0])
    assert_saved(tmp_path, ("model", "1.weight"), before[1])
    assert not any(torch.equal(part.weight, old) for part, old in zip(model, before, strict=True))


class Container(torch.optim.Optimizer):
    """An optimizer of torch's kind around another one, whose caller steps the inner one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_a_step_of_an_optimizer_inside_of_another_one_is_held(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    container = Container(stepped(model))
    before = model.weight.detach().clone()
    with saving(tmp_path, model, container) as brake, stepping(container.inner.step) as step:
        assert_waiting(container.inner, step)
        brake.go()
    assert_saved(tmp_path, ("model", "weight"), before)
    assert not torch.equal(model.weight, before)


def test_hooks_of_others_wait_as_well(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = stepped(model)
    before = model.weight.detach().clone()

    def clear(*_: object) -> None:
        model.weight.data.zero_()

    optimizer.register_step_pre_hook(clear)
    with saving(tmp_path, model, optimizer) as brake, stepping(optimizer.step) as step:
        assert_waiting(optimizer, step)
        assert torch.equal(model.weight, before)
        brake.go()
    assert torch.equal(model.weight, torch.full((2, 2), -0.1))
    assert_saved(tmp_path, ("model", "weight"), before)


def test_a_value_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = stepped(model)
    optimizer.param_groups[0]["group"] = threading.Lock()
    states = {"model": model, "optimizer": optimizer}
    with pytest.raises(bcp.StateError, match=r"param_groups\.\w+\.group"):
        bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy").wait()
    optimizer.step()


class Wrapper:
    """What DeepSpeed and Megatron-LM make of an optimizer."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


class Nothing:
    """What Megatron-LM makes of no optimizers."""

    chained_optimizers = ()
    is_stub_optimizer = True

    @property
    def optimizer(self) -> None:
        raise AssertionError


def test_a_chain_of_nothing_holds_nothing() -> None:
    assert torch_optimizers(Nothing()) == ([], False)


def test_what_changes_before_the_step_begins_is_refused() -> None:
    muon = type("MuonWithAuxAdam", (optim.SGD,), {})(nn.Linear(2, 2).parameters(), lr=0.1)
    assert torch_optimizers(muon) == ([muon], False)
    with pytest.raises(bcp.InputError, match="DeepSpeed changes before its step begins"):
        torch_optimizers(Wrapper(muon))


def test_a_snapshot_counts_the_waiting_for_itself() -> None:
    optimizer = stepped(nn.Linear(2, 2))
    one, two = StepHold([optimizer]), StepHold([optimizer])
    with stepping(optimizer.step) as step:
        assert_waiting(optimizer, step)
        one.release()
        waited = one.waited_seconds
        two.release()
    assert 0 < waited == one.waited_seconds < two.waited_seconds


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_steps_are_held() -> None:
    model = nn.Linear(2, 2)
    optimizer = stepped(model, optim.AdamW, lr=torch.tensor(0.1))
    step = torch.compile(optimizer.step, backend="eager")
    step()
    before = model.weight.detach().clone()
    hold = StepHold([optimizer])
    with stepping(step) as thread:
        assert_waiting(optimizer, thread)
        assert torch.equal(model.weight, before)
        hold.release()
    assert not torch.equal(model.weight, before)


def test_memory_is_steady_if_all_of_it_is_stepped() -> None:
    row = torch.zeros(6, 10)
    left, right, rest = row[:2], row[2:4], row[4:]
    steady = OptimizerOwnedMemory(None, [optim.SGD([left.requires_grad_(), right.requires_grad_()])], wrapped=False)
    assert "160 bytes in 1 stretch" in repr(steady)
    assert all(part in steady for part in (left, right[1], row[1:3], row[:4, 3:5], row[:4].t()))
    assert not any(part in steady for part in (rest, row[3:5], row[:5, 3:5], row, torch.zeros(2)))
    assert torch.zeros(0) not in steady
    assert LocalShardsWrapper([left.detach()], [(0, 0)]) not in steady


def test_a_wrapper_that_steps_copies_steps_the_model() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(requires_grad=False)
    other = nn.Linear(2, 2)
    copies = optim.SGD([model.weight.detach().clone().requires_grad_()])
    for optimizers in ([copies], [optim.SGD([{"params": []}])]):
        steady = OptimizerOwnedMemory([model, {"b": other}], optimizers, wrapped=True)
        assert [p in steady for p in (*model.parameters(), *other.parameters())] == [True, False, True, True]
    own = OptimizerOwnedMemory([model, {"b": other}], [optim.SGD(model.parameters())], wrapped=True)
    assert [p in own for p in (*model.parameters(), *other.parameters())] == [True, True, False, False]


def test_frozen_parameters_are_copied_at_once_though_an_optimizer_lists_them(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    model.weight.requires_grad_(requires_grad=False)
    wanted = model.weight.clone()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with saving(tmp_path, model, optimizer):
        model.weight.data.fill_(7.0)  # as a forward pass may
    assert_saved(tmp_path, ("model", "weight"), wanted)


def test_memory_that_is_replaced_in_place_fails_the_save(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    match = "memory of model tensor '(weight|bias)' was replaced while its snapshot was being taken"
    with pytest.raises(bcp.StateChangedError, match=match), saving(tmp_path, model, optimizer):
        model.share_memory()
    assert not (tmp_path / "metadata.arrow").exists()


FORKED = """
import os
import torch
from bcp.state.guard import StepHold

parameter = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([parameter], lr=0.1)
hold = StepHold([optimizer])
child = os.fork()
if child == 0:
    optimizer.step()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert "1 held" in repr(hold)
"""


def test_a_forked_child_is_not_held_back() -> None:
    run_forked([sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED], timeout=240).check_returncode()
