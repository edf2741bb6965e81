"""Foreign checkpoints on any parallelism: each rank reads its ranges, and bytes that several want are read once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import CountingBackend

pytestmark = pytest.mark.dist


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = torch.nn.Linear(48, 96), torch.nn.Linear(96, 48), torch.nn.Linear(48, 7)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.down(self.up(x).relu()))


def build(tp: int, seed: int) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    net = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return net, torch.optim.AdamW(net.parameters(), lr=0.125)


def step(net: Net, optimizer: torch.optim.AdamW, times: int) -> None:
    for number in range(times):
        torch.manual_seed(number)
        net(torch.rand(8, 48)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full(net: Net, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    names = {parameter: name for name, parameter in net.named_parameters()}
    states = {
        f"{names[parameter]}.{key}": whole(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    return {**{name: whole(parameter) for parameter, name in names.items()}, **states}


def save_dcp(folder: Path, tp: int) -> dict[str, Any]:
    net, optimizer = build(tp, 0)
    step(net, optimizer, 3)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, states = get_state_dict(net, optimizer, options=options)
    dcp.save({"model": model, "optim": states}, checkpoint_id=folder)
    return full(net, optimizer)


def load_dcp(folder: Path, tp: int) -> tuple[dict[str, Any], Any, int]:
    net, optimizer = build(tp, 9)
    backend = CountingBackend(LocalBackend(folder))
    result = bcp.load(backend, {"model": net, "optimizer": optimizer})
    return full(net, optimizer), result, sum(backend.read.values())


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (2, 4), (1, 2)])
def test_dcp_of_fsdp2_and_tp_loads_on_another_mesh(ranks4: Ranks, tmp_path: Path, saved: int, loaded: int) -> None:
    truth = ranks4.run(save_dcp, tmp_path / "dcp", saved)[0]
    outcomes = ranks4.run(load_dcp, tmp_path / "dcp", loaded)
    for found, result, _ in outcomes:
        assert found.keys() == truth.keys()
        assert all(torch.equal(found[name], truth[name]) for name in truth)
        assert result.unverified
        assert result.saved_world_size == 4
        assert result.missing == result.unexpected == ()
    nbytes = sum(tensor.nbytes for tensor in truth.values())
    assert all(result.nbytes <= result.read_nbytes <= nbytes for _, result, _ in outcomes)


def write_hf(folder: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "a": torch.rand(512, 256, generator=generator),
        "b": torch.rand(32, 4, generator=generator).bfloat16(),
    }
    folder.mkdir()
    save_file({"a": tensors["a"]}, folder / "one.safetensors")
    save_file({"b": tensors["b"]}, folder / "two.safetensors")
    return tensors


def load_cut(folder: Path, placements: Sequence[Any]) -> tuple[dict[str, torch.Tensor], int, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    empty = {"a": torch.zeros(512, 256), "b": torch.zeros(32, 4, dtype=torch.bfloat16)}
    state = {name: distribute_tensor(tensor, mesh, placements) for name, tensor in empty.items()}
    backend = CountingBackend(LocalBackend(folder))
    result = bcp.load(backend, {"model": state})
    assert sum(nbytes for key, nbytes in backend.read.items()) >= result.read_nbytes
    return {name: whole(tensor) for name, tensor in state.items()}, result.read_nbytes, result.nbytes


def test_each_rank_reads_the_bytes_that_it_needs(ranks4: Ranks, tmp_path: Path) -> None:
    truth = write_hf(tmp_path / "hf")
    quarter = sum(tensor.nbytes for tensor in truth.values()) // 4
    for found, read, needed in ranks4.run(load_cut, tmp_path / "hf", [Shard(0)]):
        assert all(torch.equal(found[name], truth[name]) for name in truth)
        assert read == needed == quarter


def test_large_ranges_that_all_ranks_want_are_read_once(ranks4: Ranks, tmp_path: Path) -> None:
    truth = write_hf(tmp_path / "hf")
    outcomes = ranks4.run(load_cut, tmp_path / "hf", [Replicate()])
    nbytes = sum(tensor.nbytes for tensor in truth.values())
    small = truth["b"].nbytes  # not worth a round: each rank reads it by itself
    assert sum(read for _, read, _ in outcomes) == nbytes + 3 * small
    assert all(torch.equal(found[name], truth[name]) for found, _, _ in outcomes for name in truth)


def load_file_of_torch(path: Path) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = distribute_tensor(torch.zeros(10, 7), mesh, [Shard(1)])
    bcp.load(path, {"model": {"w": target}})
    return whole(target)


def test_a_file_of_torch_save_is_cut_by_columns(ranks4: Ranks, tmp_path: Path) -> None:
    weight = torch.rand(10, 7)
    torch.save({"w": weight}, tmp_path / "w.pt")
    assert all(torch.equal(found, weight) for found in ranks4.run(load_file_of_torch, tmp_path / "w.pt"))


def fail_together(folder: Path) -> str:
    with pytest.raises(bcp.CheckpointError) as caught:
        bcp.load(folder, {"model": {"a": torch.zeros(512, 256)}})
    return f"{type(caught.value).__name__}: {caught.value}"


def test_all_ranks_refuse_what_rank_0_refuses(ranks4: Ranks, tmp_path: Path) -> None:
    write_hf(tmp_path / "hf")
    (tmp_path / "hf" / "one.safetensors").write_bytes(b"\xff" * 16)
    words = ranks4.run(fail_together, tmp_path / "hf")
    assert len(set(words)) == 1
    assert "CorruptError" in words[0]


def save_sharded(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter  # noqa: PLC0415 -- imports much

    net, _ = build(2, 0)
    dcp.save(net.state_dict(), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    return {name: whole(parameter) for name, parameter in net.named_parameters()}


def read_on_a_mesh(folder: Path, name: str) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2, 2))
    tensor: Any = bcp.Checkpoint(folder).read(name, mesh=mesh, placements=[Shard(1), Shard(0)])
    assert tensor.to_local().numel() * 4 == tensor.numel()
    return whole(tensor)


def test_safetensors_shards_of_dcp_are_joined(ranks4: Ranks, tmp_path: Path) -> None:
    truth = ranks4.run(save_sharded, tmp_path)[0]
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 4
    ckpt = bcp.Checkpoint(tmp_path)
    assert ckpt.names() == sorted(truth)
    for name, tensor in truth.items():
        assert torch.equal(ckpt.read(name), tensor)
    for found in ranks4.run(read_on_a_mesh, tmp_path, "up.weight"):
        assert torch.equal(found, truth["up.weight"])
    next(tmp_path.glob("shard-*.safetensors")).unlink()
    with pytest.raises(bcp.CorruptError, match=r"leave a part of it out|lies outside"):
        bcp.Checkpoint(tmp_path).names()


def _load_around_an_import(folder: Path) -> bool:
    """Load shards and replicas before and after an import by all ranks; tell whether they read the same bytes."""
    ways: list[list[Any]] = [[Shard(0)], [Replicate()]]
    before = [load_cut(folder, way) for way in ways]
    bcp.tools.import_files(folder, copy=False)
    after = [load_cut(folder, way) for way in ways]
    return all(
        one[1:] == two[1:] and all(torch.equal(one[0][name], two[0][name]) for name in one[0])
        for one, two in zip(before, after, strict=True)
    )


def test_four_ranks_of_torch_read_the_same_bytes_before_and_after(ranks4: Ranks, tmp_path: Path) -> None:
    write_hf(tmp_path / "hf")
    assert ranks4.run(_load_around_an_import, tmp_path / "hf") == [True] * 4
