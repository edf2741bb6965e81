"""Which bytes of a snapshot's memory are sampled."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import bcp
from bcp._save.snapshot import BLOCK_BYTES, MOST, MOST_BLOCKS, MemorySample
from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.protocols import LocalShards
from bcp.stages.memcpy import addresses


def sampled(tensors: Sequence[torch.Tensor]) -> MemorySample:
    metas = [
        TensorMeta("model", str(at), str(each.dtype).removeprefix("torch."), each.itemsize, tuple(each.shape))
        for at, each in enumerate(tensors)
    ]
    table = ShardTable.build([ShardRow(meta, Box.whole(meta.shape)) for meta in metas])
    return MemorySample(LocalShards(table, tensors), addresses(tensors, table))


def sees(sample: MemorySample, address: int) -> bool:
    """Say whether a change of one bit at an address is seen; undoes it."""
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 1
    try:
        sample.check(rank=0)
    except bcp.StateChangedError:
        return True
    else:
        return False
    finally:
        byte.value ^= 1


@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 129, 1000, BLOCK_BYTES * MOST])
def test_every_byte_of_a_small_tensor_is_sampled(count: int) -> None:
    one, other = torch.arange(count).to(torch.uint8), torch.zeros(3)
    sample = sampled([other, one])
    assert all(sees(sample, one.data_ptr() + at) for at in range(count))
    sample.check(rank=0)


def test_of_a_large_tensor_blocks_from_the_first_byte_to_the_last() -> None:
    tensor = torch.zeros(40_003, dtype=torch.uint8)
    sample = sampled([tensor])
    seen = np.array([sees(sample, tensor.data_ptr() + at) for at in range(0, len(tensor), BLOCK_BYTES // 2)])
    assert seen[0]
    assert sees(sample, tensor.data_ptr() + len(tensor) - 1)
    gaps = np.diff(np.flatnonzero(seen)) * (BLOCK_BYTES // 2)
    assert gaps.max() <= len(tensor) // (MOST - 1) + BLOCK_BYTES
    assert MOST <= seen.sum() <= 2 * MOST


def test_many_tensors_share_the_blocks() -> None:
    tensors = [torch.zeros(512) for _ in range(3 * MOST_BLOCKS)]
    sample = sampled(tensors)
    assert repr(sample) == f"<MemorySample: {2 * BLOCK_BYTES * len(tensors)} bytes of {len(tensors)} tensors>"
    assert all(sees(sample, tensors[-1].data_ptr() + at) for at in (0, tensors[-1].nbytes - 1))


def test_only_elements_of_a_view_are_sampled() -> None:
    whole = torch.zeros(6, 5, 4, dtype=torch.int16)
    views = [whole[::2, 1:4, ::3], torch.zeros(2, 0).t()]
    sample = sampled(views)
    own = torch.zeros_like(whole, dtype=torch.bool)
    own[::2, 1:4, ::3] = True
    assert [sees(sample, whole.data_ptr() + 2 * at + 1) for at in range(whole.numel())] == own.flatten().tolist()


def test_memory_of_devices_is_not_sampled() -> None:
    assert repr(sampled([torch.zeros(3, device="meta")])) == "<MemorySample: 0 bytes of 0 tensors>"
    sampled([]).check(rank=0)
