from __future__ import annotations

import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from forked import run_forked
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import bcp
from bcp.backends import LocalBackend, MemoryBackend, register
from bcp.coordinators import memory_coordinators
from bcp.events import RequestEvent, StageEvent
from bcp.telemetry.settings import GROUPS, settings
from bcp.telemetry.spans import Spans
from bcp.telemetry.watch import Watch, add_sink, remove_sink
from bcp.testing.storage_fakes import FaultyBackend

SECONDS = 60.0
MIB = 1 << 20
SAVE_PHASES = {"bcp.plan", "bcp.snapshot", "bcp.write", "bcp.commit"}


class Made:
    """The spans that were made, and a tracer for those of the application."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("application")

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def named(self, name: str, rank: int = 0) -> list[ReadableSpan]:
        own = [span for span in self.all if (span.attributes or {}).get("dl.rank", 0) == rank]
        return [span for span in own if span.name == name]

    def one(self, name: str, rank: int = 0) -> ReadableSpan:
        (span,) = self.named(name, rank)
        return span

    def children(self, span: ReadableSpan) -> set[str]:
        return {child.name for child in self.all if parent_of(child) == id_of(span)}


def id_of(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def links_of(span: ReadableSpan) -> dict[str, tuple[int, int]]:
    return {
        str((link.attributes or {})["bcp.link"]): (link.context.trace_id, link.context.span_id) for link in span.links
    }


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.fixture
def made() -> Iterator[Made]:
    made = Made()
    sink = Spans(made.provider)
    add_sink(sink)
    yield made
    remove_sink(sink)
    made.provider.shutdown()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "spans", GROUPS)


every_group = pytest.mark.usefixtures("groups")


def model(count: int = 1) -> dict[str, Any]:
    return {"model": {f"w{index}": torch.ones(MIB // 4) for index in range(count)}}


def small_parts(**more: Any) -> bcp.SaveOptions:
    return bcp.SaveOptions(part_bytes=MIB, **more)


# -- one rank ----------------------------------------------------------------------------------------


def test_a_save_that_is_waited_for_is_a_child_of_the_callers_span(tmp_path: Path, made: Made) -> None:
    with made.tracer.start_as_current_span("step"):
        report = bcp.save(tmp_path / "step-7", model())
    save, step = made.one("bcp.save"), made.one("step")
    assert parent_of(save) == id_of(step)
    assert save.links == ()
    assert made.children(save) == SAVE_PHASES
    assert {span.name for span in made.all} == {"step", "bcp.save", *SAVE_PHASES}
    common = {
        "bcp.operation": report.operation,
        "bcp.step": 7,
        "bcp.path": str(tmp_path / "step-7"),
        "dl.rank": 0,
        "dl.world_size": 1,
    }
    assert attributes_of(save) == {**common, "bcp.background": False, "bcp.bytes": report.nbytes, "bcp.retries": 0}
    assert attributes_of(made.one("bcp.commit")) == common
    assert save.status.status_code is StatusCode.UNSET
    assert save.kind is SpanKind.INTERNAL
    assert (save.instrumentation_scope.name, save.instrumentation_scope.version) == ("bcp", bcp.__version__)


@every_group
def test_children_lie_inside_of_their_parents(tmp_path: Path, made: Made) -> None:
    with made.tracer.start_as_current_span("step"):
        bcp.save(tmp_path, model(3), options=small_parts())
    spans = {id_of(span): span for span in made.all}
    for span in made.all:
        if span.parent is not None:
            around = spans[parent_of(span)]
            assert around.start_time <= span.start_time <= span.end_time <= around.end_time, (span.name, around.name)


def test_a_save_without_a_callers_span_is_a_root(tmp_path: Path, made: Made) -> None:
    bcp.save(tmp_path, model())
    assert made.one("bcp.save").parent is None
    assert "bcp.step" not in attributes_of(made.one("bcp.save")) or tmp_path.name[-1].isdigit()


@every_group
def test_a_background_save_is_a_trace_of_its_own_with_links(tmp_path: Path, made: Made) -> None:
    opened = threading.Event()

    async def wait(item: Any) -> Any:
        await asyncio.to_thread(opened.wait, SECONDS)
        return item

    options = small_parts(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("wait", wait)), step=12)
    with made.tracer.start_as_current_span("step"):
        pending = bcp.save(tmp_path, model(), async_checkpoint=True, options=options)
    assert [span.name for span in made.all] == ["step"]
    opened.set()
    report = pending.wait(SECONDS)
    step, save, blocking = made.one("step"), made.one("bcp.save"), made.one("bcp.save.blocking")
    assert save.parent is None
    assert save.context.trace_id != step.context.trace_id
    assert links_of(save) == {"caller": id_of(step)}
    assert attributes_of(save)["bcp.background"] is True
    assert parent_of(blocking) == id_of(step)
    assert links_of(blocking) == {"save": id_of(save)}
    assert blocking.start_time == save.start_time
    assert blocking.end_time - blocking.start_time == pytest.approx(report.blocking_seconds * 1e9, abs=1000)
    assert blocking.end_time < save.end_time
    late = [span for span in made.all if span.name.startswith("bcp.stage.") or span.name == "bcp.commit"]
    assert {span.name for span in late} == {
        *(f"bcp.stage.{stage}" for stage in ("d2h", "wait", "serialize", "upload", "checksum")),
        "bcp.commit",
    }
    for span in late:
        assert links_of(span) == {"blocking": id_of(blocking)}
        assert attributes_of(span)["bcp.background"] is True
        assert attributes_of(span)["bcp.step"] == 12
    assert not any(span.links for span in made.all if span not in (*late, save, blocking))


def test_without_a_callers_span_the_blocking_time_is_a_child_of_the_save(tmp_path: Path, made: Made) -> None:
    bcp.save(tmp_path, model(), async_checkpoint=True).wait(SECONDS)
    save = made.one("bcp.save")
    assert parent_of(made.one("bcp.save.blocking")) == id_of(save)
    assert save.parent is None
    assert save.links == ()


def test_a_lazy_save_blocks_until_its_stock_is_taken(tmp_path: Path, made: Made) -> None:
    layer = torch.nn.Linear(4, 4)
    states = {"model": layer, "optimizer": torch.optim.SGD(layer.parameters(), 0.1)}
    report = bcp.save(tmp_path, states, async_checkpoint=True, snapshot="lazy").wait(SECONDS)
    blocking = made.one("bcp.save.blocking")
    assert blocking.end_time < made.one("bcp.snapshot").end_time
    assert blocking.end_time - blocking.start_time == pytest.approx(report.blocking_seconds * 1e9, abs=1000)


def test_a_load_has_its_phases(tmp_path: Path, made: Made) -> None:
    saved = bcp.save(tmp_path, model())
    made.exporter.clear()
    with made.tracer.start_as_current_span("resume"):
        report = bcp.load(tmp_path, model())
    load = made.one("bcp.load")
    assert parent_of(load) == id_of(made.one("resume"))
    assert made.children(load) == {"bcp.open", "bcp.plan", "bcp.read", "bcp.finish"}
    assert attributes_of(load)["bcp.operation"] == saved.operation
    assert attributes_of(load)["bcp.bytes"] == report.nbytes


@pytest.mark.anyio
async def test_coroutines_leave_the_callers_context_as_it_was(tmp_path: Path, made: Made) -> None:
    with made.tracer.start_as_current_span("step") as step:
        await bcp.asave(tmp_path, model())
        assert trace.get_current_span() is step
        with pytest.raises(bcp.ExistsError):
            await bcp.asave(tmp_path, model())
        assert trace.get_current_span() is step
        await bcp.aload(tmp_path, model())
        assert trace.get_current_span() is step
    assert made.children(made.one("step")) == {"bcp.save", "bcp.load"}


# -- groups ------------------------------------------------------------------------------------------


def test_stages_sum_up_their_items(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "spans", {"operation", "phase", "stage"})
    report = bcp.save(tmp_path, model(3), options=small_parts())
    upload = made.one("bcp.stage.upload")
    assert parent_of(upload) == id_of(made.one("bcp.write"))
    found = attributes_of(upload)
    assert found["bcp.items"] == 3
    assert found["bcp.bytes"] == report.nbytes
    assert found["bcp.busy_seconds"] > 0
    assert found["bcp.queue_wait_seconds"] >= 0
    assert upload.links == ()
    assert "bcp.background" not in found
    wall = (upload.end_time - upload.start_time) / 1e9
    assert wall == pytest.approx(report.stage_seconds["upload"], abs=1e-6)
    assert not made.named("bcp.item")


@every_group
def test_an_item_is_one_span_with_the_seconds_of_its_stages(tmp_path: Path, made: Made) -> None:
    bcp.save(tmp_path, model(3), options=small_parts())
    bcp.load(tmp_path, model(3))
    ways = {"bcp.write": ("d2h", "serialize", "upload", "checksum"), "bcp.read": ("read", "deserialize", "h2d")}
    for phase, stages in ways.items():
        items = [span for span in made.named("bcp.item") if parent_of(span) == id_of(made.one(phase))]
        around = made.one(f"bcp.stage.{stages[0]}")
        assert len(items) == attributes_of(around)["bcp.items"]
        assert len({attributes_of(span)["bcp.item"] for span in items}) == len(items)
        for stage in stages:
            busy = sum(cast("float", attributes_of(span)[f"bcp.{stage}.seconds"]) for span in items)
            assert busy == pytest.approx(attributes_of(made.one(f"bcp.stage.{stage}"))["bcp.busy_seconds"])


@every_group
def test_requests_are_children_of_the_phase_that_they_began_in(tmp_path: Path, made: Made) -> None:
    bcp.save(tmp_path, model(), options=small_parts())
    around = {"version": "bcp.plan", "part": "bcp.write", "list": "bcp.commit", "put_if": "bcp.commit"}
    requests = {str(attributes_of(span)["bcp.storage.operation"]): span for span in made.named("bcp.storage.request")}
    assert requests.keys() >= around.keys()
    for operation, phase in around.items():
        assert parent_of(requests[operation]) == id_of(made.one(phase)), operation
    part = requests["part"]
    assert part.kind is SpanKind.CLIENT
    assert attributes_of(part)["bcp.storage.store"] == str(tmp_path)
    assert attributes_of(part)["bcp.storage.attempt"] == 1
    assert attributes_of(part)["bcp.storage.status"] == "ok"
    assert attributes_of(part)["bcp.bytes"] > 0


def test_without_phases_everything_hangs_below_the_operation(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "spans", {"operation", "item", "request"})
    bcp.save(tmp_path, model())
    assert {span.name for span in made.all} == {"bcp.save", "bcp.item", "bcp.storage.request"}
    assert made.children(made.one("bcp.save")) == {"bcp.item", "bcp.storage.request"}


@every_group
def test_only_the_slowest_items_and_requests_have_spans(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "most_spans", 3)
    events: list[bcp.extend.Event] = []
    bcp.save(tmp_path, model(8), options=small_parts(observe=events.append))
    took: dict[str, float] = defaultdict(float)
    for event in events:
        if isinstance(event, StageEvent):
            took[event.item] += event.ended - event.started
    requests = [event for event in events if isinstance(event, RequestEvent)]
    items = {attributes_of(span)["bcp.item"] for span in made.all if span.name == "bcp.item"}
    assert items == set(sorted(took, key=lambda name: took[name])[-3:])
    durations = [span.end_time - span.start_time for span in made.all if span.name == "bcp.storage.request"]
    slowest = sorted(event.ended - event.started for event in requests)[-3:]
    assert sorted(durations) == pytest.approx([seconds * 1e9 for seconds in slowest], abs=1000)
    save = attributes_of(made.one("bcp.save"))
    assert save["bcp.items.left_out"] == len(took) - 3
    assert save["bcp.requests.left_out"] == len(requests) - 3


@every_group
def test_a_failed_request_has_a_span_before_slower_ones(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "most_spans", 1)
    watch = Watch("save", str(tmp_path))
    with watch.running():
        for number, status in enumerate(("ok", "again", "ok")):
            watch(RequestEvent("file", "put", f"key {number}", 1, 0.0, 1.0 + number, 1, status, ""))
    assert attributes_of(made.one("bcp.storage.request"))["bcp.storage.key"] == "key 1"


def test_without_operations_there_is_no_span(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "spans", GROUPS - {"operation"})
    bcp.save(tmp_path, model())
    assert made.all == []


def test_spans_of_a_custom_stage_nest_below_the_operation(tmp_path: Path, made: Made) -> None:
    async def traced(item: Any) -> Any:
        with made.tracer.start_as_current_span("mine"):
            await asyncio.to_thread(in_thread)
        return item

    def in_thread() -> None:
        made.tracer.start_span("mine, in a thread").end()

    options = bcp.SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("mine", traced)))
    bcp.save(tmp_path, model(), async_checkpoint=True, options=options).wait(SECONDS)
    assert parent_of(made.one("mine")) == id_of(made.one("bcp.save"))
    assert parent_of(made.one("mine, in a thread")) == id_of(made.one("mine"))


def test_the_run_is_an_attribute_if_it_has_a_name(tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "run", "llama-7b")
    bcp.save(tmp_path, model())
    assert {attributes_of(span)["bcp.run"] for span in made.all} == {"llama-7b"}


# -- failures ----------------------------------------------------------------------------------------


@every_group
def test_a_failure_is_noted_on_the_span_with_its_stage(tmp_path: Path, made: Made) -> None:
    backend = FaultyBackend(LocalBackend(tmp_path), "write_part", OSError("the disk is gone"))
    with pytest.raises(bcp.StageError):
        bcp.save(backend, model())
    save = made.one("bcp.save")
    assert save.status.status_code is StatusCode.ERROR
    assert "the disk is gone" in (save.status.description or "")
    found = attributes_of(save)
    assert (found["error.type"], found["bcp.stage"], found["bcp.item"]) == ("StageError", "upload", "model part 0: w0")
    (event,) = save.events
    assert event.name == "exception"
    assert event.timestamp == save.end_time
    assert "the disk is gone" in str((event.attributes or {})["exception.message"])
    for name in ("bcp.write", "bcp.stage.upload"):
        span = made.one(name)
        assert span.status.status_code is StatusCode.ERROR
        assert attributes_of(span)["error.type"]
    assert attributes_of(made.one("bcp.stage.upload"))["error.type"] == "OSError"
    assert made.one("bcp.plan").status.status_code is StatusCode.UNSET
    assert not made.named("bcp.commit")


def test_a_background_save_that_fails_early_blocked_until_then(tmp_path: Path, made: Made) -> None:
    bcp.save(tmp_path, model())
    made.exporter.clear()
    with pytest.raises(bcp.ExistsError):
        bcp.save(tmp_path, model(), async_checkpoint=True)
    save, blocking = made.one("bcp.save"), made.one("bcp.save.blocking")
    assert blocking.end_time == save.end_time
    for span in (save, blocking):
        assert attributes_of(span)["error.type"] == "ExistsError"
        assert span.status.status_code is StatusCode.ERROR


def test_a_background_save_that_fails_late_blocked_as_long_as_it_did(tmp_path: Path, made: Made) -> None:
    backend = FaultyBackend(LocalBackend(tmp_path), "put_if", OSError("gone"))
    pending = bcp.save(backend, model(), async_checkpoint=True)
    with pytest.raises(OSError, match="gone"):
        pending.wait(SECONDS)
    blocking = made.one("bcp.save.blocking")
    assert blocking.status.status_code is StatusCode.UNSET
    assert blocking.end_time < made.one("bcp.commit").start_time
    assert made.one("bcp.commit").status.status_code is StatusCode.ERROR


@every_group
def test_secrets_are_in_no_attribute(made: Made) -> None:
    register("vault", lambda _url, *, key: MemoryBackend("vault" if key else ""))
    url = "vault://user:hunter2@host/run?token=hunter2"
    bcp.save(url, model(), options=small_parts(storage_options={"key": "hunter2"}))
    texts = [str(value) for span in made.all for value in (span.name, span.attributes, span.status.description)]
    assert attributes_of(made.one("bcp.save"))["bcp.path"] == "vault://user:***@host/run"
    assert not [text for text in texts if "hunter2" in text]


# -- several ranks -----------------------------------------------------------------------------------


async def both(made: Made, tmp_path: Path, *, rank_1: Any = None, background: bool = False) -> None:
    """Save by two ranks, each below a span of its own."""
    ranks = memory_coordinators(2)

    async def save(rank: int) -> None:
        with made.tracer.start_as_current_span(f"step of {rank}", attributes={"dl.rank": rank}):
            states = {"model": {f"w{rank}": torch.ones(5)}} if rank == 0 or rank_1 is None else rank_1
            saved = await bcp.asave(tmp_path, states, coordinator=ranks[rank], async_checkpoint=background)
        if isinstance(saved, bcp.Pending):
            await saved

    await asyncio.gather(save(0), save(1), return_exceptions=rank_1 is not None)


@pytest.mark.anyio
@pytest.mark.parametrize("background", [False, True])
async def test_all_ranks_are_in_one_trace(tmp_path: Path, made: Made, background: bool) -> None:  # noqa: FBT001 -- a parameter
    await both(made, tmp_path, background=background)
    first, second = made.one("bcp.save"), made.one("bcp.save", 1)
    assert parent_of(second) == id_of(first)
    assert second.parent is not None
    assert second.parent.is_remote
    assert links_of(second) == {"caller": id_of(made.one("step of 1", 1))}
    assert made.children(second) == SAVE_PHASES
    if background:
        assert first.parent is None
        assert parent_of(made.one("bcp.save.blocking", 1)) == id_of(made.one("step of 1", 1))
        assert links_of(made.one("bcp.save.blocking", 1)) == {"save": id_of(second)}
        assert links_of(made.one("bcp.commit", 1)) == {"blocking": id_of(made.one("bcp.save.blocking", 1))}
    else:
        assert parent_of(first) == id_of(made.one("step of 0"))
        assert first.context.trace_id == second.context.trace_id


@pytest.mark.anyio
async def test_ranks_that_never_met_have_roots(tmp_path: Path, made: Made) -> None:
    await both(made, tmp_path, rank_1={"model": {"w": torch.ones(5, device="meta")}})
    second = made.one("bcp.save", 1)
    assert second.parent is None
    assert links_of(second) == {"caller": id_of(made.one("step of 1", 1))}
    assert attributes_of(second)["error.type"] == "StateError"
    found = attributes_of(made.one("bcp.save"))
    assert (found["error.type"], found["bcp.guilty_rank"]) == ("PeerError", 1)


@pytest.mark.anyio
async def test_if_rank_0_has_no_trace_the_others_are_roots(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = Spans.began
    monkeypatch.setattr(Spans, "began", lambda sink, watch: began(sink, watch) if watch.rank else None)
    await both(made, tmp_path)
    assert not made.named("bcp.save")
    assert made.one("bcp.save", 1).parent is None


# -- without an SDK ----------------------------------------------------------------------------------

NOTHING = """
import sys, torch, bcp
from bcp.telemetry import watch
from bcp.telemetry.spans import Spans
from bcp.telemetry.metrics import Metrics
bcp.save("c", {"model": {"w": torch.ones(4)}}, async_checkpoint=True).wait()
spans = next(sink for sink in watch._sinks if isinstance(sink, Spans))
metrics = next(sink for sink in watch._sinks if isinstance(sink, Metrics))
seen = watch.Watch("save", "c")
with seen.running():
    print(repr(seen.trace), len(spans._traces), len(metrics._live))
print([name for name in sys.modules if name.startswith("opentelemetry.sdk")])
"""

INSTALLED = """
import torch, bcp
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=lambda span: span.name + "\\n")))
trace.set_tracer_provider(provider)
bcp.save("c", {"model": {"w": torch.ones(4)}})
"""


def run(program: str, cwd: Path) -> str:
    done = run_forked([sys.executable, "-c", program], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_an_sdk_nothing_is_done(tmp_path: Path) -> None:
    assert run(NOTHING, tmp_path) == "'' 0 0\n[]\n"


def test_an_sdk_that_is_installed_after_the_import_is_used(tmp_path: Path) -> None:
    names = run(INSTALLED, tmp_path).split()
    assert sorted(names) == sorted(["bcp.save", *SAVE_PHASES])
