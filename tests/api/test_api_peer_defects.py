"""What the open-source release of ByteCheckpoint got wrong, one test a defect; each was reproduced there."""

from __future__ import annotations

import errno
import os
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peer_defects
import pytest
import torch
from checkpoints import SECONDS, Gate, entries, equal, files, flip, metadata, model, tensors, train, training
from counted import growth
from divided import divided
from ranks import Ranks
from torch import nn

import bcp
from bcp._save import leader as save_root
from bcp.backends import LocalBackend
from bcp.plan.box import Box
from bcp.plan.read.reads import wants
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

ROOT = Path(__file__).parents[2]
SAVE_POINTS = [("open_write", ""), ("write_part", "model"), ("commit", "model"), ("put", "receipts")]


# -- asynchronous saves ------------------------------------------------------------------------------


def test_async_save_is_not_synchronous(tmp_path: Path) -> None:
    gate = Gate()
    pending = bcp.save(tmp_path, model(), async_checkpoint=True, options=gate.options)
    assert gate.reached.wait(SECONDS)
    assert not pending.done()
    assert not (tmp_path / "metadata.arrow").exists()
    gate.opened.set()
    report = pending.wait(SECONDS)
    assert (tmp_path / "metadata.arrow").exists()
    assert report.blocking_seconds < report.seconds


def test_save_returns_something_to_wait_for(tmp_path: Path) -> None:
    assert isinstance(bcp.save(tmp_path / "a", model()), bcp.SaveResult)
    pending = bcp.save(tmp_path / "b", model(), async_checkpoint=True)
    assert isinstance(pending, bcp.Pending)
    assert isinstance(pending.wait(SECONDS), bcp.SaveResult)


def test_background_failure_reaches_the_caller(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    backend = FaultyBackend(LocalBackend(tmp_path), "write_part", full)
    pending = bcp.save(backend, model(), async_checkpoint=True)
    with pytest.raises(bcp.StageError, match=r"stage 'upload' failed on model part 0.*No space left") as caught:
        pending.wait(SECONDS)
    assert caught.value.__cause__ is full
    assert pending.done()
    assert "failed" in repr(pending)


@pytest.mark.dist
def test_background_failure_reaches_every_rank(ranks4: Ranks, tmp_path: Path) -> None:
    said = ranks4.run(peer_defects.fail_in_background, tmp_path)
    assert [kind for kind, _ in said] == ["PeerError", "PeerError", "StageError", "PeerError"]
    assert all("No space left on device" in text for _, text in said)


def test_a_snapshot_is_not_torn_by_training(tmp_path: Path) -> None:
    states = training()
    before, gate = tensors(states), Gate()
    pending = bcp.save(tmp_path, states, async_checkpoint=True, options=gate.options)
    train(states["model"], states["optimizer"])
    assert not equal(tensors(states), before)
    gate.opened.set()
    pending.wait(SECONDS)
    target = training(seed=1)
    bcp.load(tmp_path, target)
    assert equal(tensors(target), before)


def test_extra_states_do_not_race_with_training(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"step": 7, "seen": [1, 2], "noise": torch.ones(3)}
    gate = Gate()
    pending = bcp.save(tmp_path, {"extra_states": extra}, async_checkpoint=True, options=gate.options)
    extra["step"] = 8
    extra["seen"].append(3)
    extra["noise"].zero_()
    gate.opened.set()
    pending.wait(SECONDS)
    loaded: dict[str, Any] = {}
    bcp.load(tmp_path, {"extra_states": loaded})
    assert (loaded["step"], loaded["seen"], loaded["noise"].tolist()) == (7, [1, 2], [1.0, 1.0, 1.0])


# -- plans -------------------------------------------------------------------------------------------


def test_plan_cache_hits_on_the_second_save(tmp_path: Path) -> None:
    states = {"model": {"only in this test": torch.ones(5)}}
    reports = [bcp.save(tmp_path / str(step), states) for step in range(3)]
    assert [report.plan_cached for report in reports] == [False, True, True]


@pytest.mark.dist
def test_plan_cache_hits_on_every_rank(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(peer_defects.plans_cached, tmp_path) == [[False, True, True]] * 4


def test_validation_takes_no_lines_for_each_shard() -> None:
    def planned(count: int) -> Callable[[], None]:
        meta = TensorMeta("model", "w", "float32", 4, (count, 2), (2, 1))
        rows = [ShardRow(meta, Box((row, 0), (1, 2))) for row in np.random.default_rng(0).permutation(count).tolist()]
        tables = [ShardTable.build(rows[rank::4]) for rank in range(4)]
        target = ShardTable.build([ShardRow(meta, Box((5, 0), (count - 5, 2)))])

        def plan() -> None:
            wanted = wants(divided(tables, balance="split", block_bytes=1 << 20).layout, target)
            assert int((wanted.stop - wanted.start).sum()) == (count - 5) * 8

        return plan

    assert growth(planned, 20_000) < 1.1


# -- bytes -------------------------------------------------------------------------------------------


def test_non_contiguous_tensors_keep_their_values(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    views = {"t": base.t(), "column": base[:, 2], "every": base[::2, 1::3], "expanded": base[:1, :1].expand(3, 2)}
    bcp.save(tmp_path, {"model": views})
    target = {name: torch.zeros(view.shape) for name, view in views.items()}
    bcp.load(tmp_path, {"model": target})
    assert equal(target, views)
    into = {"t": torch.zeros(4, 6).t(), "column": torch.zeros(4, 6)[:, 2], "every": torch.zeros(4, 6)[::2, 1::3]}
    bcp.load(tmp_path, {"model": into}, strict=False)
    assert equal(into, {name: views[name] for name in into})


def test_8x8_does_not_load_into_16x8(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(8, 8)}})
    target = torch.zeros(16, 8)
    with pytest.raises(bcp.ShapeMismatchError, match=r"model: w is \[8, 8\] in the checkpoint, \[16, 8\] in the targ"):
        bcp.load(tmp_path, {"model": {"w": target}})
    assert not target.any()


def test_strict_false_works(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"both": torch.ones(2), "old": torch.ones(3)}})
    target = {"both": torch.zeros(2), "new": torch.zeros(4)}
    report = bcp.load(tmp_path, {"model": target}, strict=False)
    assert (report.missing, report.unexpected) == (("model: new",), ("model: old",))
    assert (target["both"].tolist(), target["new"].tolist()) == ([1, 1], [0, 0, 0, 0])


