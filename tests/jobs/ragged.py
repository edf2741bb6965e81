"""veScale's ragged DTensors as a planner sees them, and what ranks do with a model that is made of them.

Nothing of veScale is here: the classes have the attributes of its own (commit 20cf5c71), and where theirs end the
process on a current torch, these raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from exact import ADAMW, Exact, batch
from layouts import mesh_of
from silent import load_in_place, save
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_map_only

import bcp
from bcp.planners import planner


class CrashedError(AssertionError):
    """The real class would have ended the process."""


def _crash(self: object, *_: object) -> NoReturn:
    raise CrashedError(type(self).__name__)


class RaggedShard:
    """The attributes of veScale's placement; whatever would reach torch's C++ base raises, ``isinstance`` included."""

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        self.dims, self.local_units = tuple(dims), tuple(local_units)

    __eq__ = __ne__ = __hash__ = __repr__ = __str__ = __reduce_ex__ = _crash
    is_shard = is_replicate = is_partial = is_ragged_shard = _crash
    __class__ = property(_crash)  # what isinstance() asks for where the type is not the right one


class _StridedRaggedShard(RaggedShard):
    def __init__(self, dims: Sequence[int], local_units: Sequence[int], split_factor: int) -> None:
        super().__init__(dims, local_units)
        self.split_factor = split_factor


StridedRaggedShard = _StridedRaggedShard


@dataclass(frozen=True, eq=False)
class Uninitialised(Placement):
    """Made as veScale makes its own, without torch's C++ base being initialised: ``is_replicate()`` is a segfault."""

    dims: tuple[int, ...]
    local_units: tuple[int, ...]


class Shard:
    """A placement that is not torch's, but goes by the same name; nothing but its attribute is asked for."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    __eq__ = __hash__ = _crash


class Mesh:
    """What a planner asks a device mesh, without processes."""

    def __init__(self, shape: Sequence[int], coordinate: Sequence[int] | None) -> None:
        self.shape, self._coordinate = tuple(shape), None if coordinate is None else list(coordinate)

    def get_coordinate(self) -> list[int] | None:
        return self._coordinate


class RaggedDTensor(torch.Tensor):
    """Looks like a DTensor, is none of torch's, and computes element by element on its local tensor."""

    _local_tensor: torch.Tensor
    device_mesh: Any
    placements: tuple[Any, ...]

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Self:
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        made = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=local.dtype, device=local.device)
        made._local_tensor, made.device_mesh, made.placements = local, mesh, tuple(placements)
        return made

    __repr__ = _crash

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        out = func(*tree_map_only(cls, _local, args), **tree_map_only(cls, _local, kwargs or {}))
        if out is _local(first):
            return first
        return cls(out, first.shape, first.device_mesh, first.placements) if isinstance(out, torch.Tensor) else out


def _local(tensor: RaggedDTensor) -> torch.Tensor:
    return tensor._local_tensor


