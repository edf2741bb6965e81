"""Four ranks: FSDP2, HSDP, FSDP2 x TP and plain tensors, each layout into each other one, held against full tensors."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from alike import alike_in_any_order, exactly_alike
from dcp_states import emptied, full, state_of, trained
from ranks import Ranks, ended, started
from samples import sample
from torch import distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import Shard as LocalShard
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bcp
from bcp.backends import LocalBackend

pytestmark = pytest.mark.dist

LAYOUTS = ["fsdp", "hsdp", "fsdp_tp", "plain"]


def saved(layout: str, path: Path, form: str) -> Any:
    """Save a trained state; return its full tensors, which torch gathers."""
    state = state_of(*trained(layout), flat=form == "flat")
    dcp.save(state, storage_writer=bcp.dcp.StorageWriter(path))
    return full(state)


def loaded(layout: str, path: Path, form: str) -> Any:
    state = emptied(state_of(*trained(layout, seed=1), flat=form == "flat"))
    dcp.load(state, storage_reader=bcp.dcp.StorageReader(path))
    return full(state)


def loaded_by_bcp(layout: str, path: Path, form: str) -> Any:
    model, optimizer = trained(layout, seed=1, steps=0)
    bcp.load(path, {"model": model, "optimizer": optimizer})
    return full(state_of(model, optimizer, flat=form == "flat"))


def saved_by_bcp(layout: str, path: Path) -> Any:
    model, optimizer = trained(layout)
    bcp.save(path, {"model": model, "optimizer": optimizer})
    return full(state_of(model, optimizer, flat=True))


PAIRS = [*itertools.product(LAYOUTS, LAYOUTS)]


@pytest.mark.parametrize(("first", "second"), sample(PAIRS, *PAIRS[1::3]))
def test_a_layout_loads_into_another(first: str, second: str, ranks4: Ranks, tmp_path: Path) -> None:
    states = ranks4.run(saved, first, tmp_path, "nested")
    assert all(alike_in_any_order(state, states[0]) for state in states)
    for state in ranks4.run(loaded, second, tmp_path, "nested"):
        assert alike_in_any_order(state, states[0])
    with bcp.Checkpoint(tmp_path) as ckpt:
        assert ckpt.verify()
        assert ckpt.world_size == 4
        assert exactly_alike(ckpt.read("0.weight"), states[0]["model"]["0.weight"])


@pytest.mark.parametrize("form", sample(["flat", "nested"], "nested"))
def test_bcp_loads_it_under_any_layout(form: str, ranks4: Ranks, tmp_path: Path) -> None:
    expected = ranks4.run(saved, "fsdp_tp", tmp_path, form)[0]
    for layout in ("hsdp", "fsdp", "plain"):
        for state in ranks4.run(loaded_by_bcp, layout, tmp_path, form):
            assert alike_in_any_order(state, expected)


@pytest.mark.parametrize("layout", ["fsdp", "fsdp_tp"])
def test_dcp_loads_what_bcp_has_saved_on_four_ranks(layout: str, ranks4: Ranks, tmp_path: Path) -> None:
    expected = ranks4.run(saved_by_bcp, layout, tmp_path)[0]
    for state in ranks4.run(loaded, "hsdp", tmp_path, "flat"):
        assert alike_in_any_order(state, expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_two_ranks_and_one_load_what_four_have_saved(ranks4: Ranks, tmp_path: Path) -> None:
    expected = ranks4.run(saved, "fsdp_tp", tmp_path, "nested")[0]
    with closing(Ranks(2)) as ranks2:
        assert all(alike_in_any_order(state, expected) for state in ranks2.run(loaded, "fsdp", tmp_path, "nested"))
        again = ranks2.run(saved, "fsdp", tmp_path / "two", "nested")[0]
    found = emptied(again)
    dcp.load(found, storage_reader=bcp.dcp.StorageReader(tmp_path / "two"), no_dist=True)
    assert alike_in_any_order(found, again)


# -- as DCP's own storage ------------------------------------------------------------------------


def odd_state() -> dict[str, Any]:
    """Return tensors of many placements, those of one name equal on all ranks, and values."""
    torch.manual_seed(5)
    rank, mesh, row = dist.get_rank(), init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    tensors = {
        "both": distribute_tensor(torch.rand(9, 7), mesh, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(torch.rand(11, 3), mesh, [Shard(0), Shard(0)]),
        "replicated": distribute_tensor(torch.rand(5, 4), mesh, [Replicate(), Replicate()]),
        "rows": distribute_tensor(torch.rand(3, 4), row, [Shard(0)]),  # nothing on the last rank
        "columns": distribute_tensor(torch.rand(4, 10), mesh, [Replicate(), Shard(1)]),
        "scalar": distribute_tensor(torch.tensor(2.5), row, [Replicate()]),
        "whole": torch.rand(6, 2),
    }
    local = LocalShard.from_tensor_and_offsets(torch.full((2, 3), float(rank)), [2 * rank, 0], rank)
    sharded = init_from_local_shards([local], 8, 3)
    own = {f"of rank {rank}": torch.full((4,), float(rank)), f"value {rank}": rank}
    return {"model": tensors, "sharded": sharded, "own": own, "step": 7, "schedule": {"last": [0.1, 0.2], "mode": "a"}}


def emptied_odd(state: dict[str, Any]) -> dict[str, Any]:
    found = emptied({key: value for key, value in state.items() if key != "sharded"})
    rank = dist.get_rank()
    local = LocalShard.from_tensor_and_offsets(torch.zeros(2, 3), [2 * rank, 0], rank)
    return {**found, "sharded": init_from_local_shards([local], 8, 3)}


def locals_of(state: Any) -> Any:
    """Return what this rank holds, as plain tensors."""
    if isinstance(state, ShardedTensor):
        return [shard.tensor.clone() for shard in state.local_shards()]
    return {key: locals_of(value) for key, value in state.items()} if isinstance(state, dict) else full(state)


def both_storages(path: Path) -> tuple[bool, bool, list[tuple[int, ...]]]:
    state = odd_state()
    results = []
    for writer, reader in [
        (bcp.dcp.StorageWriter(path / "bcp"), bcp.dcp.StorageReader(path / "bcp")),
        (dcp.FileSystemWriter(path / "dcp"), dcp.FileSystemReader(path / "dcp")),
    ]:
        dcp.save(state, storage_writer=writer)
        found = emptied_odd(state)
        dcp.load(found, storage_reader=reader)
        results.append(locals_of(found))
    metadata = bcp.dcp.StorageReader(path / "bcp").read_metadata().state_dict_metadata
    theirs = dcp.FileSystemReader(path / "dcp").read_metadata().state_dict_metadata
    assert metadata.keys() == theirs.keys()
    sizes = [getattr(metadata[name], "size", None) == getattr(theirs[name], "size", None) for name in theirs]
    return exactly_alike(*results), alike_in_any_order(results[0], locals_of(state)), sizes


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_many_placements_come_back_as_from_dcp_s_own_storage(ranks4: Ranks, tmp_path: Path) -> None:
    for equal, right, sizes in ranks4.run(both_storages, tmp_path):
        assert equal
        assert right
        assert all(sizes)
    assert bcp.Checkpoint(tmp_path / "bcp").verify()
    assert len(list((tmp_path / "bcp" / "receipts").iterdir())) == 4


# -- background and failures ---------------------------------------------------------------------


def in_background(path: Path, kind: AsyncCheckpointerType) -> Any:
    model, optimizer = trained("fsdp")
    state = state_of(model, optimizer, flat=True)
    expected = full(state)
    future = dcp.async_save(state, storage_writer=bcp.dcp.StorageWriter(path), async_checkpointer_type=kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    future.result()
    return expected


def test_a_save_in_the_background_has_the_values_of_its_beginning(ranks4: Ranks, tmp_path: Path) -> None:
    expected = ranks4.run(in_background, tmp_path, AsyncCheckpointerType.THREAD)[0]
    for state in ranks4.run(loaded, "fsdp_tp", tmp_path, "flat"):
        assert alike_in_any_order(state, expected)


class Broken(dcp.DefaultSavePlanner):
    """Fails on rank 2 when it gives its data."""

    def resolve_data(self, item: WriteItem) -> Any:
        if dist.get_rank() == 2:
            raise bcp.StateError("rank 2 has lost its memory")
        return super().resolve_data(item)


def one_fails(path: Path) -> tuple[dict[int, str], bool]:
    state = state_of(*trained("fsdp"), flat=True)
    try:
        dcp.save(state, storage_writer=bcp.dcp.StorageWriter(path), planner=Broken())
    except dcp.CheckpointException as error:
        failures = {rank: f"{type(each).__name__}: {each}" for rank, (each, _) in error.failures.items()}
    committed = (path / "metadata.arrow").exists()
    dist.barrier()
    dcp.save(state, storage_writer=bcp.dcp.StorageWriter(path))  # the ranks still agree
    return failures, committed


def test_the_failure_of_one_rank_is_that_of_all_and_nothing_is_committed(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(one_fails, tmp_path) == [({2: "StateError: rank 2 has lost its memory"}, False)] * 4
    with bcp.Checkpoint(tmp_path) as ckpt:
        assert ckpt.verify().others == ()


def refused(path: Path) -> dict[int, str]:
    state = {"w": torch.ones(4)}
    dcp.save(state, storage_writer=bcp.dcp.StorageWriter(path))
    try:
        dcp.save(state, storage_writer=bcp.dcp.StorageWriter(path))
    except dcp.CheckpointException as error:
        return {rank: type(each).__name__ for rank, (each, _) in error.failures.items()}
    return {}


def test_a_committed_checkpoint_is_refused_on_all_ranks(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(refused, tmp_path) == [{0: "ExistsError"}] * 4


class Deadly(LocalBackend):
    """Kills the process in place of the commit."""

    async def put_if(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_in_the_commit(_: int, path: Path) -> None:
    writer = bcp.dcp.StorageWriter(Deadly(path), overwrite=True)
    dcp.save({"w": torch.full((4,), 2.0)}, storage_writer=writer, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4)}, storage_writer=bcp.dcp.StorageWriter(tmp_path), no_dist=True)
    before = len(list(tmp_path.rglob("*")))
    assert ended(started(1, killed_in_the_commit, tmp_path), 60.0) == [-signal.SIGKILL]
    assert len(list(tmp_path.rglob("*"))) > before
    found = {"w": torch.zeros(4)}
    dcp.load(found, storage_reader=bcp.dcp.StorageReader(tmp_path), no_dist=True)
    assert torch.equal(found["w"], torch.ones(4))


def damage_met(path: Path) -> dict[int, str]:
    state = state_of(*trained("fsdp"), flat=True)
    dcp.save(state, storage_writer=bcp.dcp.StorageWriter(path))
    if dist.get_rank() == 0:
        name = next(each for each in (path / "model").iterdir() if each.name.startswith("00003"))
        data = bytearray(name.read_bytes())
        data[-1] ^= 1
        name.write_bytes(data)
    dist.barrier()
    try:
        dcp.load(emptied(state), storage_reader=bcp.dcp.StorageReader(path))
    except dcp.CheckpointException as error:
        return {rank: type(each).__name__ for rank, (each, _) in error.failures.items()}
    return {}


def test_damage_that_one_rank_meets_reaches_all(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(damage_met, tmp_path) == [{3: "CorruptError"}] * 4
