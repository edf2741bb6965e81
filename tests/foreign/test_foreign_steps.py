"""Step counts that files have as numbers, as torch wrote them before 1.12: loaded as torch's own load does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bcp
from bcp.state.step_numbers import has_tensor_steps


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(steps)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.125)
    for _ in range(steps):
        net(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


@pytest.mark.parametrize("number", [3, 3.0])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_number_becomes_a_tensor(tmp_path: Path, steps: int, number: float) -> None:
    source, optimizer = trained(3)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = number
    torch.save({"model": source.state_dict(), "optimizer": saved}, tmp_path / "old.pt")
    (net, mine), (other, by_torch) = trained(steps), trained(steps)
    bcp.load(tmp_path / "old.pt", {"model": net, "optimizer": mine})
    other.load_state_dict(source.state_dict())
    by_torch.load_state_dict(saved)
    for _ in range(2):
        for one, two in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
            for key, value in by_torch.state[two].items():
                assert mine.state[one][key].dtype == value.dtype
                assert torch.equal(mine.state[one][key], value)
        for model, updating in ((net, mine), (other, by_torch)):
            model(torch.ones(4, 3)).square().sum().backward()
            updating.step()


def test_the_classes_are_those_of_torch_with_tensors() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    for kind in kinds:
        if kind in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon):
            continue
        weight.grad = torch.ones(2)
        optimizer = kind([weight], lr=0.125)
        optimizer.step()
        assert has_tensor_steps(kind) == isinstance(optimizer.state[weight].get("step"), torch.Tensor), kind
