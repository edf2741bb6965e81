"""A checkpoint of one optimizer, loaded into one of another class."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import exactly_alike
from samples import sample
from torch import nn

import bcp

Make = Callable[[Any], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """An optimizer that bcp does not know."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # a stand-in without a closure
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                moment.lerp_(parameter.grad, 1 - group["betas"][1])
                parameter.add_(moment.sign(), alpha=-group["lr"])


class FusedAdam(torch.optim.Optimizer):
    """As Apex's: it counts its steps in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # a stand-in without a closure
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 0.001)
                parameter.add_(state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"]), alpha=-group["lr"])


class Inheriting(torch.optim.AdamW):
    """Takes the step of AdamW."""


KINDS: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.125),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": lambda params: torch.optim.AdamW(params, amsgrad=True, foreach=False),
    "NAdam": torch.optim.NAdam,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9),
    "Adadelta": torch.optim.Adadelta,
    "Lion": Lion,
    "FusedAdam": FusedAdam,
    "Inheriting": Inheriting,
}
ALIKE = ({"SGD", "momentum"}, {"Adam", "AdamW", "FusedAdam", "Inheriting"})
PAIRS = [
    (first, second)
    for first, second in itertools.product(KINDS, KINDS)
    if first != second and not any({first, second} <= group for group in ALIKE)
]


def made(kind: str, *, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = KINDS[kind](model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save(path: Path, kind: str) -> None:
    model, optimizer = made(kind, steps=2)
    bcp.save(path, {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize(("first", "second"), sample(PAIRS, *PAIRS[::4]))
def test_another_optimizer_is_refused_and_nothing_is_written(tmp_path: Path, first: str, second: str) -> None:
    save(tmp_path, first)
    model, optimizer = made(second)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    with pytest.raises(bcp.MismatchError, match=r"optimizer: (state|param_groups)\.(weight|bias)\.") as caught:
        bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
    assert type(optimizer).__name__ in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not optimizer.state
    assert groups == [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]


@pytest.mark.parametrize("steps", [0, 2], ids=["new", "stepped"])
@pytest.mark.parametrize(("first", "second"), sample(PAIRS[::3], *PAIRS[::6]))
def test_without_strict_another_optimizer_gets_nothing_and_the_report_lists_it(
    tmp_path: Path, first: str, second: str, steps: int
) -> None:
    save(tmp_path, first)
    model, optimizer = made(second, steps=steps)
    before = copy.deepcopy(optimizer.state_dict())
    report = bcp.load(tmp_path, {"model": model, "optimizer": optimizer}, strict=False)
    assert exactly_alike(optimizer.state_dict(), before)
    saved = made(first, steps=2)[1]
    left_out = {
        f"optimizer: param_groups.weight.{key}" for key in saved.param_groups[0] if key not in ("params", "step")
    }
    left_out |= {f"optimizer: state.weight.{key}" for key in next(iter(saved.state.values()), {})}
    assert left_out <= set(report.unexpected)
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("steps", [0, 2], ids=["new", "stepped"])
@pytest.mark.parametrize("kind", sample(KINDS, *list(KINDS)[::2]))
def test_lbfgs_is_another_optimizer_than_all_others(tmp_path: Path, kind: str, steps: int) -> None:
    def closure() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 8)).square().sum()
        loss.backward()
        return loss

    model, other = made(kind, steps=steps)
    lbfgs = torch.optim.LBFGS(model.parameters(), history_size=3)
    lbfgs.step(closure)
    for saved, target in ((lbfgs, other), (other, lbfgs)):
        bcp.save(tmp_path, {"model": model, "optimizer": saved}, overwrite=True)
        before = copy.deepcopy(target.state_dict())
        with pytest.raises(bcp.MismatchError, match=f"that {type(target).__name__} cannot take"):
            bcp.load(tmp_path, {"model": model, "optimizer": target})
        bcp.load(tmp_path, {"model": model, "optimizer": target}, strict=False)
        assert exactly_alike(target.state_dict(), before)


@pytest.mark.parametrize("group", ALIKE, ids=["SGD", "Adam"])
def test_kinds_with_the_same_states_load_into_each_other(tmp_path: Path, group: set[str]) -> None:
    for first, second in itertools.product(sorted(group), sorted(group)):
        path = tmp_path / f"{first}-{second}"
        save(path, first)
        model, optimizer = made(second)
        report = bcp.load(path, {"model": model, "optimizer": optimizer})
        assert not report.unexpected
        _, wanted = made(first, steps=2)
        for state, other in zip(optimizer.state.values(), wanted.state.values(), strict=False):
            assert state.keys() - {"step"} == {key for key, value in other.items() if value is not None} - {"step"}
            assert all(torch.equal(state[key], other[key]) for key in state.keys() - {"step"})


@pytest.mark.parametrize("own", ["ema", "sum", "mu"])
@pytest.mark.parametrize("steps", [0, 1])
def test_other_states_are_somebodys_own(tmp_path: Path, steps: int, own: str) -> None:
    model, optimizer = made("AdamW", steps=1)
    for parameter in model.parameters():
        optimizer.state[parameter][own] = parameter.detach().clone()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, fresh = made("AdamW", steps=steps)
    for parameter in other.parameters() if steps else ():
        fresh.state[parameter][own] = torch.zeros_like(parameter)
    bcp.load(tmp_path, {"model": other, "optimizer": fresh})
    for old, new in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(fresh.state[new][own], optimizer.state[old][own])
