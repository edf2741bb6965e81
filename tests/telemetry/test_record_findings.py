"""Recordings of four ranks: the slow rank, the slow stage, retries and the failed rank are named."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pyarrow as pa
import pytest
import torch
from fake_store import FakeStore
from patience import patiently
from ranks import Ranks
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bcp
from bcp.backends.local import LocalBackend
from bcp.backends.objects import ObjectBackend, RequestError
from bcp.events import PhaseEvent
from bcp.telemetry.columns import covered
from bcp.telemetry.findings import Summary
from bcp.telemetry.recording import EVENTS, RankRecord, Recording
from bcp.telemetry.store import decode
from bcp.telemetry.summary import summary_of, trends_of
from bcp.testing import FaultyBackend

MIB = 1 << 20
SLOW = 0.2
"""Seconds that a slow stage takes for each part: many times what this machine takes for all stages."""


def own(rank: int, parts: int = 2) -> dict[str, Any]:
    """Return a state of which each rank writes its own tensor."""
    return {"model": {f"w{rank}": torch.full((parts * MIB // 4,), float(rank))}}


def recordings(path: Path, kind: str = "") -> list[Recording]:
    return [decode(file.read_bytes(), file.name) for file in sorted((path / "telemetry").glob(f"{kind}*"))]


def summary(path: Path, kind: str) -> Summary:
    (recording,) = recordings(path, kind)
    return summary_of(recording)


# -- jobs of four ranks -------------------------------------------------------------------------------


def save_with_a_slow_rank(path: Path, slow: int, seconds: float) -> None:
    """Save; a stage of the slow rank takes several times as long as all work of the others, which it waits for.

    ``seconds`` is how much longer it takes.
    """
    rank, others, began = dist.get_rank(), dist.get_world_size() - 1, time.monotonic()
    entered, written = count(1), count(1)

    async def mine(part: Any) -> Any:
        if rank == slow and next(entered) == 1:
            while len([*path.parent.glob("written-*")]) < others:  # noqa: ASYNC110 -- of other processes
                await anyio.sleep(0.001)
            await anyio.sleep(3 * (time.monotonic() - began) + seconds)
        return part

    async def tell(part: Any) -> Any:
        if next(written) == 2:  # the last one
            (path.parent / f"written-{rank}").touch()
        return part

    def edit(graph: Any) -> Any:
        return graph.after("d2h", bcp.extend.Stage("mine", mine)).after("upload", bcp.extend.Stage("tell", tell))

    bcp.save(path, own(rank), options=bcp.SaveOptions(part_bytes=MIB, edit=edit))


def save_and_load(path: Path) -> None:
    rank = dist.get_rank()
    bcp.save(path, own(rank))
    bcp.load(path, own(rank))


def save_of_two_minds(path: Path) -> str:
    try:
        bcp.save(path, own(dist.get_rank()), options=bcp.SaveOptions(record=dist.get_rank() != 2))
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def fail_on(path: Path, guilty: int) -> str:
    rank = dist.get_rank()

    async def fail(part: Any) -> Any:
        if rank == guilty:
            raise ValueError("boom")
        return part

    options = bcp.SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("mine", fail)))
    try:
        bcp.save(path, own(rank), options=options)
    except bcp.BcpError as error:
        return type(error).__name__
    return "saved"


def fail_once_the_others_have_written(path: Path, marks: Path) -> str:
    """Let rank 0 fail while the others wait for the commit; rank 1 is so slow that it lists an empty directory.

    Rank 0 puts its own record last, so that nothing else is in the directory then.
    """
    rank = dist.get_rank()

    async def fail(part: Any) -> Any:
        if rank == 0:
            await until(lambda: len([*marks.glob("written-*")]) == 3)
            raise ValueError("boom")
        return part

    def tell(event: bcp.extend.Event) -> None:
        if isinstance(event, PhaseEvent) and event.phase == "write" and not event.error:
            (marks / f"written-{rank}").touch()

    async def be_late(_: str) -> None:
        await until((marks / "ended-1").exists if rank == 0 else lambda: not names(path))

    late = {0: ("put", "telemetry"), 1: ("list", "")}
    verb, key = late.get(rank, ("list", "none"))
    backend = FaultyBackend(LocalBackend(path), verb, be_late, key=key)
    options = bcp.SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("mine", fail)), observe=tell)
    try:
        bcp.save(backend, own(rank), options=options)
    except bcp.BcpError as error:
        return type(error).__name__
    finally:
        (marks / f"ended-{rank}").touch()
    return "saved"


async def until(condition: Callable[[], bool]) -> None:
    """Wait for other processes."""
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.001)


def names(path: Path) -> list[Path]:
    """Return all files below a directory."""
    return [file for file in path.rglob("*") if file.is_file()]


def refuse_on_rank_1(path: Path) -> str:
    rank = dist.get_rank()
    state = own(rank)
    if rank == 1:
        state = {"model": {"w": torch.ones(3, device="meta")}}
    try:
        bcp.save(path, state)
    except bcp.BcpError as error:
        return type(error).__name__
    return "saved"


def save_in_a_mesh(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    small = DTensor.from_local(torch.ones(2), mesh["tp"], [Shard(0)], run_check=False)
    large = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)], run_check=False)
    bcp.save(path, {"model": {"a": small, "b": large}}, framework="plain")


@pytest.mark.dist
@pytest.mark.parametrize("slow", [0, 3])
def test_a_slow_rank_is_the_named_straggler(ranks4: Ranks, tmp_path: Path, slow: int) -> None:
    def check(seconds: float) -> None:
        path = tmp_path / str(seconds) / "checkpoint"
        path.parent.mkdir()
        ranks4.run(save_with_a_slow_rank, path, slow, seconds)
        found = summary(path, "save")
        assert found.world_size == 4
        assert found.stragglers[0].rank == slow
        named = {straggler.what: straggler for straggler in found.stragglers if straggler.rank == slow}
        assert {"mine", "end"} <= named.keys()
        assert named["mine"].seconds >= named["mine"].median + seconds
        assert found.bottleneck is not None
        assert (found.bottleneck.rank, found.bottleneck.stage) == (slow, "mine")

    patiently(check, SLOW, 60.0)


@pytest.mark.dist
def test_all_ranks_are_in_one_recording(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(save_and_load, tmp_path)
    for kind, stages in (("save", {"d2h", "upload"}), ("load", {"read", "exchange"})):
        (recording,) = recordings(tmp_path, kind)
        assert [rank.rank for rank in recording.ranks] == [0, 1, 2, 3]
        assert [rank.local_rank for rank in recording.ranks] == [0, 1, 2, 3]
        assert len({rank.host for rank in recording.ranks}) == 1
        assert recording.time == pytest.approx(min(rank.started for rank in recording.ranks), abs=1e-5)
        rows = recording.events.to_pylist()
        for rank in range(4):
            assert stages <= {row["name"] for row in rows if row["rank"] == rank and row["kind"] == "stage"}
        ends = {row["rank"]: row["start"] + row["seconds"] for row in rows if row["name"] in ("commit", "read")}
        assert set(ends) == {0, 1, 2, 3}
    balance = summary(tmp_path, "save").balance
    assert balance is not None
    assert 1.0 <= balance.ratio < 1.1


@pytest.mark.dist
def test_ranks_that_do_not_all_record_are_refused(ranks4: Ranks, tmp_path: Path) -> None:
    for outcome in ranks4.run(save_of_two_minds, tmp_path):
        assert outcome.startswith("InputError")
        assert "record=False" in outcome


@pytest.mark.dist
@pytest.mark.parametrize(("guilty", "telling"), [(0, [0, 1]), (2, [0, 2])])
def test_the_guilty_rank_and_one_more_tell_of_a_failure(
    ranks4: Ranks, tmp_path: Path, guilty: int, telling: list[int]
) -> None:
    outcomes = ranks4.run(fail_on, tmp_path, guilty)
    assert outcomes == ["StageError" if rank == guilty else "PeerError" for rank in range(4)]
    found = recordings(tmp_path)
    assert [recording.failures[0].rank for recording in found] in (telling, telling[::-1])
    assert {recording.failures[0].guilty for recording in found} == {guilty}
    assert len({recording.operation for recording in found}) == 1
    (own_words,) = (each.failures[0] for each in found if each.failures[0].rank == guilty)
    assert (own_words.stage, own_words.tensors) == ("mine", (f"w{guilty}",))
    report = bcp.report(tmp_path)
    (joined,) = report.recordings
    assert [failure.rank for failure in joined.failures] == [guilty, *(rank for rank in telling if rank != guilty)]
    assert [rank.rank for rank in joined.ranks] == telling
    assert f"Failure of rank {guilty} in phase write, stage mine" in report.text().splitlines()[2]


@pytest.mark.dist
def test_a_rank_tells_of_a_failure_after_rank_0_has_removed_all_files(ranks4: Ranks, tmp_path: Path) -> None:
    path, marks = tmp_path / "checkpoint", tmp_path / "marks"
    marks.mkdir()
    outcomes = ranks4.run(fail_once_the_others_have_written, path, marks)
    assert outcomes == ["StageError", "PeerError", "PeerError", "PeerError"]
    (joined,) = bcp.report(path).recordings
    assert [(failure.rank, failure.guilty, failure.phase) for failure in joined.failures] == [
        (0, 0, "write"),
        (1, 0, "commit"),
    ]
    assert {file.parent.name for file in names(path)} == {"telemetry"}


@pytest.mark.dist
def test_a_call_that_one_rank_refuses_leaves_nothing(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(refuse_on_rank_1, tmp_path / "c") == ["PeerError", "StateError", "PeerError", "PeerError"]
    assert not (tmp_path / "c").exists()


@pytest.mark.dist
def test_ranks_have_their_coordinates_in_the_largest_mesh(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(save_in_a_mesh, tmp_path)
    (recording,) = recordings(tmp_path)
    assert [rank.coordinates for rank in recording.ranks] == [
        {"dp": 0, "tp": 0},
        {"dp": 0, "tp": 1},
        {"dp": 1, "tp": 0},
        {"dp": 1, "tp": 1},
    ]


# -- stages and storage -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["d2h", "upload"])
def test_a_slow_stage_is_the_bottleneck(stage: str) -> None:
    def check(seconds: float) -> None:
        async def wait(part: Any) -> Any:
            await anyio.sleep(seconds)
            return part

        def edit(graph: bcp.extend.Graph) -> bcp.extend.Graph:
            slow = bcp.extend.Stage("slow", wait)
            return graph.before("d2h", slow) if stage == "d2h" else graph.after("upload", slow)

        store = FakeStore()  # a busy disk may take longer than the stage
        bcp.save(ObjectBackend(store), own(0, parts=6), options=bcp.SaveOptions(part_bytes=MIB, edit=edit))
        (key,) = (key for key in store.objects if key.startswith("telemetry/"))
        found = summary_of(decode(store.objects[key][0], key))
        assert found.bottleneck is not None
        assert found.bottleneck.stage == "slow"
        assert found.bottleneck.utilisation > 0.5
        assert "parts waited for it" in found.bottleneck.reason
        (slow,) = (figures for figures in found.stages if figures.name == "slow")
        assert slow.items == 6
        assert slow.busy >= 6 * seconds
        assert slow.waited > seconds
        assert all(figures.wall < slow.wall for figures in found.stages if figures.name != "slow")

    patiently(check, SLOW, 10.0)


def test_a_flaky_backend_shows_its_retries() -> None:
    store = FakeStore()
    left = {"part": 3, "put": 1}

    def fail(what: str) -> None:
        verb = what.partition(" ")[0]
        if left.get(verb):
            left[verb] -= 1
            raise RequestError("503 busy", transient=True)

    store.fail = fail
    backend = ObjectBackend(store, bcp.RetryPolicy(first_pause_seconds=1e-4, longest_pause_seconds=1e-3))
    report = bcp.save(backend, {"model": {"w": torch.ones(5 * MIB)}}, options=bcp.SaveOptions(part_bytes=8 * MIB))
    assert left == {"part": 0, "put": 0}
    assert report.retries == 4
    (key,) = (key for key in store.objects if key.startswith("telemetry/"))
    found = summary_of(decode(store.objects[key][0], key))
    assert found.retries == 4
    assert found.retries_by_rank == {0: 4}
    retried = {verb.name: verb.retries for verb in found.verbs if verb.retries}
    assert retried["part"] == 3
    assert sum(retried.values()) == 4
    assert sum(request.status == "again" for request in found.slowest) <= 4


# -- by hand ------------------------------------------------------------------------------------------


def made(
    rows: list[dict[str, Any]], ranks: int = 1, records: list[RankRecord] | None = None, **changed: Any
) -> Recording:
    defaults = {"rank": 0, "kind": "stage", "name": "", "item": "", "nbytes": 0, "start": 0.0, "seconds": 0.0}
    if records is None:
        records = [RankRecord(rank=rank, host="h", local_rank=0, figures={"seconds": 4.0}) for rank in range(ranks)]
    more = {"waited": 0.0, "attempt": 1, "status": "ok", "said": ""}
    fields: dict[str, Any] = {
        "kind": "save",
        "path": "p",
        "operation": "0" * 16,
        "step": 1,
        "run": "",
        "background": False,
        "version": "0",
        "world_size": ranks,
        "time": 0.0,
        "ranks": records,
        "events": pa.Table.from_pylist([{**defaults, **more, **row} for row in rows], schema=EVENTS),
    }
    return Recording(**(fields | changed))


def test_intervals_that_overlap_count_once() -> None:
    start, end = np.array([0.0, 1.0, 5.0, 0.5, 9.0]), np.array([2.0, 3.0, 6.0, 1.0, 9.0])
    group = np.array([0, 0, 0, 1, 2])
    assert covered(start, end, group, 4) == pytest.approx([4.0, 0.5, 0.0, 0.0])


def test_figures_of_stages_phases_and_storage() -> None:
    rows = [
        {"name": "a", "start": 0.0, "seconds": 1.0, "nbytes": 10, "waited": 0.5},
        {"name": "a", "start": 0.5, "seconds": 1.0, "nbytes": 10},
        {"name": "b", "start": 1.0, "seconds": 3.0, "nbytes": 20, "waited": 2.0},
        {"name": "a", "rank": 1, "start": 3.0, "seconds": 1.0, "nbytes": 5},
        {"kind": "phase", "name": "write", "start": 0.0, "seconds": 4.0},
        {"kind": "phase", "name": "write", "rank": 1, "start": 0.0, "seconds": 3.0},
        {"kind": "request", "name": "put", "item": "k", "seconds": 2.0, "status": "again", "said": "busy"},
        {"kind": "request", "name": "put", "item": "k", "seconds": 1.0, "attempt": 2},
        {"kind": "budget", "item": "x", "seconds": 0.25},
    ]
    found = summary_of(made(rows, ranks=2))
    a, b = found.stages
    assert (a.name, a.items, a.nbytes, a.busy, a.wall) == ("a", 3, 25, 3.0, 2.5)
    assert (b.wall, b.throughput, b.waited) == (3.0, 20 / 3, 2.0)
    assert a.utilisation == pytest.approx((1.5 / 4 + 1.0) / 2)
    (phase,) = found.phases
    assert (phase.seconds, phase.median, phase.rank) == (4.0, 3.5, 0)
    (put,) = found.verbs
    assert (put.count, put.retries, put.failures, put.longest) == (2, 1, 0, 2.0)
    assert (found.slowest[0].key, found.slowest[0].status) == ("k", "again")
    assert found.budget_wait == 0.25
    assert found.overlap == pytest.approx(((1.5 + 3.0) / 4 + 1.0) / 2)
    assert (found.seconds, found.blocking, found.background) == (4.0, 4.0, 0.0)


def test_a_rank_is_no_straggler_by_a_factor_or_a_floor_alone() -> None:
    def named(times: list[float]) -> list[int]:
        rows = [{"name": "a", "rank": rank, "seconds": seconds} for rank, seconds in enumerate(times)]
        found = summary_of(made(rows, ranks=len(times))).stragglers
        return [straggler.rank for straggler in found if straggler.what == "a"]

    assert named([0.01, 0.01, 0.01, 0.025]) == []  # 2.5 times, but 15 ms
    assert named([1.0, 1.0, 1.0, 1.4]) == []  # 400 ms, but 1.4 times
    assert named([1.0, 1.0, 1.0, 1.6]) == [3]
    assert named([0.1, 0.3]) == [1]
    assert named([1.0]) == []


def test_a_rank_that_calls_late_is_named() -> None:
    late = [RankRecord(rank=rank, host="h", local_rank=rank, started=float(rank == 2)) for rank in range(4)]
    (straggler,) = summary_of(made([], 4, late)).stragglers
    assert (straggler.rank, straggler.what, straggler.seconds) == (2, "call", 1.0)


def test_an_empty_recording_has_findings_too() -> None:
    found = summary_of(made([], records=[]))
    assert found.bottleneck is None
    assert found.balance is None
    assert (found.seconds, found.overlap, found.retries) == (0.0, 0.0, 0)


def test_a_trend_is_told_if_the_newest_save_is_much_worse() -> None:
    def saves(*seconds: float) -> list[Summary]:
        figures = [{"seconds": each, "nbytes": 8.0} for each in seconds]
        ranks = [[RankRecord(rank=0, host="h", local_rank=0, figures=each)] for each in figures]
        return [summary_of(made([], records=each, step=step)) for step, each in enumerate(ranks)]

    told = {trend.figure: trend.ratio for trend in trends_of(saves(1.0, 1.1, 0.9, 3.0)) if trend.told}
    assert told == pytest.approx({"seconds": 3.0, "blocking": 3.0, "throughput": 1 / 3}, rel=0.15)
    assert not [trend for trend in trends_of(saves(1.0, 1.1, 0.9, 1.2)) if trend.told]
    assert not [trend for trend in trends_of(saves(3.0, 3.0, 3.0, 1.0)) if trend.told]
    assert trends_of(saves(1.0, 2.0))[0].steps == [0, 1]
    assert trends_of(saves(1.0)) == []
