from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, Metric

import bcp
from bcp.backends import LocalBackend
from bcp.coordinators import memory_coordinators
from bcp.telemetry import metrics
from bcp.telemetry.metrics import BOUNDARIES, Metrics
from bcp.telemetry.watch import Watch, add_sink, remove_sink
from bcp.testing.storage_fakes import FaultyBackend

SECONDS = 60.0
MIB = 1 << 20
BACKGROUND, WAITED = (True,), (False,)


class Read:
    """What the sink has told an SDK."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])
        self.sink = Metrics(self.provider.get_meter("bcp"))

    def metrics(self) -> dict[str, Metric]:
        data = self.reader.get_metrics_data()
        resources = data.resource_metrics if data is not None else []
        scopes = [scope for resource in resources for scope in resource.scope_metrics]
        return {metric.name: metric for scope in scopes for metric in scope.metrics}

    def points(self, name: str) -> dict[Mapping[str, Any] | tuple[Any, ...], Any]:
        """Return the points of a metric by the values of their labels, in the order of the labels' names."""
        metric = self.metrics().get(name)
        points = metric.data.data_points if metric is not None else ()
        return {tuple(value for _, value in sorted((point.attributes or {}).items())): point for point in points}

    def value(self, name: str, *labels: object) -> Any:
        return self.points(name)[labels].value

    def values(self, name: str) -> dict[Any, Any]:
        return {labels: point.value for labels, point in self.points(name).items()}

    def histogram(self, name: str, *labels: object) -> HistogramDataPoint:
        found: HistogramDataPoint = self.points(name)[labels]
        return found


@pytest.fixture
def read() -> Iterator[Read]:
    read = Read()
    add_sink(read.sink)
    yield read
    remove_sink(read.sink)
    read.provider.shutdown()


