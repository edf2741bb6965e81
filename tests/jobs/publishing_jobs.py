"""What ranks do in publications of live models: one model in many layouts, and steps of training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import bcp
from bcp.backends import LocalBackend
from bcp.publication import exchange

LAYOUTS = ("fsdp2", "hsdp", "tp", "tp_fsdp2", "ddp", "fsdp1", "columns")
Whole = dict[str, torch.Tensor]


def model_of(step: int) -> nn.Sequential:
    """Return the whole model after some steps; each one changes a part of its elements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.LayerNorm(8), nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6))
    for number in range(1, step + 1):
        made = torch.Generator().manual_seed(number)
        for tensor in (model[0].weight, model[2].weight, model[3].running_mean):
            with torch.no_grad():
                tensor[torch.rand(tensor.shape, generator=made) < 0.3] += number
    return model


def whole_of(step: int) -> Whole:
    """Return the tensors that engines shall get."""
    state = model_of(step).state_dict()
    return {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[-len(sizes) :])


def shard(model: nn.Sequential, layout: str) -> Any:
    """Shard a model by torch's own functions."""
    world = dist.get_world_size()
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp1":
        return FullyShardedDataParallel(
            model, sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True, device_id=torch.device("cpu")
        )
    if layout == "columns":
        state = model.state_dict()
        return {
            name: distribute_tensor(value, mesh_of(world), [Shard(1)]) if value.dim() > 1 else value
            for name, value in state.items()
        }
    if layout.startswith("tp"):
        mesh = mesh_of(2, world // 2) if layout == "tp_fsdp2" else mesh_of(world)
        parallelize_module(model, mesh["b"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["a"]) if layout == "tp_fsdp2" else model
    return fully_shard(model, mesh=mesh_of(2, world // 2) if layout == "hsdp" else mesh_of(world))


def publish(root: Path, step: int, layout: str, more: dict[str, Any]) -> bcp.PublishResult:
    """Publish the model after a step."""
    return bcp.publish(shard(model_of(step), layout), root, step, dtype="bfloat16", **more)


def publish_stages(root: Path, step: int) -> bcp.PublishResult:
    """Publish a pipeline: each rank has a stage, one of them has none, and all have the first tensor."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = list(model_of(step).state_dict().items())
    stage = dict(whole[rank :: world - 1]) if rank < world - 1 else {}
    return bcp.publish({**stage, whole[0][0]: whole[0][1]}, root, step, dtype="bfloat16")


def publish_cached(root: Path, folder: Path, steps: list[int]) -> list[list[int]]:
    """Publish steps with a cache of this rank; return the sizes of the files in there after each."""
    cache = folder / f"cache-{dist.get_rank()}"
    sizes = []
    for step in steps:
        bcp.publish(shard(model_of(step), "fsdp2"), root, step, dtype="bfloat16", cache=cache)
        sizes.append(sorted(path.stat().st_size for path in cache.iterdir()))
    return sizes


def step_at_once(root: Path, layout: str) -> bool:
    """Publish in the background, and let an optimizer change the model as soon as the call returns."""
    model = shard(model_of(1), layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    pending = bcp.publish_async(model, root, 1, dtype="bfloat16", optimizer=optimizer)
    optimizer.step()
    return pending.wait().is_anchor


def change_at_once(root: Path, layout: str) -> bool:
    """Publish in the background, and change the model as soon as the call returns."""
    model = shard(model_of(1), layout)
    pending = bcp.publish_async(model, root, 1, dtype="bfloat16")
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    return pending.wait().is_anchor


class Faulty(LocalBackend):
    """Storage that fails on one rank, in one of its calls."""

    def __init__(self, path: Path, call: str, rank: int) -> None:
        super().__init__(path)
        self.call = call if dist.get_rank() == rank else ""

    def open_write(self, key: str, nbytes: int | None = None) -> Any:  # type: ignore[override]
        if self.call == "open_write":
            raise bcp.StorageError("the disk is full")
        return super().open_write(key, nbytes)

    async def put_if(self, key: str, data: Any, expected: str | None) -> str | None:
        if self.call == "seal" and b'"sealed"' in bytes(data):
            return None
        return await super().put_if(key, data, expected)

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        if self.call == "read":
            raise bcp.StorageError("the disk is gone")
        await super().read_into(key, start, out)


def fail(root: Path, call: str, rank: int, step: int) -> str:
    """Publish to storage that fails on one rank; return the error."""
    try:
        bcp.publish(shard(model_of(step), "fsdp2"), Faulty(root, call, rank), step, dtype="bfloat16")
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class FaultyAt(LocalBackend):
    """Storage that fails at one of its calls on one rank."""

    def __init__(self, path: Path, number: int, rank: int) -> None:
        super().__init__(path)
        self.left = number if dist.get_rank() == rank else 0

    def _count(self) -> None:
        self.left -= 1
        if not self.left:
            raise bcp.StorageError("the disk is gone")

    def open_write(self, key: str, nbytes: int | None = None) -> Any:  # type: ignore[override]
        self._count()
        return super().open_write(key, nbytes)

    async def put(self, key: str, data: Any) -> None:
        self._count()
        await super().put(key, data)

    async def put_if(self, key: str, data: Any, expected: str | None) -> str | None:
        self._count()
        written = await super().put_if(key, data, expected)
        self._count()
        return written

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        self._count()
        await super().read_into(key, start, out)

    async def list(self, prefix: str = "") -> Any:
        self._count()
        return await super().list(prefix)

    async def version(self, key: str) -> str | None:
        self._count()
        return await super().version(key)


def fail_at(root: Path, number: int, rank: int, step: int) -> tuple[str, int]:
    """Publish to storage that fails at a call of one rank; return the error, and how many more calls it takes."""
    storage = FaultyAt(root, number, rank)
    try:
        bcp.publish(shard(model_of(step), "fsdp2"), storage, step, dtype="bfloat16", anchor_every=3, claim_seconds=0)
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}", storage.left
    return "", storage.left


def refuse(root: Path, how: str) -> str:
    """Pass arguments of which one rank's differ, or cannot be any; return the error."""
    odd, more = dist.get_rank() == 1, dict[str, Any]()
    if how == "rename" and odd:
        more["rename"] = {"0.weight": "other"}
    if how == "encoding" and odd:
        more["encoding"] = "add"
    version: Any = 2 if how == "version" and odd else 1
    try:
        bcp.publish(shard(model_of(1), "fsdp2"), root, version, **more)
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def count_received(root: Path) -> tuple[int, int]:
    """Publish larger tensors; return the most bytes that this rank had in a round, and those of all rounds."""
    seen: list[int] = []
    assembled: Callable[..., Any] = exchange._Batch.assembled

    def counted(batch: Any, layout: Any, received: Any) -> Any:
        seen.append(sum(map(len, received)))
        return assembled(batch, layout, received)

    mesh = mesh_of(dist.get_world_size())
    whole = {f"w{number}": torch.full((16, 32), float(number)) for number in range(12)}
    shards = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange._Batch, "assembled", counted)
        patch.setattr(exchange, "ROUND_BYTES", 5000)
        bcp.publish(shards, root, 1)
    return max(seen), sum(seen)


class Blind(LocalBackend):
    """Storage whose weights cannot be read."""

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        if ("/model-" in key and start > 8) or "/delta-" in key:
            raise bcp.StorageError(f"{key} is not to be read from byte {start}")
        await super().read_into(key, start, out)


def publish_blind(root: Path, folder: Path, step: int) -> str:
    """Publish with the cache of this rank to storage whose weights cannot be read; return the error."""
    cache = folder / f"cache-{dist.get_rank()}"
    try:
        bcp.publish(shard(model_of(step), "fsdp2"), Blind(root), step, dtype="bfloat16", cache=cache)
    except bcp.BcpError as error:
        return str(error)
    return ""
