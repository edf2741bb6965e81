"""Checkpoints of other layouts are compared element by element."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bcp

pytestmark = pytest.mark.dist


def _saved(path: Path, dim: int, change: float) -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(96.0).view(8, 12)
    whole[3, 5] += change
    model = {
        "cut": distribute_tensor(whole, mesh, [Shard(dim)]),
        "whole": distribute_tensor(torch.arange(5), mesh, [Replicate()]),
    }
    bcp.save(path, {"model": model})


def test_resharded_checkpoints_differ_where_their_elements_do(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(_saved, tmp_path / "rows", 0, 0.0)
    ranks4.run(_saved, tmp_path / "columns", 1, 0.0)
    ranks4.run(_saved, tmp_path / "other", 1, 0.5)
    assert not bcp.tools.diff(tmp_path / "rows", tmp_path / "columns")
    for one in ("rows", "columns"):
        (found,) = bcp.tools.diff(tmp_path / one, tmp_path / "other").tensors
        assert (found.name, found.elements, found.numel, found.largest) == ("cut", 1, 96, 0.5)
