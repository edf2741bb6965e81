"""Write the folders in tests/data/foreign, by the libraries that they belong to; see the README there.

The libraries are no requirements of the tests: ByteCheckpoint 0.0.2 wants an older torch, and torchsnapshot 0.1.0 is
not maintained. Both work with torch 2.13 where they are found here::

    pip install --no-deps --target LIBRARIES bytecheckpoint==0.0.2 torchsnapshot==0.1.0 mmh3 universal-pathlib \
        pathlib-abc cachetools aiofiles nest-asyncio "importlib-metadata<8" zipp
    PYTHONPATH=LIBRARIES python tests/foreign/write_others.py
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch import multiprocessing

DATA = Path(__file__).parent.parent / "data" / "foreign"
RANKS = 2


def trained() -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """Return what every rank begins with."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters())


def wrapped(model: torch.nn.Module, kind: str) -> Any:
    """Put a model under a framework."""
    if kind in ("ddp", "sharded"):
        return torch.nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 -- one of three

        return fully_shard(model)
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 -- one of three

    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    """Return an optimizer with two groups."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.25}, {"params": parameters[2:], "lr": 0.125}]
    return torch.optim.AdamW(groups, betas=(0.5, 0.75))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take two steps, with the same batch on all ranks."""
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def expected() -> dict[str, torch.Tensor]:
    """Return the states of the same training without shards, by the names of bcp."""
    model, _ = trained()
    optimizer = optimizer_of(model)
    step(model, optimizer)
    states = {f"model: {name}": tensor.detach() for name, tensor in model.named_parameters()}
    for name, parameter in model.named_parameters():
        states.update((f"optimizer: state.{name}.{key}", value) for key, value in optimizer.state[parameter].items())
    return states


def rank(number: int, kind: str) -> None:
    """Train on one rank, and save."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]  # ByteCheckpoint asks it
    torch.cuda.set_device = lambda _: None
    os.environ["TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE"] = "64"  # so that there are chunks
    dist.init_process_group("gloo", rank=number, world_size=RANKS)
    model = wrapped(trained()[0], kind.partition("-")[2])
    optimizer = optimizer_of(model)
    step(model, optimizer)
    states = {"model": model, "optimizer": optimizer, "extra_state": {"epoch": 3}}
    if kind.startswith("bytecheckpoint"):
        import bytecheckpoint  # noqa: PLC0415 -- see above

        bytecheckpoint.save(str(DATA / kind), states, framework=kind.partition("-")[2])
    else:
        import torchsnapshot  # noqa: PLC0415 -- see above

        progress = torchsnapshot.StateDict(epoch=3, rate=0.1, name="run", done=False, blob=b"\x00\xff")
        kept = {"model": model, "optimizer": optimizer, "progress": progress}
        if kind.endswith("sharded"):
            rows = {name: _rows(tensor.detach(), number) for name, tensor in model.module.named_parameters()}
            kept = {"model": torchsnapshot.StateDict(**rows, flag=torch.tensor([1 + 2j])), "progress": progress}
        torchsnapshot.Snapshot.take(str(DATA / kind), kept, replicated=["**"])
    dist.barrier()
    dist.destroy_process_group()


def _rows(tensor: torch.Tensor, number: int) -> Any:
    """Return a sharded tensor, of which each rank has some rows."""
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards  # noqa: PLC0415 -- as above

    size = -(-len(tensor) // RANKS)
    own = tensor[number * size : (number + 1) * size].clone()
    shard = Shard.from_tensor_and_offsets(own, [number * size, *(0 for _ in tensor.shape[1:])], number)
    return init_from_local_shards([shard], *tensor.shape)


KINDS = [
    "bytecheckpoint-ddp",
    "bytecheckpoint-fsdp",
    "bytecheckpoint-fsdp2",
    "torchsnapshot-ddp",
    "torchsnapshot-sharded",
]


if __name__ == "__main__":
    for each in KINDS:
        shutil.rmtree(DATA / each, ignore_errors=True)
        multiprocessing.spawn(rank, (each,), nprocs=RANKS)
    save_file(expected(), DATA / "expected.safetensors")
