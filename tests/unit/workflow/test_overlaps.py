"""Overlaps are looked for device by device, by addresses alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import bcp
from bcp._load.overlaps import without_overlaps
from bcp.format.metadata import decode_metadata
from bcp.plan.box import Box
from bcp.plan.read.renamed import RenamedLayout, renamed
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.protocols import LocalShards


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device."""

    where: torch.device

    @property
    def device(self) -> torch.device:
        return self.where


def on(device: str, tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.as_subclass(OnDevice)
    found.where = torch.device(device)
    return found


def shards(*tensors: torch.Tensor) -> LocalShards:
    metas = [TensorMeta("model", str(at), "float32", 4, tuple(each.shape)) for at, each in enumerate(tensors)]
    table = ShardTable.build([ShardRow(meta, Box.whole(meta.shape)) for meta in metas])
    return LocalShards(table, tensors, address=np.zeros(len(tensors), np.int64))


@pytest.fixture
def names(tmp_path: Path) -> RenamedLayout:
    """Return a checkpoint of four tensors."""
    bcp.save(tmp_path, {"model": {str(at): torch.zeros(1) for at in range(4)}})
    layout = decode_metadata((tmp_path / "metadata.arrow").read_bytes(), "metadata.arrow").layout
    return renamed(layout, None, ["model"])


def test_addresses_of_other_devices_are_other_memory(names: RenamedLayout) -> None:
    memory = torch.zeros(6)
    apart = shards(on("cuda:0", memory[:4]), on("cuda:1", memory[2:]), on("cpu", memory[1:]), on("cuda:0", memory[4:]))
    found, shared = without_overlaps(apart, np.arange(4), names)
    assert found.tensors == apart.tensors
    assert not shared


def test_memory_of_one_device_is_told_apart_by_addresses(names: RenamedLayout) -> None:
    memory = torch.zeros(6)
    one = shards(on("cuda:0", memory[:4]), on("cpu", memory[4:]), on("cuda:0", memory[2:]))
    found, (shared,) = without_overlaps(one, np.arange(3), names)
    assert shared.names == ["model tensor '0'", "model tensor '2'"]
    assert [found.tensors[0], found.tensors[2]] == shared.values
    assert all(value.device.type == "cpu" for value in shared.values)
    assert found.tensors[1] is one.tensors[1]
    assert not without_overlaps(one, np.array([0, 1, -1]), names)[1], "what is not loaded"
