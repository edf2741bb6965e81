"""What torch_checkpointing, DCP and torchsnapshot get wrong, one test a defect; each was reproduced there."""

from __future__ import annotations

import os
import secrets
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiofiles.os
import peer_defects
import pytest
import torch
from checkpoints import MIB, SECONDS, Gate, equal, files, flip, metadata, model, tensors, train, training, values
from counted import growth
from divided import divided
from forked import run_forked
from ranks import Ranks

import bcp
from bcp.backends.files import temp_path
from bcp.format.metadata import data_key
from bcp.plan.box import Box
from bcp.plan.read.reads import wants
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta

# -- torch_checkpointing -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 511, 4095, 4096, 4097, MIB - 1, MIB + 1])
def test_default_options_save_any_size(tmp_path: Path, count: int) -> None:
    whole = torch.arange(count).to(torch.uint8)
    bcp.save(tmp_path, {"model": {"w": whole}})
    target = torch.zeros(count, dtype=torch.uint8)
    bcp.load(tmp_path, {"model": {"w": target}})
    assert torch.equal(target, whole)


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2, 3])
def test_world_size_change_loads_the_right_rows_without_cuda(ranks4: Ranks, tmp_path: Path, size: int) -> None:
    ranks4.run(peer_defects.save_sharded, tmp_path, ("S0",))
    results = ranks4.run(peer_defects.load_sharded, tmp_path, size, ("S0",))
    assert all(right for right, *_ in results)


@pytest.mark.dist
def test_non_tensor_leaves_survive_resharding(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(peer_defects.save_sharded, tmp_path, ("S0",))
    for size in (1, 2, 4):
        assert [epoch for _, epoch, _ in ranks4.run(peer_defects.load_sharded, tmp_path, size, ("S1",))] == [7] * 4


@pytest.mark.dist
@pytest.mark.parametrize("placements", [("T0", "S0"), ("T0", "R"), ("T0", "S1")])
def test_non_adjacent_strided_shards_are_right(ranks4: Ranks, tmp_path: Path, placements: tuple[str, str]) -> None:
    ranks4.run(peer_defects.save_sharded, tmp_path, placements)
    for size, other in [(4, ("S0",)), (1, ("R",)), (4, placements), (3, ("S1",))]:
        results = ranks4.run(peer_defects.load_sharded, tmp_path, size, other)
        assert all(right for right, *_ in results), (size, other)


def test_optimizer_state_that_appears_later_is_described(tmp_path: Path) -> None:
    states = training(steps=0)
    bcp.save(tmp_path / "0", states)
    train(states["model"], states["optimizer"])
    bcp.save(tmp_path / "1", states)
    names = [set(metadata(tmp_path / step).layout.tensors.fqn) for step in ("0", "1")]
    assert {"state.0.weight.exp_avg", "state.2.bias.exp_avg_sq", "state.1.weight.step"} <= names[1] - names[0]
    target = training(seed=1, steps=0)
    bcp.load(tmp_path / "1", target)
    assert equal(tensors(target), tensors(states))


def test_values_are_those_of_the_save_and_not_of_the_first_one(tmp_path: Path) -> None:
    states = training()
    for step in (0, 1):
        states["optimizer"].param_groups[0]["lr"] = float(step)
        bcp.save(tmp_path / str(step), states)
        assert values(tmp_path / str(step))["optimizer", "param_groups.0.weight.lr"] == step


@pytest.mark.dist
def test_a_failed_save_does_not_end_checkpointing(ranks4: Ranks, tmp_path: Path) -> None:
    said = ranks4.run(peer_defects.fail_and_save_again, tmp_path)
    assert said == [["StageError" if rank == 1 else "PeerError"] * 3 for rank in range(4)]


def test_files_are_synced_before_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    fsync, rename, link = os.fsync, os.rename, os.link

    def note_fsync(fd: int) -> None:
        done.append(("fsync", str(Path(f"/proc/self/fd/{fd}").readlink())))
        fsync(fd)

    def note_rename(source: Any, target: Any) -> None:
        done.append(("rename", f"{source} {target}"))
        rename(source, target)

    def note_link(source: Any, target: Any) -> None:
        done.append(("rename", f"{source} {target}"))  # a link gives the metadata its name, if nobody has it
        link(source, target)

    async def anote_rename(source: Any, target: Any) -> None:
        note_rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(os, "link", note_link)
    monkeypatch.setattr(aiofiles.os, "rename", anote_rename)
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("this flushes everybody's files"))
    bcp.save(tmp_path, training(), options=bcp.SaveOptions(record=False))
    renames = [(at, *what.split()) for at, (how, what) in enumerate(done) if how == "rename"]
    assert {target for *_, target in renames} == {str(tmp_path / name) for name in files(tmp_path)}
    for at, source, target in renames:
        assert ("fsync", source) in done[:at]
        assert ("fsync", str(Path(target).parent)) in done[at:]
    *others, (last, _, target) = renames
    assert target == str(tmp_path / "metadata.arrow")
    for at, _, other in others:
        assert ("fsync", str(Path(other).parent)) in done[at:last], "names are durable before the checkpoint counts"


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    shared = torch.ones(300_000)
    bcp.save(tmp_path, {"model": {"embedding": shared, "head": shared}})
    (data,) = (tmp_path / "model").iterdir()
    assert data.stat().st_size < 1.1 * shared.nbytes


