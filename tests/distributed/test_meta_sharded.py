"""Sharded modules on the meta device are filled shard by shard, held against torch's ``full_tensor``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from samples import sample
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bcp
from bcp.backends import LocalBackend
from bcp.state.meta_tensors import MetaTensors
from bcp.testing.storage_fakes import FaultyBackend

pytestmark = pytest.mark.dist

LAYOUTS = ["fsdp2", "hsdp", "tp", "fsdp2 x tp"]


class Net(nn.Module):
    """Uneven sizes, fewer rows than ranks, a plain buffer, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(6), nn.Linear(8, 6)
        self.out = nn.Linear(6, 3)
        self.out.bias.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.norm(self.down(self.up(x).tanh())))
        return result


def sharded(model: Any, layout: str) -> Any:
    """Shard a module, also one on the meta device."""
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if "tp" in layout:
        mesh = flat if layout == "tp" else square["inner"]
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if layout != "tp":
        mesh = {"fsdp2": flat, "hsdp": square}.get(layout, square["outer"])
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh)
    return model


def made(layout: str, device: str) -> Any:
    torch.manual_seed(1)  # what is on the CPU has to be the same on all ranks
    with torch.device(device):
        model = Net()
    return sharded(model, layout)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(24.0).reshape(4, 6).sin()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def save(path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    bcp.save(path, {"model": model, "optimizer": optimizer})


def fill(path: Path, layout: str) -> None:
    """Compare a meta module with the source, and two more steps with those of a module that was made on the CPU."""
    torch.manual_seed(0)
    source = Net()
    step(source, torch.optim.AdamW(source.parameters()))
    model, twin = made(layout, "meta"), made(layout, "cpu")
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    parameters = {name: (id(value), type(value)) for name, value in model.named_parameters()}
    expected = {name: getattr(value, "placements", None) for name, value in twin.named_parameters()}
    bcp.load(path, {"model": model, "optimizer": optimizer})
    bcp.load(path, {"model": twin, "optimizer": other})
    assert {name: (id(value), type(value)) for name, value in model.named_parameters()} == parameters
    assert {name: getattr(value, "placements", None) for name, value in model.named_parameters()} == expected
    assert [value.requires_grad for value in model.parameters()] == [value.requires_grad for value in twin.parameters()]
    found = full(model)
    for name, value in source.state_dict().items():
        assert torch.equal(found[name], value), name
    for _ in range(2):
        step(model, optimizer)
        step(twin, other)
    found = full(model)
    for name, value in full(twin).items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("layout", sample(LAYOUTS, *LAYOUTS[::3]))
def test_a_sharded_meta_module_is_the_one_that_was_saved(ranks4: Ranks, tmp_path: Path, layout: str) -> None:
    ranks4.run(save, tmp_path)
    ranks4.run(fill, tmp_path, layout)


def fill_in_place(path: Path) -> int:
    """Return the bytes of new memory: the module has the memory that was read into."""
    model, read_into = made("fsdp2 x tp", "meta"), dict[str, int]()
    hand_over = MetaTensors.hand_over

    def spying(self: MetaTensors, loaded: Any) -> None:
        for name, tensor in model.named_parameters():
            stand_in: Any = self.stand_in(tensor)
            read_into[name] = stand_in.to_local().data_ptr() if isinstance(stand_in, DTensor) else stand_in.data_ptr()
        hand_over(self, loaded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetaTensors, "hand_over", spying)
        bcp.load(path, {"model": model})
    locals_ = {name: value.to_local() for name, value in model.named_parameters()}
    assert {name: value.data_ptr() for name, value in locals_.items()} == read_into
    return sum(value.numel() * value.element_size() for value in locals_.values())


def test_each_rank_has_memory_for_its_shards_only(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(save, tmp_path)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in Net().parameters())
    found = ranks4.run(fill_in_place, tmp_path)
    assert max(found) < nbytes / 2 + 64, found


def fail_on_one_rank(path: Path) -> None:
    model = made("fsdp2", "meta")
    before = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    backend: Any = LocalBackend(path)
    if dist.get_rank() == 2:
        for operation in ("read_into", "read_scattered"):
            backend = FaultyBackend(backend, operation, OSError("gone"), key="model")
    with pytest.raises(bcp.BcpError):
        bcp.load(backend, {"model": model})
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == before
    assert all(value.is_meta for value in model.state_dict().values())


def test_a_failure_of_one_rank_leaves_all_on_the_meta_device(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(save, tmp_path)
    ranks4.run(fail_on_one_rank, tmp_path)


def load_into_an_unused_accelerator(path: Path) -> None:
    mesh, module = DeviceMesh("cuda", torch.arange(4), _init_backend=False), nn.Module()
    local = torch.empty(2, 6, device="meta")
    module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    with pytest.raises(bcp.StateError, match=r"mesh of 'weight' is on cuda, of which this process uses no"):
        bcp.load(path, {"model": module})
    assert module.weight.is_meta


def test_the_device_of_a_rank_is_not_guessed(ranks4: Ranks, tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"weight": torch.ones(8, 6)}})
    ranks4.run(load_into_an_unused_accelerator, tmp_path)
