"""Checkpoints of four FSDP2 ranks, exported by four ranks, and loaded by four ranks of another mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from exported import assert_same
from ranks import Ranks
from safetensors.torch import load_file
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bcp

pytestmark = pytest.mark.dist
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False))


def trained(seed: int, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return a sharded model and its optimizer after a step."""
    model = model_of(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def full(states: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return whole tensors of a model and an optimizer, gathered by torch."""
    model, optimizer = get_state_dict(states["model"], states["optimizer"], options=FLAT)
    both = {f"model.{name}": value for name, value in model.items()}
    both |= {f"optim.{name}": value for name, value in optimizer.items() if isinstance(value, torch.Tensor)}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in both.items()}


def save_and_export(folder: Path) -> dict[str, torch.Tensor]:
    states = trained(1, (4,))
    bcp.save(folder / "ckpt", states)
    bcp.tools.export_dcp(folder / "ckpt", folder / "dcp", file_bytes=100)
    bcp.tools.export_hf(folder / "ckpt", folder / "hf", shard_bytes=100)
    return full(states)


def load_by_dcp(folder: Path, sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    states = trained(2, sizes)
    model, optimizer = get_state_dict(states["model"], states["optimizer"], options=FLAT)
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=folder / "dcp")
    set_state_dict(
        states["model"], states["optimizer"], model_state_dict=model, optim_state_dict=optimizer, options=FLAT
    )
    assert states["optimizer"].param_groups[0]["lr"] == 0.125
    return full(states)


def load_columns(folder: Path) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2, 2))
    weight = distribute_tensor(torch.zeros(7, 10), mesh, [Shard(0), Shard(1)])
    dcp.load({"model.0.weight": weight}, checkpoint_id=folder / "dcp")
    whole: torch.Tensor = weight.full_tensor()
    return whole


def test_four_ranks_export_and_dcp_loads_into_any_layout(ranks4: Ranks, tmp_path: Path) -> None:
    expected = ranks4.run(save_and_export, tmp_path)[0]
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 4
    for found in (*ranks4.run(load_by_dcp, tmp_path, (4,)), *ranks4.run(load_by_dcp, tmp_path, (2, 2))):
        assert_same(found, expected)
    for whole in ranks4.run(load_columns, tmp_path):
        assert torch.equal(whole, expected["model.0.weight"])
    found = {name: each for file in (tmp_path / "hf").glob("*.safetensors") for name, each in load_file(file).items()}
    assert_same(found, {name[6:]: each for name, each in expected.items() if name.startswith("model.")})


def refused(folder: Path) -> str:
    with pytest.raises(bcp.BcpError) as caught:
        bcp.tools.export_hf(folder / "ckpt", folder / "hf", glob="nothing" if dist.get_rank() == 2 else "*")
    return type(caught.value).__name__


def test_what_one_rank_refuses_all_refuse(ranks4: Ranks, tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": model_of(1)})
    assert ranks4.run(refused, tmp_path) == ["PeerError", "PeerError", "FqnMismatchError", "PeerError"]
    assert not (tmp_path / "hf").exists()