def test_roles_do_not_overwrite_each_other(tmp_path: Path) -> None:
    for value, role in enumerate(["actor", "critic", None]):
        bcp.save(tmp_path, model(value), role=role)
    bcp.save(tmp_path, model(7), role="actor", overwrite=True)
    bcp.save(tmp_path, model(8), overwrite=True)
    for wanted, role in [(7, "actor"), (1, "critic"), (8, None)]:
        target = model(-1)
        bcp.load(tmp_path, target, role=role)
        assert target["model"]["w"].eq(wanted).all(), role


def test_load_reads_only_what_it_needs(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {f"w{n}": torch.full((1 << 20,), float(n)) for n in range(16)}})
    backend = CountingBackend(LocalBackend(tmp_path))
    target = {"w9": torch.zeros(1 << 20)}
    report = bcp.load(backend, {"model": target}, strict=False)
    assert target["w9"].eq(9).all()
    read = sum(nbytes for key, nbytes in backend.read.items() if key.startswith("model/"))
    assert read == report.read_nbytes <= target["w9"].nbytes + 2 * save_root.BLOCK_BYTES


# -- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operation", "key"), [*SAVE_POINTS, ("put_if", "metadata")])
def test_failed_overwrite_leaves_the_old_checkpoint(tmp_path: Path, operation: str, key: str) -> None:
    bcp.save(tmp_path, model(1, count=10_000))
    before = files(tmp_path)
    backend = FaultyBackend(LocalBackend(tmp_path), operation, OSError(errno.EIO, "broken"), key=key)
    with pytest.raises(Exception, match="broken"):
        bcp.save(backend, model(2, count=10_000), overwrite=True)
    assert before.items() <= files(tmp_path).items()
    target = model(0, count=10_000)
    bcp.load(tmp_path, target)
    assert target["model"]["w"].eq(1).all()


@pytest.mark.parametrize(("operation", "key"), SAVE_POINTS)
def test_one_failed_write_does_not_poison_later_saves(tmp_path: Path, operation: str, key: str) -> None:
    for attempt in range(3):
        fault = OSError(errno.EIO, f"broken {attempt}")
        with pytest.raises(Exception, match=f"broken {attempt}"):
            bcp.save(FaultyBackend(LocalBackend(tmp_path), operation, fault, key=key), model(attempt))
    assert [name for name in entries(tmp_path) if "." in name] == []
    bcp.save(tmp_path, model(9))
    target = model(0)
    bcp.load(tmp_path, target)
    assert target["model"]["w"].eq(9).all()
    assert len(files(tmp_path)) == 3


def test_damage_is_noticed(tmp_path: Path) -> None:
    bcp.save(tmp_path, model())
    (data,) = (tmp_path / "model").iterdir()
    flip(data, -1)
    with pytest.raises(bcp.CorruptError, match=f"model/{data.name} is corrupt: bytes 0 to 8096 have checksum"):
        bcp.load(tmp_path, model())


# -- what runs, and where ----------------------------------------------------------------------------


