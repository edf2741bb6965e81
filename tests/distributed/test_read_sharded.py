"""A rank reads its own part of any tensor, without a model and without the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import CountingBackend

pytestmark = pytest.mark.dist

CUTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Replicate(), Shard(1)]),
]
LARGE = (1 << 10, 1 << 10)


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def save(path: Path, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    bcp.save(path, {"model": {"w": distribute_tensor(whole(shape), mesh, [Shard(1), Shard(0)])}})


def compare(
    path: Path, shape: tuple[int, ...], cut: tuple[tuple[int, ...], list[Any]], readers: Sequence[int] = range(4)
) -> int:
    """Compare a part with torch's own; return the bytes of data files that this rank has read."""
    sizes, placements = cut
    mesh = init_device_mesh("cpu", sizes)
    expected = distribute_tensor(whole(shape), mesh, placements)
    if dist.get_rank() not in readers:
        return 0
    backend = CountingBackend(LocalBackend(path))
    found: Any = bcp.Checkpoint(backend).read("w", mesh=mesh, placements=placements)
    assert found.placements == expected.placements
    assert found.shape == expected.shape
    assert torch.equal(found.to_local(), expected.to_local())
    return sum(nbytes for key, nbytes in backend.read.items() if key.startswith("model/"))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_part_of_a_rank_is_that_of_distribute_tensor(ranks4: Ranks, tmp_path: Path, cut: Any) -> None:
    ranks4.run(save, tmp_path, (10, 7))
    ranks4.run(compare, tmp_path, (10, 7), cut)


def test_no_other_rank_takes_part(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(save, tmp_path, (10, 7))
    ranks4.run(compare, tmp_path, (10, 7), CUTS[3], (1,))


def step(path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    bcp.save(path, {"model": model, "optimizer": optimizer})
    mesh = init_device_mesh("cpu", (2, 2))
    ckpt, state = bcp.Checkpoint(path), optimizer.state[model[0].weight]
    for key in ("exp_avg", "exp_avg_sq"):
        (name,) = ckpt.names("optimizer", f"*weight.{key}")
        found: Any = ckpt.read(name, kind="optimizer", mesh=mesh, placements=[Shard(1), Shard(0)])
        expected = distribute_tensor(state[key], mesh, [Shard(1), Shard(0)])
        assert torch.equal(found.to_local(), expected.to_local())


def test_states_of_an_optimizer_are_cut_too(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(step, tmp_path)


def test_a_rank_reads_what_it_needs_and_no_more(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(save, tmp_path, LARGE)
    nbytes = ranks4.run(compare, tmp_path, LARGE, ((2, 2), [Shard(1), Shard(0)]))
    assert all(1 << 20 <= each <= (1 << 20) + (4 << 10) for each in nbytes), nbytes


def test_a_mesh_needs_placements_and_no_index(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(3)}})
    ckpt = bcp.Checkpoint(tmp_path)
    with pytest.raises(bcp.InputError, match="pass mesh= and placements="):
        ckpt.read("w", placements=[Shard(0)])
    with pytest.raises(bcp.InputError, match="leave index and device out"):
        ckpt.read("w", 1, mesh=object(), placements=[Shard(0)])
