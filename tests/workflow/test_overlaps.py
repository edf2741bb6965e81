"""Overlaps are looked for device by device, by addresses alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bcp._load.overlaps import without_overlaps
from bcp.errors import StateError
from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.protocols import LocalShards

NAMES: Any = None  # of the checkpoint: asked only about targets that are the same memory


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


def test_addresses_of_other_devices_are_other_memory() -> None:
    memory = torch.zeros(6)
    apart = shards(on("cuda:0", memory[:4]), on("cuda:1", memory[2:]), on("cpu", memory[1:]), on("cuda:0", memory[4:]))
    assert without_overlaps(apart, np.arange(4), NAMES, 0) == (apart, ())


def test_memory_of_one_device_is_told_apart_by_addresses() -> None:
    memory = torch.zeros(6)
    one = shards(on("cuda:0", memory[:4]), on("cpu", memory[4:]), on("cuda:0", memory[2:]))
    with pytest.raises(StateError, match="model tensor '0' and model tensor '2' on rank 3 share memory"):
        without_overlaps(one, np.arange(3), NAMES, 3)
    assert without_overlaps(one, np.array([0, 1, -1]), NAMES, 3) == (one, ()), "what is not loaded"