class Bomb:
    """Makes a file when it is unpickled, but not when it is copied or pickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __deepcopy__(self, _: Any) -> Bomb:
        return self

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("where", ["metadata", "receipt", "data", "extra state", "value"])
def test_no_code_runs_from_a_hostile_checkpoint(tmp_path: Path, where: str) -> None:
    marker, path = tmp_path / "marker", tmp_path / "c"
    states: dict[str, Any] = model()
    states["extra_states"] = {"step": 1, **({"bomb": Bomb(marker)} if where == "extra state" else {})}
    if where == "value":
        states["model"]["bomb"] = Bomb(marker)
    bcp.save(path, states, options=bcp.SaveOptions(allow_pickle=True))
    assert not marker.exists()
    places = {"metadata": "metadata.arrow", "receipt": "receipts/*", "data": "extra_states/*"}
    for file in path.glob(places[where]) if where in places else ():
        file.write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(bcp.CheckpointError):
        bcp.load(path, {**model(0), "extra_states": {}}, strict=False)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))  # noqa: S301 -- the bomb does go off
    assert marker.exists()


@pytest.mark.dist
def test_ranks_unpickle_nothing_and_look_no_address_up(ranks4: Ranks, tmp_path: Path) -> None:
    for unpickled, addresses in ranks4.run(peer_defects.audited, tmp_path):
        assert unpickled == []
        assert "127.0.0.1" in addresses, "the audit hook sees the ranks' own connections"
        assert {*addresses} <= {"127.0.0.1", "10.255.255.255"}  # the latter asks for a route, and sends nothing


def test_no_public_address_lookup_in_one_process(tmp_path: Path) -> None:
    unpickled, addresses = peer_defects.audited(tmp_path)
    assert (unpickled, addresses) == ([], [])


@pytest.fixture(scope="module")
def whole_job(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Run a job of one process to its end, in a session of its own."""
    job = [sys.executable, peer_defects.__file__, str(tmp_path_factory.mktemp("job"))]
    most = peer_defects.MOST_SECONDS
    return subprocess.run(job, capture_output=True, text=True, timeout=most, start_new_session=True, check=False)  # noqa: S603 -- our own program


def test_no_server_process_outlives_the_job(whole_job: subprocess.CompletedProcess[str]) -> None:
    assert whole_job.returncode == 0, whole_job.stderr
    (session,) = re.findall(r"session (\d+), children \[\]", whole_job.stdout)
    assert session not in [stat.read_text().rpartition(")")[2].split()[3] for stat in peer_defects.processes()]


def test_nothing_is_monkey_patched(whole_job: subprocess.CompletedProcess[str]) -> None:
    (count, changed) = re.findall(r"looked at (\d+) functions, changed: (.*)", whole_job.stdout)[0]
    assert int(count) > 10_000
    assert changed == "[]"


def test_dependencies_are_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [need for need in project["dependencies"] if not need.startswith("bcp-checkpoint[")]
    assert needed
    assert all(re.fullmatch(r"[a-z-]+>=[0-9.]+", need) for need in needed), needed


@pytest.mark.parametrize("version", ["10.0.0", "2.13.0+cu130", "2.20.0a0+git1234"])
def test_versions_are_not_compared_as_strings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(save_root, "__version__", version)
    states = training()
    bcp.save(tmp_path, states)
    target = training(seed=1)
    bcp.load(tmp_path, target)
    assert metadata(tmp_path).commit.version == version
    assert equal(tensors(target), tensors(states))


# -- training ----------------------------------------------------------------------------------------


def test_save_before_first_step_changes_nothing(tmp_path: Path) -> None:
    states = training(steps=0)
    before = tensors(states)
    bcp.save(tmp_path, states)
    assert equal(tensors(states), before)
    assert not states["optimizer"].state
    assert all(parameter.grad is None for parameter in states["model"].parameters())
    target = training(seed=1, steps=0)
    bcp.load(tmp_path, target)
    assert equal(tensors(target), before)
    for each in (states, target):
        train(each["model"], each["optimizer"])
    assert equal(tensors(target), tensors(states))


def test_extra_states_load_on_current_torch(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    extra = {"scheduler": scheduler, "torch": torch.get_rng_state(), "numpy": np.random.get_state()}  # noqa: NPY002 -- what trainers save
    bcp.save(tmp_path, {"extra_states": extra})
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(net.parameters(), lr=1.0), 1)
    loaded: dict[str, Any] = {"scheduler": other}
    bcp.load(tmp_path, {"extra_states": loaded})
    assert other.state_dict() == scheduler.state_dict()
    assert torch.equal(loaded["torch"], extra["torch"])
    assert np.array_equal(loaded["numpy"][1], extra["numpy"][1])


@pytest.mark.dist
def test_ddp_does_not_write_everything_on_rank_0(ranks4: Ranks, tmp_path: Path) -> None:
    written = [nbytes for nbytes, _ in ranks4.run(peer_defects.save_ddp, tmp_path)]
    assert max(written) < 1.1 * sum(written) / 4


@pytest.mark.dist
def test_optimizer_is_keyed_by_fqn_under_ddp(ranks4: Ranks, tmp_path: Path) -> None:
    (fqns,) = {fqns for _, fqns in ranks4.run(peer_defects.save_ddp, tmp_path)}
    states = {f"state.{fqn}.{key}" for fqn in fqns for key in ("exp_avg", "exp_avg_sq", "step")}
    assert set(metadata(tmp_path).layout.tensors.fqn) == states | set(fqns)
