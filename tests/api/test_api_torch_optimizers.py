"""Optimizers of torch whose state is not as that of most others: steps as ints, and a wrapper with a counter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import alike_in_any_order
from torch import distributed as dist
from torch import nn, optim

import bcp


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(8, 4, sparse=True)

    def forward(self) -> torch.Tensor:
        return self.bag(torch.tensor([[1, 5], [5, 2]])).square().sum()


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self) -> torch.Tensor:
        return self.linear(torch.ones(4)).square().sum()


def averaged(parameters: Any) -> Any:
    """Return torch's wrapper for local SGD, which averages at every second step from the third on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager  # noqa: PLC0415
        from torch.distributed.optim import PostLocalSGDOptimizer  # noqa: PLC0415
    return PostLocalSGDOptimizer(optim.AdamW(parameters, lr=1e-2), PeriodicModelAverager(period=2, warmup_steps=2))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    """Make this process a group of one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize(
    ("kind", "make"), [(Bag, optim.SparseAdam), (Dense, averaged)], ids=["SparseAdam", "PostLocalSGD"]
)
def test_training_goes_on_as_with_torchs_own_state_dict(
    tmp_path: Path,
    kind: type[nn.Module],
    make: Callable[[Any], Any],
    used: bool,  # noqa: FBT001 -- a parameter
) -> None:
    model, control, target = kind(), kind(), kind()
    optimizer, of_control, of_target = (make(each.parameters()) for each in (model, control, target))
    train(model, optimizer, 3)
    for each, of_each in ((control, of_control), (target, of_target)):
        train(each, of_each, int(used))
    bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path / "c", {"model": target, "optimizer": of_target})
    control.load_state_dict(model.state_dict())
    of_control.load_state_dict(optimizer.state_dict())
    assert alike_in_any_order(of_target.state_dict(), of_control.state_dict())
    for each, of_each in ((control, of_control), (target, of_target)):
        train(each, of_each, 3)
    assert alike_in_any_order(dict(target.state_dict()), dict(control.state_dict()))
    assert alike_in_any_order(of_target.state_dict(), of_control.state_dict())
