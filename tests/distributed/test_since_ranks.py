"""Four ranks that save only changed blocks: each keeps those of its own files, and all agree on a full save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import Ranks
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bcp
from bcp.format.metadata import METADATA_KEY, decode_commit

pytestmark = pytest.mark.dist

ROWS, COLUMNS = 16, 1 << 17
Facts = dict[int, tuple[tuple[int, ...], int]]


def _states() -> dict[str, dict[str, DTensor]]:
    """Return a sharded tensor and a replicated one, of 8 MiB each, and a small one of four shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    model = {
        "frozen": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "same": distribute_tensor(whole + 1, mesh, [Replicate()], src_data_rank=None),
        "head": distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)], src_data_rank=None),
    }
    return {"model": model}


def _save(path: Path, steps: list[int], change: str) -> tuple[Facts, float]:
    """Save steps; return what each refers to, the bytes that this rank has written, and the sum of the model."""
    states, written = _states(), dict[int, int]()
    model = states["model"]
    with bcp.Run(path, states, save=1, keep=100, since="auto") as run:
        run.resume()
        for step in steps:
            model["head"].to_local().fill_(step)
            if change == "all":
                model["frozen"].to_local().add_(1)
                model["same"].to_local().add_(1)
            if change == "rank 2" and dist.get_rank() == 2:
                model["frozen"].to_local().add_(1)
            pending = run.maybe_save(step)
            assert pending is not None
            written[step] = pending.wait().nbytes
    refers = {step: decode_commit((path / f"step-{step:08d}" / METADATA_KEY).read_bytes(), "").refers for step in steps}
    return {step: (refers[step], written[step]) for step in steps}, float(model["frozen"].to_local().double().sum())


def _load(path: Path) -> tuple[float, float]:
    """Load into another layout: the sum of the columns of this rank, and the head."""
    states = _states()
    mesh, model = states["model"]["frozen"].device_mesh, states["model"]
    model["frozen"] = distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [Shard(1)], src_data_rank=None)
    bcp.load(path, states)
    return float(model["frozen"].to_local().double().sum()), float(model["head"].to_local()[0, 0])


def test_all_blocks_of_all_ranks_change(ranks4: Ranks, tmp_path: Path) -> None:
    found = ranks4.run(_save, tmp_path, [1, 2, 3, 4], "all")
    loaded = ranks4.run(_load, tmp_path / "step-00000004")
    assert sum(total for total, _ in loaded) == sum(total for _, total in found)
    for step in range(1, 5):
        assert bcp.Checkpoint(tmp_path / f"step-{step:08d}").verify()


@pytest.mark.parametrize("change", ["none", "rank 2"])
def test_each_rank_keeps_the_blocks_of_its_own_files(ranks4: Ranks, tmp_path: Path, change: str) -> None:
    found = ranks4.run(_save, tmp_path, [1, 2, 3], change)
    for rank, (facts, _) in enumerate(found):
        assert [refers for refers, _ in facts.values()] == [(), (1,), (1,)]
        full, last = facts[1][1], facts[3][1]
        assert last < (0.8 if change == "rank 2" and rank == 2 else 0.55) * full
    loaded = ranks4.run(_load, tmp_path / "step-00000003")
    assert sum(total for total, _ in loaded) == sum(total for _, total in found)
    assert {head for _, head in loaded} == {3.0}
    assert bcp.Checkpoint(tmp_path / "step-00000003").verify()


def test_a_rank_without_its_receipt_stores_everything(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(_save, tmp_path, [1], "none")
    (lost,) = tmp_path.glob("step-00000001/receipts/00003-*")
    data = lost.read_bytes()
    found = ranks4.run(_save_without, tmp_path, str(lost))
    lost.write_bytes(data)
    *others, last = (nbytes for _, nbytes in found)
    assert max(others) < last
    assert {refers for refers, _ in found} == {(1,)}
    assert {head for _, head in ranks4.run(_load, tmp_path / "step-00000002")} == {2.0}


def _save_without(path: Path, lost: str) -> tuple[tuple[int, ...], int]:
    """Save step 2, after the receipt of a rank has gone since the resumption."""
    states = _states()
    with bcp.Run(path, states, save=1, keep=100, since="auto") as run:
        run.resume()
        dist.barrier()
        Path(lost).unlink(missing_ok=True)
        dist.barrier()
        states["model"]["head"].to_local().fill_(2)
        pending = run.maybe_save(2)
        assert pending is not None
        nbytes = pending.wait().nbytes
    return decode_commit((path / "step-00000002" / METADATA_KEY).read_bytes(), "").refers, nbytes
