"""What every rank of ``ranks4`` does with replicas that have different values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import bcp

Result = tuple[dict[str, torch.Tensor], list[str]]
"""The rank's own values by name, and the warnings of its saves."""


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Collect the warnings of bcp."""
    texts: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    collector, logger = Collector(logging.WARNING), logging.getLogger("bcp")
    logger.addHandler(collector)
    try:
        yield texts
    finally:
        logger.removeHandler(collector)


def network() -> nn.Sequential:
    """Return a model with buffers, whose weights are large enough to be divided among ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Train on data of this rank alone."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=generator)).square().sum().backward()
        optimizer.step()


def values(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Return a rank's own values, by torch's own ``state_dict``."""
    own = {name.removeprefix("module."): tensor.clone() for name, tensor in model.state_dict().items()}
    if optimizer is not None:
        names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
        for number, state in optimizer.state_dict()["state"].items():
            own |= {f"{names[number]}/{key}": value.clone() for key, value in state.items()}
    return own


def ddp(path: Path, way: str, balance: str) -> Result:
    """Save a model of DistributedDataParallel; ``way``: how its buffers are kept equal."""
    model = DistributedDataParallel(network(), **({"broadcast_buffers": False} if way == "none" else {}))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    options = bcp.SaveOptions(balance=balance)
    with warnings() as texts:
        for name in ("1", "2"):
            saved = model.module if way == "module" else model
            bcp.save(path / name, {"model": saved, "optimizer": optimizer}, options=options)
    return values(model, optimizer), texts


def local_steps(path: Path, snapshot: str) -> Result:
    """Save a model that every rank has trained for itself since the last average."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings() as texts:
        bcp.save(path / "0", {"model": model, "optimizer": optimizer})
        assert not texts, "all ranks begin alike"
        train(model, optimizer)
        before = values(model, optimizer)
        for name in ("1", "2"):
            options = bcp.SaveOptions(snapshot=snapshot)
            pending = bcp.save_async(path / name, {"model": model, "optimizer": optimizer}, options=options)
            train(model, optimizer, 1)
            pending.wait()
            if name == "1":
                own = before
    return own, texts


def plain(path: Path, pairs: dict[str, list[torch.Tensor]], replicas: str, times: int = 1) -> list[str]:
    """Save a plain mapping, in which rank r has the r-th of some values; return warnings and errors."""
    state = {name: tensors[min(dist.get_rank(), len(tensors) - 1)] for name, tensors in pairs.items()}
    with warnings() as texts:
        for number in range(times):
            try:
                bcp.save(path / f"{number}", {"model": state}, options=bcp.SaveOptions(replicas=replicas))
            except bcp.StateError as error:
                texts.append(str(error))
    return texts


def later(path: Path) -> list[int]:
    """Save while replicas are equal, then while they differ; return the number of warnings after each save."""
    state = {f"w{number}": torch.full((300, 1000), 1.0) for number in range(3)}
    counts = []
    with warnings() as texts:
        for number in range(5):
            if number >= 2:
                state["w1"].fill_(number + dist.get_rank())
            if number >= 4:
                state["w2"][:].fill_(number + dist.get_rank())
            report = bcp.save(path / f"{number}", {"model": state})
            assert report.plan_cached == (number > 0), number
            counts.append(len(texts))
    return counts


def rates(path: Path, replicas: str) -> list[str]:
    """Save optimizers whose learning rate depends on the rank; return warnings and errors."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0 + dist.get_rank() // 2)
    with warnings() as texts:
        for number in range(3):
            try:
                options = bcp.SaveOptions(replicas=replicas)
                bcp.save(path / f"{number}", {"model": model, "optimizer": optimizer}, options=options)
            except bcp.StateError as error:
                texts.append(str(error))
    return texts


def sharded(path: Path, shape: tuple[int, ...]) -> Result:
    """Save a model of FSDP2, or of HSDP; its buffers, and the replicas of HSDP, are those of each rank."""
    names = ("dp",) if len(shape) == 1 else ("rep", "dp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = network()
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(dist.get_rank())
        if len(shape) > 1:
            for parameter in model.parameters():
                local(parameter).add_(mesh.get_coordinate()[0])
    with warnings() as texts:
        bcp.save(path, {"model": model})
    own = {name: local(tensor).clone() for name, tensor in model.state_dict().items()}
    return own, texts


def local(tensor: Any) -> torch.Tensor:
    """Return the memory of this rank."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert isinstance(part, torch.Tensor)
    return part
