"""State dicts for torch.distributed.checkpoint, empty copies of them, and their full tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def trained(layout: str = "plain", *, seed: int = 0, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of a parallel layout, and an optimizer of two groups that has made some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6))
    model.register_buffer("seen", torch.tensor(seed))
    _placed(model, layout)
    groups = [
        {"params": list(model[0].parameters()), "lr": 1e-2 + seed / 100},
        {"params": list(model[2].parameters()), "lr": 1e-3, "weight_decay": 0.0, "betas": (0.8, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(steps):
        model(torch.ones(4, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _placed(model: nn.Sequential, layout: str) -> None:
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "fsdp_tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, flat: bool, key: str = "optim") -> dict[str, Any]:
    """Return what users of DCP save."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, key: optimizer_state}


def emptied(state: Any) -> Any:
    """Return a state dict of the same structure, with zeros and None."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state, memory_format=torch.contiguous_format)
    if isinstance(state, Mapping):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(part, (torch.Tensor, Mapping, list)) for part in state):
        return [emptied(part) for part in state]
    return None


def full(state: Any) -> Any:
    """Return a state dict with plain tensors of global shapes, and dicts of type dict."""
    if isinstance(state, DTensor):
        return state.full_tensor().detach().clone()
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: full(value) for key, value in state.items()}
    return [full(part) for part in state] if isinstance(state, list) else state