def test_stale_temp_files_do_not_ride_along(tmp_path: Path) -> None:
    stale = temp_path(tmp_path / data_key(0, 0, secrets.token_hex(8), encoded=False))
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of a save that was killed")
    bcp.save(tmp_path, model(3))
    assert not stale.exists()
    assert len(files(tmp_path)) == 3
    target = model(0)
    bcp.load(tmp_path, target)
    assert target["model"]["w"].eq(3).all()


def test_load_planning_takes_no_lines_for_each_source_rank() -> None:
    def intersected(ranks: int) -> Callable[[], None]:
        metas = [TensorMeta("model", f"layer.{n}.w", "float32", 4, (ranks, 8), (8, 1)) for n in range(200)]
        table = [ShardTable.build([ShardRow(meta, Box((rank, 0), (1, 8))) for meta in metas]) for rank in range(ranks)]
        layout = divided(table, balance="split", block_bytes=MIB).layout
        target = ShardTable.build([ShardRow(meta, Box((0, 0), (ranks // 8, 8))) for meta in metas])

        def intersect() -> None:
            assert len(wants(layout, target)) == 200 * ranks // 8

        return intersect

    assert growth(intersected, 64) < 1.1


# -- DCP ---------------------------------------------------------------------------------------------


def test_fp32_then_bf16_of_the_same_shapes(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        path, weight = tmp_path / str(dtype), torch.full((300,), 1.5, dtype=dtype)
        bcp.save(path, {"model": {"w": weight}})
        assert metadata(path).layout.tensors.dtype == (str(dtype).removeprefix("torch."),)
        target = torch.zeros(300, dtype=dtype)
        bcp.load(path, {"model": {"w": target}})
        assert torch.equal(target, weight)


def test_two_alternating_states_do_not_evict_one_anothers_plans(tmp_path: Path) -> None:
    actor, critic = ({"model": {f"only here {name}": torch.ones(5)}} for name in ("actor", "critic"))
    cached = [bcp.save(tmp_path / f"{n}", (actor, critic)[n % 2]).plan_cached for n in range(6)]
    assert cached == [False, False, True, True, True, True]


def test_a_crash_while_saving_again_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    bcp.save(tmp_path, model(1, count=MIB))
    before = files(tmp_path)
    program = """
        import os, sys, torch, bcp
        async def die(receipt):
            os._exit(77)
        options = bcp.SaveOptions(edit=lambda g: g.after("upload", bcp.extend.Stage("die", die)), part_bytes=1 << 20)
        bcp.save(sys.argv[1], {"model": {"w": torch.full((1 << 20,), 2.0)}}, overwrite=True, options=options)
    """
    run = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    assert run_forked(run, timeout=240).returncode == 77
    assert before.items() <= files(tmp_path).items()
    target = model(0, count=MIB)
    bcp.load(tmp_path, target)
    assert target["model"]["w"].eq(1).all()
    bcp.save(tmp_path, model(3, count=MIB), overwrite=True)
    assert len(files(tmp_path)) == 3


def test_no_silent_cast(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.full((4,), 1 + 2**-12)}})
    target = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(bcp.DtypeMismatchError, match=r"model: w is float32 in the checkpoint, bfloat16 in the target"):
        bcp.load(tmp_path, {"model": {"w": target}})
    assert not target.any()
    bcp.load(tmp_path, {"model": {"w": target}}, options=bcp.LoadOptions(cast=True))
    assert target.eq(1).all()


def test_failures_derive_from_exception(tmp_path: Path) -> None:
    kinds = [getattr(bcp, name) for name in bcp.errors.__all__]
    assert all(issubclass(kind, bcp.BcpError) and issubclass(kind, Exception) for kind in kinds)
    caught: Exception | None = None
    try:
        bcp.load(tmp_path, model())
    except Exception as error:  # noqa: BLE001 -- that this catches it is the test
        caught = error
    assert isinstance(caught, FileNotFoundError)


@pytest.mark.dist
def test_no_full_tensor_reads_for_a_narrow_target(ranks4: Ranks, tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": peer_defects.whole(), "epoch": 7}})
    results = ranks4.run(peer_defects.load_sharded, tmp_path, 4, ("S0",))
    for right, _, read_nbytes in results:
        assert right
        assert read_nbytes <= peer_defects.whole().nbytes / 4 + 2 * MIB


@pytest.mark.dist
def test_the_training_group_is_left_alone(ranks4: Ranks, tmp_path: Path) -> None:
    for before, barrier, after in ranks4.run(peer_defects.collectives, tmp_path):
        assert barrier > before, "the count does count"
        assert after == barrier


@pytest.mark.dist
def test_one_flipped_bit_is_noticed_on_every_rank(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(peer_defects.save_replicated, tmp_path)
    for name in (f"model/{2:05d}-*", "receipts/*", "metadata.arrow"):
        (file, *_) = tmp_path.glob(name)
        flip(file, -1000)
        said = ranks4.run(peer_defects.load_damaged, tmp_path)
        assert {kind for kind, _ in said} <= {"CorruptError", "PeerError"}
        assert all("CorruptError" in kind + text and file.name in text for kind, text in said)
        flip(file, -1000)
    assert {kind for kind, _ in ranks4.run(peer_defects.load_damaged, tmp_path)} == {"nothing"}


def test_no_thread_and_no_file_is_left_open_for_each_save(tmp_path: Path) -> None:
    def use() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    states = {"model": {f"w{n}": torch.ones(10) for n in range(500)}}
    for step in range(10):
        bcp.save(tmp_path / str(step), states)
        if step == 4:
            before = use()
    assert max(now - then for now, then in zip(use(), before, strict=True)) < 5  # pools of threads grow when needed


# -- torchsnapshot -----------------------------------------------------------------------------------


def test_huge_cpu_tensors_are_copied_before_an_async_save_returns(tmp_path: Path) -> None:
    weight, gate = torch.ones(40 * MIB), Gate()
    pending = bcp.save(tmp_path, {"model": {"w": weight}}, async_checkpoint=True, options=gate.options)
    weight.zero_()
    gate.opened.set()
    pending.wait(SECONDS)
    bcp.load(tmp_path, {"model": {"w": weight}})
    assert weight.eq(1).all()


def test_random_states_are_the_same_after_save_and_load(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    bcp.save(tmp_path, model())
    bcp.load(tmp_path, model())
    assert torch.equal(torch.get_rng_state(), before)
