"""What happens to snapshots in the memory of the hosts, as observers, metrics, spans, log lines and alerts tell it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import agent, until
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import bcp
from bcp.errors import StorageError
from bcp.format.metadata import METADATA_KEY, decode_metadata
from bcp.telemetry.metrics import Metrics
from bcp.telemetry.spans import Spans
from bcp.telemetry.watch import Watch, add_sink, remove_sink
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import COPYING, REFUSED


class Job:
    """A job of one rank, whose observer keeps all events of its snapshots."""

    def __init__(self, root: Path) -> None:
        self.store, self.memory = root / "run", root / "memory"
        self.events: list[bcp.extend.TierEvent] = []
        torch.manual_seed(2)
        self.states = {"model": torch.nn.Linear(8, 4)}

    def observe(self, event: bcp.extend.Event) -> None:
        if isinstance(event, bcp.extend.TierEvent):
            self.events.append(event)

    def run(self, **options: Any) -> bcp.Run:
        observed = {"observe": self.observe, **options.pop("options", {})}
        given: dict[str, Any] = {"save": 1, "tiers": bcp.Tiers(folder=self.memory, agent="external")} | options
        save_options = bcp.SaveOptions(**observed)
        return bcp.Run(self.store, self.states, save_options=save_options, **given)

    def die(self, run: bcp.Run) -> None:
        with pytest.raises(ZeroDivisionError), run:
            raise ZeroDivisionError

    def told(self, step: int | None = None) -> list[str]:
        return [event.what for event in self.events if step is None or event.step == step]

    def one(self, what: str) -> bcp.extend.TierEvent:
        [event] = [event for event in self.events if event.what == what]
        return event

    def path(self, step: int) -> Path:
        return self.store / f"step-{step:08d}"

    def committed(self, step: int) -> str:
        """The id of the save that storage has."""
        return decode_metadata((self.path(step) / METADATA_KEY).read_bytes(), METADATA_KEY).commit.operation


class Measured:
    """What the metrics tell an SDK."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])
        self.sink = Metrics(self.provider.get_meter("bcp"))

    def points(self, name: str) -> dict[tuple[Any, ...], Any]:
        data = self.reader.get_metrics_data()
        metrics = [
            metric
            for resource in (data.resource_metrics if data is not None else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
        ]
        found = metrics[0].data.data_points if metrics else ()
        return {tuple(value for _, value in sorted((point.attributes or {}).items())): point for point in found}

    def values(self, name: str) -> dict[tuple[Any, ...], Any]:
        return {labels: point.value for labels, point in self.points(name).items()}

    def happened(self) -> dict[str, int]:
        return {labels[0]: count for labels, count in self.values("bcp.tier.events").items() if count}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def measured() -> Iterator[Measured]:
    measured = Measured()
    add_sink(measured.sink)
    yield measured
    remove_sink(measured.sink)
    measured.provider.shutdown()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sink = Spans(provider)
    add_sink(sink)
    yield exporter
    remove_sink(sink)


@pytest.fixture(autouse=True)
def configured_no_more() -> Iterator[None]:
    yield
    bcp.telemetry.configure()


# -- the two ends of a save -----------------------------------------------------------------------


def test_a_save_is_released_and_then_durable(job: Job, measured: Measured) -> None:
    run = job.run()
    run.resume()
    pending = run.maybe_save(1)
    assert pending is not None
    pending.released()
    until(lambda: "draining" in job.told(), "agents have it")
    assert job.told() == ["released", "draining"]
    released = job.one("released")
    assert measured.values("bcp.drain.snapshots") == {(): 1}
    assert measured.values("bcp.drain.bytes") == {(): released.nbytes}
    assert not measured.points("bcp.checkpoint.age"), "storage has nothing"
    assert {*measured.values("bcp.tier.age")} == {("memory",)}
    with agent(job.memory, job.store):
        result = pending.wait()
    durable = job.one("durable")
    assert released.operation == durable.operation == result.operation == job.committed(1)
    assert released.step == durable.step == 1
    assert released.nbytes == durable.nbytes == result.nbytes
    files = list(job.path(1).rglob("*.safetensors"))
    assert sum(path.stat().st_size for path in files) == result.nbytes
    assert released.seconds is not None
    assert durable.seconds is not None
    assert 0 < released.seconds < durable.seconds == result.seconds
    assert measured.values("bcp.drain.snapshots") == {(): 0}
    assert measured.values("bcp.checkpoint.step") == {(): 1}
    assert {*measured.values("bcp.tier.age")} == {("memory",), ("storage",)}
    assert measured.points("bcp.save.released")[()].sum == released.seconds
    assert measured.points("bcp.save.durable")[(True,)].sum == durable.seconds
    assert measured.points("bcp.save.lag")[(True,)].sum == durable.moment - released.moment
    assert measured.values("bcp.bytes") == {("memory",): result.nbytes, ("save",): result.nbytes}
    assert measured.happened() == {"released": 1, "draining": 1, "durable": 1}
    with agent(job.memory, job.store):
        run.close()


def test_a_snapshot_that_stays_is_no_durable_checkpoint(job: Job, measured: Measured) -> None:
    run = job.run(durable=1000)
    run.resume()
    for step in (1, 2):
        pending = run.maybe_save(step)
        assert pending is not None
        pending.wait()
    assert job.told() == ["released", "released"]
    assert not measured.points("bcp.checkpoint.age")
    assert not measured.points("bcp.checkpoint.step")
    assert not measured.points("bcp.save.durable")
    assert measured.values("bcp.drain.snapshots") == {(): 0}
    assert {*measured.values("bcp.tier.age")} == {("memory",)}
    job.die(run)


def test_a_run_that_ends_while_agents_go_on_is_told(job: Job, measured: Measured) -> None:
    run = job.run()
    run.resume()
    pending = run.maybe_save(1)
    assert pending is not None
    pending.released()
    until(lambda: "draining" in job.told(), "agents have it")
    job.die(run)
    until(lambda: job.told() == ["released", "draining", "unwatched"], "nobody waits any more")
    assert measured.values("bcp.drain.snapshots") == {(): 0}


def test_what_another_save_refuses_is_told_with_the_reason(job: Job, measured: Measured) -> None:
    run = job.run()
    run.resume()
    pending = run.maybe_save(1)
    assert pending is not None
    pending.released()
    NodeFolder(job.memory).end(job.one("released").operation, REFUSED)
    with pytest.raises(StorageError, match="REFUSED"):
        pending.wait()
    assert job.told() == ["released", "draining", "refused"]
    assert "step 1 does not become durable" in job.one("refused").said
    assert measured.happened()["refused"] == 1
    assert measured.values("bcp.drain.snapshots") == {(): 0}
    job.die(run)


def test_a_snapshot_that_newer_ones_supersede_is_told(job: Job) -> None:
    run = job.run()
    run.resume()
    for step in range(1, 5):
        pending = run.maybe_save(step)
        assert pending is not None
        pending.released()
    until(lambda: "superseded" in job.told(), "older ones make way")
    assert job.told(1)[:2] == ["released", "draining"]
    assert job.told(1)[2:] == ["superseded"]
    job.die(run)


def test_a_file_system_without_room_is_told(job: Job, monkeypatch: pytest.MonkeyPatch, measured: Measured) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run = job.run(tolerate=1)
    run.resume()
    monkeypatch.setattr("bcp.tiers.folder.fallocate", refuse)
    pending = run.maybe_save(1)
    if pending is not None:
        with pytest.raises(StorageError, match="bytes left"):
            pending.released()
    full = job.one("full")
    assert full.place == str(job.memory)
    assert "bytes left" in full.said
    assert measured.happened() == {"full": 1}
    job.die(run)


def test_hosts_that_cannot_be_copied_are_told_once(job: Job, measured: Measured) -> None:
    run = job.run()
    run.resume()
    assert run._tiered is not None
    run._tiered._joined.copies = 1  # as if the job had another host
    for step, said in enumerate(("it is silent", "it is silent", "", "again"), 1):
        NodeFolder(job.memory).put_troubles(COPYING, {"node-2": said} if said else {})
        pending = run.maybe_save(step)
        assert pending is not None
        pending.released()
    told = [(event.step, event.place, event.said) for event in job.events if event.what == "unreachable"]
    assert told == [(1, "node-2", "it is silent"), (4, "node-2", "again")]
    assert measured.happened()["unreachable"] == 2
    job.die(run)


def test_copies_are_told_in_the_next_save(job: Job, measured: Measured) -> None:
    run = job.run(durable=1000)
    run.resume()
    assert run._tiered is not None
    run._tiered._joined.copies = 1
    for step in (1, 2, 3):
        pending = run.maybe_save(step)
        assert pending is not None
        pending.released()
        if step == 1:
            NodeFolder(job.memory).note_copied(job.one("released").operation, 1)
    copied = job.one("copied")
    assert (copied.step, copied.operation) == (1, job.events[0].operation)
    assert {*measured.values("bcp.tier.age")} == {("memory",), ("copies",)}
    job.die(run)


# -- the way back ---------------------------------------------------------------------------------


def test_a_resumption_tells_what_it_reads_and_when_storage_has_it(job: Job, measured: Measured) -> None:
    run = job.run(durable=1000)
    run.resume()
    pending = run.maybe_save(1)
    assert pending is not None
    pending.released()
    nbytes, operation = job.one("released").nbytes, job.one("released").operation
    job.die(run)
    job.events.clear()
    with agent(job.memory, job.store):
        run = job.run(durable=1000)
        assert run.resume() == 1
        read = job.one("read")
        assert (read.step, read.operation, read.place) == (1, operation, "this host")
        assert read.nbytes > nbytes / 2, "tensors, without the header of the file"
        assert measured.values("bcp.tier.read") == {("own host",): read.nbytes}
        until(lambda: "durable" in job.told(), "agents have committed it")
        assert job.one("durable").seconds is None
        assert measured.values("bcp.checkpoint.step") == {(): 1}
        run.close()
    assert job.committed(1) == operation


def test_a_snapshot_that_is_passed_over_is_stale(job: Job, measured: Measured) -> None:
    run = job.run(durable=1000)
    run.resume()
    for step in (1, 2):
        pending = run.maybe_save(step)
        assert pending is not None
        pending.released()
    newest = job.events[-1].operation
    job.die(run)
    job.events.clear()
    [path] = [path for path in (job.memory / "model").iterdir() if newest in path.name]
    path.unlink()
    run = job.run(durable=1000)
    assert run.resume() == 1
    stale = job.one("stale")
    assert (stale.step, stale.operation) == (2, newest)
    assert path.name in stale.said
    assert measured.happened()["stale"] == 1
    job.die(run)


def test_hosts_have_no_label_each(measured: Measured) -> None:
    """A snapshot may be read from many hosts, from parity, and block by block from storage."""
    watch = Watch("load", "run")
    for place, nbytes in (("this host", 1), ("node-3", 2), ("node-4", 4), ("parity", 8), ("storage", 16)):
        watch(bcp.extend.TierEvent("read", 1, "0123456789abcdef", 0.0, nbytes=nbytes, place=place))
    assert measured.values("bcp.tier.read") == {("own host",): 1, ("other hosts",): 6, ("parity",): 8, ("storage",): 16}


# -- spans, log lines, alerts ---------------------------------------------------------------------


def test_the_way_to_storage_is_a_span_below_the_save(job: Job, spans: InMemorySpanExporter) -> None:
    with agent(job.memory, job.store), job.run() as run:
        run.resume()
        pending = run.maybe_save(1)
        assert pending is not None
        pending.wait()
    made: dict[str, ReadableSpan] = {span.name: span for span in spans.get_finished_spans()}
    save, drain = made["bcp.save"], made["bcp.drain"]
    assert drain.parent is not None
    assert save.context is not None
    assert drain.parent.span_id == save.context.span_id
    assert save.end_time is not None
    assert drain.start_time is not None
    assert drain.end_time is not None
    assert save.start_time < drain.start_time < drain.end_time  # type: ignore[operator]  # both are known
    assert (drain.attributes or {})["bcp.event"] == "durable"
    assert (drain.attributes or {})["bcp.path"] == str(job.path(1))
    assert [event.name for event in save.events] == ["bcp.released"]


def test_log_lines_have_both_ends(job: Job) -> None:
    stream = io.StringIO()
    bcp.telemetry.configure(logs="json", stream=stream)
    with agent(job.memory, job.store), job.run() as run:
        run.resume()
        pending = run.maybe_save(1)
        assert pending is not None
        result = pending.wait()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    own = [line for line in lines if line["event"] in ("saved into memory", "a snapshot is durable")]
    assert [line["event"] for line in own] == ["saved into memory", "a snapshot is durable"]
    assert all(line["path"] == str(job.path(1)) for line in own)
    assert all(line["operation"] == result.operation and line["step"] == 1 for line in own)
    assert own[0]["seconds"] <= own[1]["seconds"]


def test_alerts_judge_the_second_end(job: Job) -> None:
    found: list[bcp.telemetry.Alert] = []
    alerts = bcp.telemetry.Alerts(max_durable=1e-9, on_alert=found.append)
    bcp.telemetry.configure(alerts=alerts)
    run = job.run(durable=2)
    run.resume()
    for step in (1, 2):
        pending = run.maybe_save(step)
        assert pending is not None
        pending.released()
    assert found == [], "nothing is durable"
    with agent(job.memory, job.store):
        run.close()
    [alert] = found
    assert (alert.name, alert.step, alert.path) == ("max_durable", 2, str(job.path(2)))
    durable = job.one("durable")
    assert alert.value == durable.seconds


# -- recordings and reports -----------------------------------------------------------------------


def test_the_report_has_both_durations(job: Job) -> None:
    with agent(job.memory, job.store), job.run(durable=2) as run:
        run.resume()
        for step in (1, 2):
            pending = run.maybe_save(step)
            assert pending is not None
            result = pending.wait()
    report = bcp.report(job.store)
    [recording] = report.recordings
    assert (recording.kind, recording.step, recording.operation) == ("save", 2, result.operation)
    assert recording.path == str(job.path(2))
    events = recording.events.to_pylist()
    phases = {row["name"]: row for row in events if row["kind"] == "phase"}
    assert {*phases} == {"plan", "snapshot", "write", "commit", "drain"}
    assert {row["name"] for row in events if row["kind"] == "stage"} >= {"d2h"}
    released = [event for event in job.events if event.what == "released"][-1]
    durable = job.one("durable")
    assert released.seconds is not None
    assert durable.seconds is not None
    draining = job.one("draining")
    assert draining.seconds is not None
    assert released.seconds <= phases["drain"]["start"] == pytest.approx(draining.seconds, abs=1e-6)
    assert phases["drain"]["seconds"] == pytest.approx(durable.seconds - draining.seconds, rel=1e-3)
    [summary] = report.summaries
    assert summary.seconds == pytest.approx(durable.seconds, abs=1e-5)
    assert 0 < summary.blocking <= summary.released <= summary.seconds
    assert summary.nbytes == result.nbytes
    text = report.text()
    assert "the memory of the hosts had the snapshot after" in text
    assert "drain" in text


def test_nothing_is_recorded_without_record(job: Job) -> None:
    with agent(job.memory, job.store), job.run(options={"record": False}) as run:
        run.resume()
        pending = run.maybe_save(1)
        assert pending is not None
        pending.wait()
    assert not list(job.store.rglob("telemetry"))
    assert not list(job.memory.rglob("telemetry"))


def test_a_recording_that_cannot_be_stored_costs_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("bcp._record.encode", refuse)
    with agent(job.memory, job.store), job.run() as run:
        run.resume()
        pending = run.maybe_save(1)
        assert pending is not None
        result = pending.wait()
    assert result.operation == job.committed(1)
    assert not list(job.store.rglob("telemetry/*"))
