"""FSDP2 on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from gpu.scenarios.scale import Scale, alike
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bcp


@contextmanager
def one_rank(path: Path, kind: str) -> Iterator[None]:
    """Have a process group with this process alone."""
    backend, device = ("nccl", torch.device(kind, 0)) if kind == "cuda" else ("gloo", None)
    store = dist.FileStore(str(path / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def eval_forward_save_load_forward(path: Path, scale: Scale, *, kind: str = "cuda") -> None:
    """The root module keeps its unsharded parameters after an eval forward; the save and the load still see shards."""
    with one_rank(path, kind):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(scale.width, scale.width) for _ in range(scale.depth + 1))).to(kind)
        mesh = init_device_mesh(kind, (1,))
        for layer in model[1:]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.eval()
        data = torch.randn(8, scale.width, device=kind)
        with torch.no_grad():
            wanted = model(data).clone()
            bcp.save(path / "saved", {"model": model})
            assert alike(model(data), wanted)
            model.reshard()
            for parameter in model.parameters():
                parameter.to_local().zero_()
            assert not model(data).any()
            bcp.load(path / "saved", {"model": model})
            assert alike(model(data), wanted)
