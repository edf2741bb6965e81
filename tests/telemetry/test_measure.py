from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import bcp
from bcp.events import PhaseEvent, observed_by
from bcp.runtime.threads import in_thread
from bcp.telemetry import measure

STATE = {"model": {"w": torch.ones(1000)}}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    bcp.telemetry.configure(spans=("measure",))
    yield kept
    bcp.telemetry.configure()
    provider.shutdown()


def names(events: list[Any]) -> list[str]:
    return [event.phase for event in events if isinstance(event, PhaseEvent)]


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_block_in_an_operation_is_an_event() -> None:
    events: list[Any] = []
    with observed_by(events.append), measure("outer"), measure("inner"):
        pass
    inner, outer = events
    assert names(events) == ["inner", "outer"]
    assert outer.started <= inner.started <= inner.ended <= outer.ended
    assert inner.error == outer.error == ""


def test_an_error_is_recorded_and_passes(exporter: InMemorySpanExporter) -> None:
    events: list[Any] = []
    with observed_by(events.append), pytest.raises(ValueError, match="no"), measure("tokenize"):
        raise ValueError("no")
    (event,) = events
    assert event.error == "ValueError: no"
    span = spans(exporter)["bcp.measure.tokenize"]
    assert not span.status.is_ok
    assert [each.name for each in span.events] == ["exception"]


@pytest.mark.anyio
async def test_async_blocks_and_functions_keep_tasks_apart(exporter: InMemorySpanExporter) -> None:
    @measure("work")
    async def work(number: int) -> int:
        async with measure(f"part {number}"):
            await asyncio.sleep(0)
        return number

    events: list[Any] = []
    with observed_by(events.append):
        assert await asyncio.gather(*map(work, range(3))) == [0, 1, 2]
    assert sorted(names(events)) == ["part 0", "part 1", "part 2", "work", "work", "work"]
    work_ids = {span.context.span_id for span in exporter.get_finished_spans() if span.name == "bcp.measure.work"}
    parts = [span for span in exporter.get_finished_spans() if "part" in span.name]
    assert {span.parent.span_id for span in parts if span.parent} == work_ids
    assert len(work_ids) == 3


def test_a_decorated_function_is_the_same_function_and_may_call_itself() -> None:
    @measure("factorial")
    def factorial(number: int) -> int:
        """Multiply."""
        return number * factorial(number - 1) if number else 1

    @measure("later")
    async def later() -> None: ...

    events: list[Any] = []
    with observed_by(events.append):
        assert factorial(3) == 6
    assert names(events) == ["factorial"] * 4
    assert (factorial.__name__, factorial.__doc__) == ("factorial", "Multiply.")
    assert inspect.iscoroutinefunction(later)


def test_a_generator_function_is_refused() -> None:
    def batches() -> Iterator[int]:
        yield 1

    async def later_batches() -> AsyncIterator[int]:
        yield 1

    for function in (batches, later_batches):
        with pytest.raises(bcp.InputError, match="measure a block in"):
            measure("batches")(function)


def test_names_of_bcps_own_phases_are_refused() -> None:
    with pytest.raises(bcp.InputError, match="'write'"):
        measure("write")


def test_one_measure_is_one_block_at_a_time() -> None:
    block = measure("tokenize")
    with block, pytest.raises(RuntimeError, match="in a block already"):
        block.__enter__()
    events: list[Any] = []
    with observed_by(events.append), block:
        pass
    assert names(events) == ["tokenize"]


def test_spans_nest_and_have_attributes(exporter: InMemorySpanExporter) -> None:
    with measure("outer", shard=3), measure("inner"):
        assert trace.get_current_span().is_recording()
    assert not trace.get_current_span().is_recording()
    found = spans(exporter)
    outer, inner = found["bcp.measure.outer"], found["bcp.measure.inner"]
    assert outer.attributes == {"shard": 3}
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id


def test_without_the_group_there_is_no_span(exporter: InMemorySpanExporter) -> None:
    bcp.telemetry.configure()
    with measure("outer"):
        pass
    assert exporter.get_finished_spans() == ()


def test_blocks_in_a_stage_and_its_threads_are_events_of_the_save(tmp_path: Path) -> None:
    def work(item: Any) -> Any:
        with measure("in a thread"):
            return item

    @measure("in the stage")
    async def stage(item: Any) -> Any:
        return await in_thread(work, item)

    events: list[Any] = []
    edit = bcp.SaveOptions(
        edit=lambda graph: graph.after("d2h", bcp.extend.Stage("mine", stage)), observe=events.append
    )
    bcp.save(tmp_path, STATE, options=edit)
    assert set(names(events)) >= {"in a thread", "in the stage"}
