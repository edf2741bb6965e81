from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import bcp
from bcp.runtime.staging import StagingPool, shared_pool

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[StagingPool]:
    shared_pool(pinned=False).clear()
    yield shared_pool(pinned=False)
    shared_pool(pinned=False).clear()


def trained(width: int) -> dict[str, object]:
    model = nn.Linear(width, width)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, width)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "extra_states": {"step": 1}}


def test_the_first_save_finds_plan_and_memory(pool: StagingPool, tmp_path: Path) -> None:
    states = trained(1000)
    pending = bcp.prepare(states)
    assert pending.wait() is None
    prepared = pool.free_nbytes
    report = bcp.save(tmp_path, states, async_checkpoint=True).wait()
    assert report.plan_cached
    assert report.nbytes <= prepared == pool.free_nbytes < report.nbytes + 4096 * len(report.files)
    fresh = trained(1000)
    bcp.load(tmp_path, fresh)
    assert fresh["model"].weight.equal(states["model"].weight)  # type: ignore[attr-defined]  # both are modules


def test_no_more_memory_is_prepared_than_a_save_may_take(pool: StagingPool) -> None:
    bcp.prepare(trained(1000), options=bcp.SaveOptions(budget_bytes=5 * MIB, part_bytes=2 * MIB)).wait()
    assert 2 * MIB <= pool.free_nbytes <= 5 * MIB


def test_what_cannot_be_saved_is_refused(pool: StagingPool) -> None:
    with pytest.raises(bcp.InputError):
        bcp.prepare({"model": {"w": torch.eye(2).to_sparse()}})
    assert pool.free_nbytes == 0


@pytest.mark.anyio
async def test_from_a_coroutine(pool: StagingPool) -> None:
    pending = await bcp.aprepare(trained(300))
    await pending
    assert pool.free_nbytes > 300 * 300 * 12
