"""Recipes for classes that need more than parameters and a learning rate, and reasons for those that cannot run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from coverage_table import Key
from optimizer_trial import Recipe, matrices, with_closure
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer, _NamedOptimizer

NOT_TRIED: dict[Key, str] = {
    ("grokadamw", "GrokAdamW"): "its state_dict() has tensors as keys, which cannot be compared",
}


def sparsely(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Take a step with sparse gradients."""
    optimizer.zero_grad()
    loss().backward()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.grad.to_sparse()
    optimizer.step()


def averaged(model: nn.Module) -> Any:
    """Return a local optimizer with an average of parameters every second step."""
    local = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return PostLocalSGDOptimizer(local, PeriodicModelAverager(period=2, warmup_steps=1))


def zero(model: nn.Module) -> Any:
    """Return ZeRO-1 of one rank."""
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


def consolidated(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Take a step, and let ZeRO gather its state, which its ``state_dict`` needs."""
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    optimizer.consolidate_state_dict()


def without_zero_grad(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Take a step of ``_NamedOptimizer``, whose ``zero_grad()`` raises with this torch."""
    for parameter in optimizer.named_parameters.values():
        parameter.grad = None
    loss().backward()
    optimizer.step()


RECIPES: dict[Key, Recipe] = {
    ("torch.optim", "LBFGS"): Recipe(torch.optim.LBFGS, step=with_closure),
    ("torch.optim", "Muon"): Recipe(torch.optim.Muon, params=matrices),
    ("torch.optim", "SparseAdam"): Recipe(torch.optim.SparseAdam, step=sparsely),
    ("torch.distributed.optim", "PostLocalSGDOptimizer"): Recipe(PostLocalSGDOptimizer, of=averaged, group=True),
    ("torch.distributed.optim", "ZeroRedundancyOptimizer"): Recipe(
        ZeroRedundancyOptimizer, of=zero, step=consolidated, group=True
    ),
    ("torch.distributed.optim", "_NamedOptimizer"): Recipe(
        _NamedOptimizer,
        of=lambda model: _NamedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=1e-2),
        step=without_zero_grad,
    ),
}
