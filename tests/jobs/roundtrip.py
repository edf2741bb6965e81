"""What one rank of ``ranks4`` does to save a case of layouts and load it again."""

from __future__ import annotations

from pathlib import Path

import torch
from layouts import Case, World, coordinator_of, mesh_of, same_bits, shard, values
from torch import distributed as dist
from torch.distributed.tensor import DTensor

import bcp


def round_trip(case: Case, path: Path) -> list[str]:
    """Save under one layout and load under another; return the names that came back wrong on this rank."""
    for world in (case.saved, case.loaded):
        mesh_of(world.mesh)
    rank = dist.get_rank()
    if rank < case.saved.size:
        bcp.save(path, {"model": _state(case, case.saved)}, coordinator=coordinator_of(case.saved.size))
    dist.barrier()
    wrong: list[str] = []
    if rank < case.loaded.size:
        expected = _state(case, case.loaded)
        target = {name: _blank(tensor) for name, tensor in expected.items()}
        bcp.load(path, {"model": target}, overlap_loading=case.overlap, coordinator=coordinator_of(case.loaded.size))
        wrong = [name for name, tensor in expected.items() if not same_bits(tensor.to_local(), target[name].to_local())]
    dist.barrier()
    return wrong


def _state(case: Case, world: World) -> dict[str, DTensor]:
    state = {}
    for index, (shape, dtype) in enumerate(zip(case.shapes, case.dtypes, strict=True)):
        whole = values(index, shape, dtype)
        if case.transposed and whole.ndim == 2:
            whole = whole.t().contiguous().t()
        state[f"layer.{index}.weight"] = shard(whole, world.mesh, world.placements[index])
    return state


def _blank(tensor: DTensor) -> DTensor:
    """Return the same layout with other contents: no element of a case is zero, but for bools."""
    local = torch.zeros_like(tensor.to_local())
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
