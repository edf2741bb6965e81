"""Spans and metrics of a real job, as they arrive at a receiver of OTLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import traced
from by_torchrun import torchrun
from servers.otlp import OtlpServer, Received

pytestmark = [pytest.mark.dist]
RANKS = range(4)
SAVE_PHASES = {"bcp.plan", "bcp.snapshot", "bcp.write", "bcp.commit"}
LOAD_PHASES = {"bcp.open", "bcp.plan", "bcp.read", "bcp.finish"}


@dataclass
class Job:
    spans: list[Received]
    metrics: dict[int, dict[str, object]]

    def of(self, step: int, rank: int, name: str) -> Received:
        """Return the one span of that name which a rank has made for a save."""
        (span,) = [span for span in self.named(name, rank) if span.attributes.get("bcp.step") == step]
        return span

    def named(self, name: str, rank: int) -> list[Received]:
        return [span for span in self.spans if span.name == name and span.rank == rank]

    def own(self, name: str, rank: int) -> Received:
        """Return the application's span of that name."""
        (span,) = self.named(name, rank)
        return span

    def children(self, span: Received) -> list[Received]:
        return [child for child in self.spans if child.parent == span.id]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("traced")
    with OtlpServer() as server:
        done = torchrun(len(RANKS), traced.__file__, str(folder), server.address)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-10000:]
        yield Job(server.spans(), server.metrics())


def below(job: Job, root: Received) -> list[Received]:
    """Return a span and all spans below it."""
    found = [root]
    for span in found:
        found += job.children(span)
    return found


def test_an_asynchronous_save_is_one_trace_over_all_ranks(job: Job) -> None:
    first = job.of(100, 0, "bcp.save")
    assert first.parent == ""
    assert first.links == {"caller": job.own("train step 100", 0).id}
    for rank in RANKS[1:]:
        save = job.of(100, rank, "bcp.save")
        assert (save.trace, save.parent) == (first.trace, first.id)
        assert save.links == {"caller": job.own("train step 100", rank).id}
    assert {span.rank for span in job.spans if span.trace == first.trace} == set(RANKS)
    for rank in RANKS:
        save, step = job.of(100, rank, "bcp.save"), job.own("train step 100", rank)
        assert step.trace != save.trace
        blocking = job.of(100, rank, "bcp.save.blocking")
        assert (blocking.trace, blocking.parent) == (step.trace, step.id)
        assert blocking.links == {"save": save.id}
        assert {span.name for span in job.children(save)} >= SAVE_PHASES
        stages = [span for span in job.children(job.of(100, rank, "bcp.write")) if ".stage." in span.name]
        assert {span.name for span in stages} == {
            *(f"bcp.stage.{stage}" for stage in ("d2h", "serialize", "upload", "checksum"))
        }
        for span in [*stages, job.of(100, rank, "bcp.commit")]:
            assert span.links == {"blocking": blocking.id}
            assert span.attributes["bcp.background"] is True


def test_a_synchronous_save_is_part_of_the_callers_trace(job: Job) -> None:
    step = job.own("train step 200", 0)
    first = next(span for span in job.children(step) if span.name == "bcp.save")
    assert first.trace == step.trace
    assert first.links == {}
    saves = [span for span in job.named("bcp.save", 1) if span.attributes["bcp.step"] == 200]
    assert [(span.trace, span.parent) for span in saves] == [(first.trace, first.id)]
    ranks = [span.rank for span in below(job, first) if span.name == "bcp.save"]
    assert sorted(ranks) == list(RANKS)
    assert not [span for span in job.spans if span.name == "bcp.save.blocking" and span.attributes["bcp.step"] == 200]
    for rank in RANKS:
        save = job.of(200, rank, "bcp.save")
        assert save.links == ({} if rank == 0 else {"caller": job.own("train step 200", rank).id})
        assert {span.name for span in job.children(save)} >= SAVE_PHASES


def test_a_load_is_part_of_the_callers_trace(job: Job) -> None:
    resume = job.own("resume", 0)
    first = job.own("bcp.load", 0)
    assert (first.trace, first.parent) == (resume.trace, resume.id)
    for rank in RANKS:
        load = job.own("bcp.load", rank)
        assert {span.name for span in job.children(load)} >= LOAD_PHASES
        if rank:
            assert (load.trace, load.parent) == (first.trace, first.id)
            assert load.links == {"caller": job.own("resume", rank).id}
        saved = job.of(200, rank, "bcp.save")
        assert load.attributes["bcp.operation"] == saved.attributes["bcp.operation"]


def test_every_span_names_operation_step_rank_and_run(job: Job) -> None:
    ours = [span for span in job.spans if span.name.startswith("bcp.")]
    assert len(ours) > 100
    assert {span.attributes["bcp.operation"] for span in ours if span.attributes["bcp.step"] == 100} == {
        job.of(100, 0, "bcp.save").attributes["bcp.operation"]
    }
    for span in ours:
        assert span.attributes["dl.rank"] == span.rank
        assert span.attributes["dl.world_size"] == len(RANKS)
        assert span.attributes["bcp.run"] == "a-run"
        assert str(span.attributes["bcp.path"]).endswith(f"step-{span.attributes['bcp.step']}")
        assert not span.failed
    for rank in RANKS:
        assert job.of(100, rank, "bcp.save").attributes["bcp.bytes"] > 2 * traced.MIB


def test_items_and_requests_have_their_places(job: Job) -> None:
    by_id = {span.id: span for span in job.spans}
    items = [span for span in job.spans if span.name == "bcp.item"]
    assert items
    for span in items:
        assert by_id[span.parent].name in ("bcp.write", "bcp.read")
    requests = [span for span in job.spans if span.name == "bcp.storage.request"]
    phases = {(span.attributes["bcp.storage.operation"], by_id[span.parent].name) for span in requests}
    assert phases >= {("part", "bcp.write"), ("put_if", "bcp.commit"), ("read", "bcp.read"), ("get", "bcp.open")}


def test_children_lie_inside_of_their_parents_of_the_same_rank(job: Job) -> None:
    by_id = {span.id: span for span in job.spans}
    ours = [span for span in job.spans if span.name.startswith("bcp.") and span.parent]
    pairs = [(by_id[span.parent], span) for span in ours if by_id[span.parent].name.startswith("bcp.")]
    same = [(parent, span) for parent, span in pairs if parent.rank == span.rank]
    assert len(same) > 100
    for parent, span in same:
        assert parent.start <= span.start <= span.end <= parent.end, (parent.name, span.name)


def test_metrics_arrive_from_every_rank(job: Job) -> None:
    assert set(job.metrics) == set(RANKS)
    for rank in RANKS:
        assert job.metrics[rank].keys() >= {
            *("bcp.save.blocking", "bcp.save.stall", "bcp.save.durable", "bcp.save.lag", "bcp.load.duration"),
            *("bcp.stage.duration", "bcp.phase.duration", "bcp.storage.request", "bcp.bytes", "bcp.checkpoint.age"),
            *("bcp.checkpoint.step", "bcp.work.at_risk", "bcp.queue.occupancy", "bcp.staging.bytes"),
        }
