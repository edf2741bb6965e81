"""A training whose state at each step is known without it: all layouts have the same values, bit by bit.

Each element gets a gradient that depends on its place and the step alone. Learning rate and momentum are powers of two.
So each product is exact, each sum is rounded once, and shards have the bits of the whole. :func:`truth` does the same
in numpy, from step 0 on, and knows nothing of torch and bcp.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["SHAPES", "Layout", "difference", "make_states", "train", "truth"]

Layout = Literal["fsdp", "hsdp", "replicas"]
Whole = npt.NDArray[np.float32]

SHAPES = {"0.weight": (509, 256), "0.bias": (509,), "1.weight": (13, 509), "1.bias": (13,)}
RATE, MOMENTUM = 0.125, 0.5
PERIOD = 101
GRADIENTS = ((np.arange(2 * PERIOD) % PERIOD - PERIOD // 2) / 64).astype(np.float32)
"""Twice all values of a gradient's elements."""


def _first(name: str) -> Whole:
    """Return the values of a parameter before the first step."""
    places = np.arange(np.prod(SHAPES[name])) * 13 + [*SHAPES].index(name)
    return ((places % 97 - 48) / 32).astype(np.float32).reshape(SHAPES[name])


@cache
def _places(name: str) -> npt.NDArray[np.int64]:
    places = np.arange(np.prod(SHAPES[name])) * 31 + [*SHAPES].index(name) * 7
    return (places % PERIOD).reshape(SHAPES[name])


def _gradient(name: str, step: int) -> Whole:
    gradient: Whole = GRADIENTS[_places(name) + step * 17 % PERIOD]
    return gradient


def truth(step: int) -> dict[str, tuple[Whole, Whole]]:
    """Return parameters and momenta behind a step, from 1 on, by name."""
    found = {}
    for name, shape in SHAPES.items():
        value, momentum = _first(name), np.zeros(shape, np.float32)
        for each in range(1, step + 1):
            momentum = momentum * np.float32(MOMENTUM) + _gradient(name, each)
            value = value - momentum * np.float32(RATE)
        found[name] = value, momentum
    return found


def make_states(layout: Layout, per_host: int) -> dict[str, Any]:
    """Return the states of a rank before the first step."""
    model = nn.Sequential(nn.Linear(256, 509), nn.Linear(509, 13))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_first(name)))
    if layout == "fsdp":
        fully_shard(model)
    elif layout == "hsdp":
        hosts = dist.get_world_size() // per_host
        fully_shard(model, mesh=init_device_mesh("cpu", (hosts, per_host), mesh_dim_names=("copies", "shards")))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, foreach=False)
    return {"model": model, "optimizer": optimizer, "extra_states": {"step": 0}}


def train(states: Mapping[str, Any], step: int) -> None:
    """Train one step, as all ranks do."""
    for name, parameter in states["model"].named_parameters():
        gradient = _local(parameter, _gradient(name, step))
        if isinstance(parameter, DTensor):
            mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
            gradient = DTensor.from_local(
                gradient, mesh, placements, run_check=False, shape=shape, stride=parameter.stride()
            )
        parameter.grad = gradient
    states["optimizer"].step()
    states["extra_states"]["step"] = step
    dist.barrier()


def difference(states: Mapping[str, Any], step: int) -> str:
    """Say which tensor of this rank is not the one of a step; empty for none."""
    if states["extra_states"]["step"] != step:
        return f"the step in extra_states is {states['extra_states']['step']}"
    true = truth(step)
    for name, parameter in states["model"].named_parameters():
        momentum = states["optimizer"].state[parameter]["momentum_buffer"]
        for what, tensor, whole in zip(("", "momentum of "), (parameter, momentum), true[name], strict=True):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if not torch.equal(local, _local(tensor, whole)):
                return f"{what}{name} has other values"
    return ""


def _local(tensor: Tensor, whole: Whole) -> Tensor:
    """Return the part of a whole tensor that this rank has of a tensor in its layout."""
    part = torch.from_numpy(whole)
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
            part = part.narrow(dim, min(start, part.shape[dim]), length)
    return part.clone()
