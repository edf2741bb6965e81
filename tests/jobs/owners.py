"""Jobs with owners of extra states that communicate when they give and take these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sharded_tensors
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bcp


class Summing:
    """Adds up its number over all ranks whenever it gives or takes its state; all ranks have to do so together."""

    def __init__(self, number: int) -> None:
        self.number, self.sums = number, []

    def total(self) -> int:
        tensor = torch.tensor(self.number)
        dist.all_reduce(tensor)
        return int(tensor)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number, "sum": self.total()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]
        self.sums = [state["sum"], self.total()]


def states(first: int) -> dict[str, Any]:
    """Return owners under keys that every rank inserts in another order."""
    owners = {name: Summing(first * 10**place) for place, name in enumerate("abc")}
    turned = [*owners] if dist.get_rank() % 2 else [*owners][::-1]
    nested = {name: owners[name] for name in turned}
    extra = {"z": nested, "step": 1} if dist.get_rank() % 2 else {"step": 1, "z": nested}
    return {"extra_states": extra, "dataloader": {"owner": Summing(first)}, "model": {"w": torch.ones(2)}}


def save_and_load(path: Path) -> dict[str, list[int]]:
    """Save, load into others, and return the sums that these found: of the save, and of the load."""
    bcp.save(path, states(1 + dist.get_rank()))
    target = states(0)
    bcp.load(path, target)
    owners = target["extra_states"]["z"] | {"loader": target["dataloader"]["owner"]}
    return {name: owner.sums for name, owner in sorted(owners.items())}


def refused(path: Path, kind: str) -> list[str]:
    """Return the errors of a save of a sharded tensor among the extra states, and of a load into one."""
    ranks = dist.get_world_size()
    placed: torch.Tensor
    if kind == "DTensor":
        placed = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (ranks,)), [Shard(0)])
    else:
        placed = sharded_tensors.sharded(torch.ones(8), sharded_tensors.BLOCKS["rows"]((8,), ranks))
    bcp.save(path, {"extra_states": {"a": torch.ones(8)}})
    said = []
    for call in (bcp.save, bcp.load):
        try:
            call(path / "other" if call is bcp.save else path, {"extra_states": {"a": placed}})
        except bcp.BcpError as error:
            said.append(str(error))
    return said