class Clock:
    """A wall clock that tests set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def time(self) -> float:
        return time.time() + self.ahead

    def monotonic(self) -> float:
        return time.monotonic()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def model(count: int = 1) -> dict[str, Any]:
    return {"model": {f"w{index}": torch.ones(MIB // 4) for index in range(count)}}


def small_parts(**more: Any) -> bcp.SaveOptions:
    return bcp.SaveOptions(part_bytes=MIB, **more)


# -- durations and bytes -----------------------------------------------------------------------------


def test_a_background_save(tmp_path: Path, read: Read) -> None:
    report = bcp.save(tmp_path, model(), async_checkpoint=True).wait(SECONDS)
    blocking, durable = (
        read.histogram("bcp.save.blocking", *BACKGROUND),
        read.histogram("bcp.save.durable", *BACKGROUND),
    )
    assert (blocking.count, blocking.sum) == (1, report.blocking_seconds)
    assert read.histogram("bcp.save.stall", *BACKGROUND).sum == report.blocking_seconds
    assert report.blocking_seconds < durable.sum <= report.seconds
    lag = read.histogram("bcp.save.lag", *BACKGROUND)
    assert 0 < lag.sum < durable.sum
    assert read.values("bcp.bytes") == {("save",): report.nbytes}
    assert not read.points("bcp.load.duration")


def test_a_save_that_is_waited_for_blocks_all_the_time(tmp_path: Path, read: Read) -> None:
    report = bcp.save(tmp_path, model())
    assert read.histogram("bcp.save.blocking", *WAITED).sum == report.seconds
    assert read.histogram("bcp.save.stall", *WAITED).sum == report.seconds


def test_the_stall_of_a_lazy_save_has_the_wait_of_the_step(read: Read) -> None:
    figures = {"path": "run", "operation": "0" * 16, "rank": 0, "world_size": 1, "nbytes": 0, "state_nbytes": 0}
    watch = Watch("save", "run", background=True)
    with watch.running():
        watch.blocking = 0.25
        watch.result = bcp.SaveResult(
            **figures, dedup_saved_bytes=0, seconds=9.0, blocking_seconds=0.25, step_wait_seconds=1.5
        )
    assert read.histogram("bcp.save.blocking", *BACKGROUND).sum == 0.25
    assert read.histogram("bcp.save.stall", *BACKGROUND).sum == 1.75


def test_a_load(tmp_path: Path, read: Read) -> None:
    bcp.save(tmp_path, model())
    report = bcp.load(tmp_path, model())
    assert read.histogram("bcp.load.duration").sum == report.seconds
    assert read.value("bcp.bytes", "load") == report.nbytes


def test_phases_and_stages(tmp_path: Path, read: Read) -> None:
    saved = bcp.save(tmp_path, model(3), options=small_parts())
    loaded = bcp.load(tmp_path, model(3))
    phases = read.points("bcp.phase.duration")
    assert set(phases) == {
        *(("save", phase) for phase in ("plan", "snapshot", "write", "commit")),
        *(("load", phase) for phase in ("open", "plan", "read", "finish")),
    }
    assert {point.count for point in phases.values()} == {1}
    stages = {labels: point.sum for labels, point in read.points("bcp.stage.duration").items()}
    assert stages == {
        **{("save", stage): seconds for stage, seconds in saved.stage_seconds.items()},
        **{("load", stage): seconds for stage, seconds in loaded.stage_seconds.items()},
    }


def test_requests(tmp_path: Path, read: Read) -> None:
    bcp.save(tmp_path, model(3), options=small_parts())
    requests = read.points("bcp.storage.request")
    assert {labels[0] for labels in requests} == {"file"}
    assert {labels[2] for labels in requests} == {"ok"}
    assert requests["file", "part", "ok"].count == 3
    assert requests["file", "put_if", "ok"].count == 1


def test_units_and_buckets(tmp_path: Path, read: Read) -> None:
    bcp.save(tmp_path / "7", model())
    bcp.load(tmp_path / "7", model())
    found = read.metrics()
    histograms = [metric for metric in found.values() if hasattr(next(iter(metric.data.data_points)), "bucket_counts")]
    assert len(histograms) == 8
    for metric in histograms:
        assert metric.unit == "s"
        assert list(metric.data.data_points[0].explicit_bounds) == BOUNDARIES
    assert sorted(BOUNDARIES) == BOUNDARIES
    assert (BOUNDARIES[0], BOUNDARIES[1], BOUNDARIES[-1]) == (0.001, 0.0025, 1000.0)
    units = {name: metric.unit for name, metric in found.items()}
    assert [units[name] for name in ("bcp.bytes", "bcp.dedup.bytes", "bcp.staging.bytes")] == ["By"] * 3
    assert [units[name] for name in ("bcp.checkpoint.age", "bcp.work.at_risk")] == ["s"] * 2


def test_no_label_has_a_step_a_path_or_a_rank(tmp_path: Path, read: Read) -> None:
    for step in (41, 42):
        bcp.save(tmp_path / f"step-{step}", model())
        bcp.load(tmp_path / f"step-{step}", model())
    for name, metric in read.metrics().items():
        labels = [json.dumps(dict(point.attributes or {})) for point in metric.data.data_points]
        assert len(labels) == len(set(labels)) <= 16, name
        assert not [text for text in labels if str(tmp_path) in text or "rank" in text or "42" in text], name


@pytest.mark.anyio
async def test_replicas_that_others_write_are_counted(tmp_path: Path, read: Read) -> None:
    ranks = memory_coordinators(2)
    states = [model(), model()]
    saves = [bcp.asave(tmp_path, state, coordinator=rank) for state, rank in zip(states, ranks, strict=True)]
    reports = await asyncio.gather(*saves)
    saved = sum(report.dedup_saved_bytes for report in reports)
    assert saved == MIB
    assert read.value("bcp.dedup.bytes") == saved


# -- failures ----------------------------------------------------------------------------------------


def test_failures_are_counted_by_stage(tmp_path: Path, read: Read) -> None:
    backend = FaultyBackend(LocalBackend(tmp_path / "a"), "write_part", OSError("gone"))
    with pytest.raises(bcp.StageError):
        bcp.save(backend, model())
    bcp.save(tmp_path / "b", model())
    for _ in range(2):
        with pytest.raises(bcp.ExistsError):
            bcp.save(tmp_path / "b", model())
    with pytest.raises(bcp.NotACheckpointError):
        bcp.load(tmp_path / "c", model())
    assert read.values("bcp.failures") == {
        ("StageError", "save", "upload"): 1,
        ("ExistsError", "save", "plan"): 2,
        ("NotACheckpointError", "load", "open"): 1,
    }
    assert read.value("bcp.corrupt.blocks") == 0
    assert read.histogram("bcp.save.durable", *WAITED).count == 1


def test_corrupt_blocks_are_counted(tmp_path: Path, read: Read) -> None:
    bcp.save(tmp_path, model())
    (file,) = (tmp_path / "model").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(bcp.BcpError):
        bcp.load(tmp_path, model())
    assert read.value("bcp.corrupt.blocks") == 1


class Flaky(LocalFileSystem):
    """Local files behind a connection that breaks twice."""

    protocol = "flaky"
    left = 0

    def mv(self, *args: Any, **options: Any) -> None:
        if Flaky.left:
            Flaky.left -= 1
            raise ConnectionResetError("the connection broke")
        super().mv(*args, **options)


def test_requests_that_are_made_again_are_counted(tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(Flaky, "left", 2)
    options = small_parts(retries=bcp.RetryPolicy(first_pause_seconds=1e-3, longest_pause_seconds=1e-3))
    report = bcp.save(f"flaky://{tmp_path}/run", model(), options=options)
    assert report.retries == 2
    assert read.value("bcp.retries", "save") == 2
    again = [
        point for labels, point in read.points("bcp.storage.request").items() if labels[0::2] == ("flaky", "again")
    ]
    assert sum(point.count for point in again) == 2


# -- gauges ------------------------------------------------------------------------------------------


def test_before_the_first_checkpoint_there_is_no_age(tmp_path: Path, read: Read) -> None:
    assert set(read.metrics()) == {"bcp.staging.bytes"}
    with pytest.raises(bcp.NotACheckpointError):
        bcp.load(tmp_path, model())
    assert not read.points("bcp.checkpoint.age")


def test_the_age_counts_from_the_commit_and_the_work_from_the_call(tmp_path: Path, read: Read, clock: Clock) -> None:
    started = time.time()
    report = bcp.save(tmp_path / "step-3", model())
    clock.ahead = 1000.0
    age, risk = read.value("bcp.checkpoint.age"), read.value("bcp.work.at_risk")
    now = clock.time()
    assert 1000.0 <= age <= now - started
    assert 1000.0 + report.seconds - 1e-3 <= risk <= now - started + 1e-3
    assert risk > age
    assert read.value("bcp.checkpoint.step") == 3


@pytest.mark.anyio
async def test_the_work_at_risk_is_that_of_all_ranks(tmp_path: Path, read: Read, clock: Clock) -> None:
    await asyncio.gather(*(bcp.asave(tmp_path, model(), coordinator=rank) for rank in memory_coordinators(2)))
    clock.ahead = 1000.0
    assert 2000.0 <= read.value("bcp.work.at_risk") < 2 * read.value("bcp.checkpoint.age") + 2 * SECONDS


def test_a_loaded_checkpoint_is_as_old_as_its_commit_and_nothing_is_at_risk(
    tmp_path: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    bcp.save(tmp_path / "step-5", model())
    other = Read()
    add_sink(other.sink)
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    clock.ahead = 500.0
    bcp.load(tmp_path / "step-5", model())
    remove_sink(other.sink)
    assert other.value("bcp.checkpoint.age") >= 500.0 - 1e-3  # the metadata has milliseconds
    assert other.value("bcp.work.at_risk") < SECONDS
    assert other.value("bcp.checkpoint.step") == 5
    assert read.value("bcp.work.at_risk") >= 500.0  # it has saved: the load brings nothing new


def test_an_older_checkpoint_makes_nothing_older(tmp_path: Path, read: Read, clock: Clock) -> None:
    bcp.save(tmp_path / "1", model())
    bcp.save(tmp_path / "2", model())
    bcp.load(tmp_path / "1", model())
    assert read.value("bcp.checkpoint.step") == 2
    clock.ahead = 100.0
    with pytest.raises(bcp.ExistsError):
        bcp.save(tmp_path / "1", model())
    assert read.value("bcp.checkpoint.age") >= 100.0


def test_queues_and_staging_memory_are_live(tmp_path: Path, read: Read) -> None:
    reached, opened = threading.Event(), threading.Event()
    through = threading.Semaphore(0)

    async def wait(item: Any) -> Any:
        reached.set()
        await asyncio.to_thread(opened.wait, SECONDS)
        return item

    async def passed(item: Any) -> Any:
        through.release()
        return item

    def edit(graph: bcp.extend.Graph) -> bcp.extend.Graph:
        return graph.after("serialize", bcp.extend.Stage("passed", passed)).after(
            "passed", bcp.extend.Stage("wait", wait)
        )

    pending = bcp.save(tmp_path, model(4), async_checkpoint=True, options=small_parts(edit=edit))
    assert reached.wait(SECONDS)
    for _ in range(4):
        assert through.acquire(timeout=SECONDS)
    budget = read.value("bcp.staging.bytes")
    assert budget >= 4 * MIB
    while (waiting := read.values("bcp.queue.occupancy"))["wait",] < 3:  # the last one is between the stages
        time.sleep(0.001)
    assert waiting["wait",] == 3
    assert sum(waiting.values()) == 3
    opened.set()
    pending.wait(SECONDS)
    assert read.value("bcp.staging.bytes") == 0
    after = read.values("bcp.queue.occupancy")
    assert after.keys() >= {("d2h",), ("serialize",), ("wait",), ("upload",), ("checksum",)}
    assert set(after.values()) == {0}


def test_a_failed_save_leaves_no_live_value(tmp_path: Path, read: Read) -> None:
    backend = FaultyBackend(LocalBackend(tmp_path), "write_part", OSError("gone"))
    with pytest.raises(bcp.StageError):
        bcp.save(backend, model(3), options=small_parts())
    assert read.value("bcp.staging.bytes") == 0
    assert set(read.values("bcp.queue.occupancy").values()) == {0}