def cut(whole: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
    """Return this rank's 1-D part of a tensor, as veScale cuts it: the other placements first, then flat memory."""
    coordinate = mesh.get_coordinate()
    ragged = next(at for at, placement in enumerate(placements) if hasattr(placement, "local_units"))
    for at, placement in enumerate(placements):
        if hasattr(placement, "dim"):
            parts = whole.chunk(mesh.shape[at], placement.dim)
            empty = parts[0].narrow(placement.dim, 0, 0)
            whole = parts[coordinate[at]] if coordinate[at] < len(parts) else empty
    units, flat = placements[ragged].local_units, whole.reshape(-1)
    if not placements[ragged].dims:
        return flat.clone() if units[coordinate[ragged]] else flat[:0].clone()
    unit = len(flat) // sum(units)
    parts = flat[: unit * sum(units)].split([unit * count for count in units])
    return parts[coordinate[ragged]].clone()


def ragged(whole: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> RaggedDTensor:
    """Return a ragged DTensor of those values."""
    return RaggedDTensor(cut(whole.detach(), mesh, placements), whole.shape, mesh, placements)


def plan_uninitialised() -> tuple[str, list[int]]:
    """Plan a model and an optimizer; return the planner's name and how many elements there are of each tensor."""
    net = nn.Module()
    net.w = net.v = nn.Parameter(ragged(torch.ones(6, 4), Mesh((2,), (0,)), [Uninitialised((0,), (1, 2))]))
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    net.w.grad = torch.ones_like(net.w)
    optimizer.step()
    states = {"model": net, "optimizer": optimizer}
    made = planner(None, states)
    return made.name, [view.numel() for view in made.local_shards(states).tensors]


# -- on the ranks of ranks4 ------------------------------------------------------------------------

STEPS = 2


def _placements(shape: torch.Size, index: int, how: str) -> list[Any]:
    """Choose a layout: other ones for "other", on the same four ranks."""
    rows, numel = shape[0] if shape else 1, math.prod(shape)
    if how == "tp":  # a mesh of 2 x 2
        every, half = tuple(range(len(shape))), numel // 2
        if len(shape) == 2 and shape[1] % 2 == 0:
            return [RaggedShard(every, (1, half - 1)), Shard(1)]
        if rows % 2 == 0:
            return [StridedRaggedShard(every, (1, half - 1), 2), Shard(0)]
        return [RaggedShard(every, (1, numel - 1)), torch.distributed.tensor.Replicate()]
    dims: tuple[int, ...] = tuple(range(len(shape)))
    if numel < 4 or index % 4 == 3:
        dims, units = (), tuple(int(rank == (index + (how == "other")) % 4) for rank in range(4))
    elif index % 4 == 0 and rows > 3:
        dims, units = (0,), (1, 0, rows - 3, 2)
    elif how == "other":
        units = (numel - 3, 1, 1, 1)
    else:
        units = (0, numel // 3, 2, numel - numel // 3 - 2)
    return [RaggedShard(dims, units)]


def mesh_for(how: str) -> DeviceMesh:
    return mesh_of((2, 2) if how == "tp" else (4,))


def make_ragged(model: nn.Module, how: str) -> nn.Module:
    """Replace every parameter by a ragged one; tied ones stay tied."""
    mesh, made = mesh_for(how), {}
    for index, parameter in enumerate(model.parameters()):
        made[id(parameter)] = nn.Parameter(ragged(parameter, mesh, _placements(parameter.shape, index, how)))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
    return model


def step_ragged(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Take a step with the gradients of all ranks, which a whole model gives: they do not depend on weights."""
    whole = Exact()
    rows = torch.cat([batch(step, rank) for rank in range(dist.get_world_size())])
    (whole(rows) / dist.get_world_size()).backward()
    for sharded, plain in zip(model.parameters(), whole.parameters(), strict=True):
        sharded.grad = ragged(plain.grad, sharded.device_mesh, sharded.placements)
    optimizer.step()
    model.steps += 1


def built(how: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer without states; ``how``: ragged, other, tp."""
    model = make_ragged(Exact(seed), how)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def train_and_save(how: str, path: Path) -> None:
    model, optimizer = built(how)
    for step in range(STEPS):
        step_ragged(model, optimizer, step)
    bcp.save(path, {"model": model, "optimizer": optimizer})


def load_and_save(how: str, path: Path, again: Path, after: Path) -> float:
    """Load into a model of other weights, save that, and once more after a step; return the learning rate."""
    model, optimizer = built(how, seed=9)
    optimizer.param_groups[0]["lr"] = 0.5
    states = {"model": model, "optimizer": optimizer}
    load_in_place(path, states, model.parameters())
    assert all(state["exp_avg"].placements == p.placements for p, state in optimizer.state.items())
    save(again, states)
    step_ragged(model, optimizer, STEPS)
    save(after, states)
    return optimizer.param_groups[0]["lr"]
