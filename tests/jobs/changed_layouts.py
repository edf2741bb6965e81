"""What one rank of ``ranks4`` does to save again and again, with a layout that changes between saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from layouts import mesh_of, same_bits, shard, values
from torch import distributed as dist
from torch.distributed.tensor import DTensor

import bcp

State = dict[str, torch.Tensor]


def _base(mesh: tuple[int, ...] = (4,), placements: tuple[str, ...] = ("S0",), dtype: str = "float32") -> State:
    return {"w": shard(values(0, (12, 8), dtype), mesh, placements), "b": values(1, (8,), "float32").clone()}


def _more_on_rank_2() -> State:
    return _base() | ({"lora": values(2, (5,), "float32").clone()} if dist.get_rank() == 2 else {})


CHANGES: dict[str, Callable[[], State]] = {
    "nothing": _base,
    "new parameter": lambda: _base() | {"v": shard(values(3, (8, 4), "float32"), (4,), ("S1",))},
    "one parameter less": lambda: {"w": _base()["w"]},
    "other mesh": lambda: _base((2, 2), ("R", "S0")),
    "other placement": lambda: _base(placements=("S1",)),
    "other dtype": lambda: _base(dtype="bfloat16"),
    "other shape": lambda: _base() | {"b": values(1, (9,), "float32").clone()},
    "more on one rank": _more_on_rank_2,
}


def save_changing(path: Path, change: str) -> list[bool]:
    """Save base, base, changed, changed, base; return whether the plan was remembered each time, after a check."""
    for mesh in ((4,), (2, 2)):
        mesh_of(mesh)
    cached = []
    for step, name in enumerate(["nothing", "nothing", change, change, "nothing"]):
        state = CHANGES[name]()
        cached.append(bcp.save(path / str(step), {"model": state}).plan_cached)
        target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        bcp.load(path / str(step), {"model": target})
        wrong = [key for key, tensor in state.items() if not same_bits(_local(tensor), _local(target[key]))]
        assert not wrong, (name, wrong)
    return cached


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
