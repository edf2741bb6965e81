"""What every rank does with a folder of another library."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bcp


def fully_sharded(path: Path) -> dict[str, torch.Tensor]:
    """Load into a model and an optimizer under FSDP2, and return all states whole."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    bcp.load(path, {"model": model, "optimizer": optimizer})
    states = {f"model: {name}": _whole(parameter.detach()) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            states[f"optimizer: state.{name}.{key}"] = _whole(value)
    return states


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
