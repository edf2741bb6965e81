"""Jobs with tied weights whose values were saved apart."""

from __future__ import annotations

from pathlib import Path

import torch
from layouts import mesh_of
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import bcp


class Tied(nn.Module):
    """A language model's two ends."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.tok.weight
        self.norm = nn.LayerNorm(6)


def load(path: Path, how: str) -> tuple[str, torch.Tensor]:
    """Load into a sharded model; return the error, or none, and this rank's view of the whole tied weight."""
    model: nn.Module = Tied()
    if how == "fsdp2":
        fully_shard(model, mesh=mesh_of((4,)))
    elif how == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif how == "columns":
        weight = nn.Parameter(distribute_tensor(model.tok.weight.detach(), mesh_of((4,)), [Shard(1)]))
        model.tok.weight = model.head.weight = weight
    try:
        bcp.load(path, {"model": model}, options=bcp.LoadOptions(timeout=60))
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}", torch.empty(0)
    finally:
        dist.barrier()
    if how == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model):
            return "", model.tok.weight.detach().clone()
    weight = model.tok.weight.detach()
    return "", weight.full_tensor() if how in ("fsdp2", "columns") else weight.clone()
