"""The events of saves and loads, and those who follow them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_store import FakeStore
from logs import captured_logs
from ranks import Ranks
from torch import distributed as dist

import bcp
from bcp.backends.objects import ObjectBackend, RequestError
from bcp.events import Event, PhaseEvent, RequestEvent, StageEvent, emit
from bcp.protocols import RetryPolicy
from bcp.telemetry import watch as watching
from bcp.telemetry.watch import Watch, add_sink, remove_sink, step_of


def states() -> dict[str, Any]:
    return {"model": {"w": torch.arange(1 << 18, dtype=torch.float32)}, "extra_states": {"step": 3}}


def saved(place: Any, **options: Any) -> list[Event]:
    events: list[Event] = []
    bcp.save(place, states(), options=bcp.SaveOptions(observe=events.append, **options))
    return events


def of_kind(events: list[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def requests(events: list[Event], *verbs: str) -> list[RequestEvent]:
    return [event for event in of_kind(events, RequestEvent) if event.operation in verbs]


# -- phases and requests -------------------------------------------------------------------------


def test_phases_follow_each_other(tmp_path: Path) -> None:
    events = saved(tmp_path / "c")
    phases = of_kind(events, PhaseEvent)
    assert [event.phase for event in phases] == ["plan", "snapshot", "write", "commit"]
    plan, snapshot, write, commit = phases
    assert plan.ended <= write.started <= snapshot.started <= snapshot.ended <= write.ended <= commit.started
    events.clear()
    bcp.load(tmp_path / "c", states(), options=bcp.LoadOptions(observe=events.append))
    assert [event.phase for event in of_kind(events, PhaseEvent)] == ["open", "plan", "read", "finish"]


def test_a_phase_says_how_it_failed(tmp_path: Path) -> None:
    events: list[Event] = []
    saved(tmp_path)
    with pytest.raises(bcp.ExistsError):
        bcp.save(tmp_path, states(), options=bcp.SaveOptions(observe=events.append))
    (plan,) = of_kind(events, PhaseEvent)
    assert plan.phase == "plan"
    assert plan.error.startswith("ExistsError: ")


def test_a_local_directory_tells_of_its_calls(tmp_path: Path) -> None:
    events = saved(tmp_path, part_bytes=1 << 20)
    size = sum(file.stat().st_size for file in (tmp_path / "model").iterdir())
    parts = [event for event in requests(events, "part") if event.key.startswith("model/")]
    assert sum(event.nbytes for event in parts) == size
    assert {event.key for event in parts} == {f"model/{file.name}" for file in (tmp_path / "model").iterdir()}
    assert {event.store for event in of_kind(events, RequestEvent)} == {str(tmp_path)}
    assert {event.status for event in parts} == {"ok"}
    assert len(requests(events, "put_if")) == 1


def test_a_call_that_fails_says_so(tmp_path: Path) -> None:
    events: list[Event] = []
    (tmp_path / "model").write_text("in the way")
    with pytest.raises(bcp.StorageError):
        bcp.save(tmp_path, states(), options=bcp.SaveOptions(observe=events.append))
    failed = [event for event in of_kind(events, RequestEvent) if event.status == "failed"]
    assert [event.operation for event in failed] == ["begin"]
    assert "NotADirectoryError" in failed[0].said or "FileExistsError" in failed[0].said


def failing(verb: str, times: int) -> Callable[[str], None]:
    left = [times]

    def fail(what: str) -> None:
        if what == verb and left[0]:
            left[0] -= 1
            raise RequestError("503 try later", transient=True)

    return fail


def test_each_attempt_at_a_store_is_an_event() -> None:
    store = FakeStore()
    store.fail = failing("put", 2)
    events = saved(ObjectBackend(store, RetryPolicy(first_pause_seconds=1e-4)))
    attempts: dict[str, list[tuple[int, str]]] = {}
    for event in requests(events, "put"):
        attempts.setdefault(event.key, []).append((event.attempt, event.status))
    most = max(attempts.values(), key=len)
    assert most in (
        [(1, "again"), (2, "again"), (3, "ok")],
        [(1, "again"), (2, "ok")],
    )
    assert sum(status == "again" for each in attempts.values() for _, status in each) == 2
    assert {event.store for event in of_kind(events, RequestEvent)} == {"fake://bucket/root"}
    assert len(of_kind(events, bcp.extend.RetryEvent)) == 2


def test_a_request_that_is_given_up_is_an_event() -> None:
    store = FakeStore()
    events: list[Event] = []
    store.fail = failing("put", 1000)
    backend = ObjectBackend(store, RetryPolicy(first_pause_seconds=1e-4, allowance=3))
    with pytest.raises(bcp.StorageError):
        bcp.save(backend, states(), options=bcp.SaveOptions(observe=events.append))
    failed = [event for event in of_kind(events, RequestEvent) if event.status == "failed"]
    assert [event.said for event in failed][:1] == ["503 try later"]


def test_an_absent_object_is_an_answer() -> None:
    events: list[Event] = []
    with pytest.raises(bcp.NotACheckpointError):
        bcp.load(ObjectBackend(FakeStore()), states(), options=bcp.LoadOptions(observe=events.append))
    (get,) = requests(events, "get")
    assert get.status == "ok"
    assert get.said.startswith("FileNotFoundError")


def test_a_stage_that_fails_is_an_event(tmp_path: Path) -> None:
    async def fail(_: Any) -> Any:
        raise OSError("no more")

    events: list[Event] = []
    options = bcp.SaveOptions(
        observe=events.append,
        edit=lambda graph: graph.before("upload", bcp.extend.Stage("scan", fail)),
        part_bytes=1 << 20,
    )
    with pytest.raises(bcp.StageError):
        bcp.save(tmp_path, states(), options=options)
    failed = [event for event in of_kind(events, StageEvent) if event.error]
    assert [(event.stage, event.error) for event in failed] == [("scan", "OSError: no more")]


# -- those who follow ----------------------------------------------------------------------------


class Follower:
    """A sink that writes down all calls; it raises in those that it is told to."""

    def __init__(self, *raising: str, trace: str = "") -> None:
        self.calls: list[str] = []
        self.watches: list[Watch] = []
        self.outcomes: list[Any] = []
        self.raising = raising
        self.trace = trace

    def call(self, name: str, watch: Watch) -> None:
        if name != "happened" or name not in self.calls:
            self.calls.append(name)
        self.watches.append(watch)
        if name in self.raising:
            raise RuntimeError(name)

    def began(self, watch: Watch) -> None:
        if watch.rank == 0:
            watch.trace = self.trace
        self.call("began", watch)

    def joined(self, watch: Watch) -> None:
        self.call("joined", watch)

    def happened(self, watch: Watch, _: Event) -> None:
        self.call("happened", watch)

    def ended(self, watch: Watch) -> None:
        self.outcomes.append(watch.result or watch.error)
        self.call("ended", watch)


@pytest.fixture
def follower(request: pytest.FixtureRequest) -> Any:
    sink = Follower(*getattr(request, "param", ()))
    add_sink(sink)
    yield sink
    remove_sink(sink)


def test_a_sink_follows_saves_and_loads(tmp_path: Path, follower: Follower) -> None:
    report = bcp.save(tmp_path / "step-0070", states(), async_checkpoint=True).wait()
    assert follower.calls == ["began", "happened", "joined", "ended"]
    (watch,) = set(follower.watches)
    assert (watch.kind, watch.step, watch.background, watch.operation) == ("save", 70, True, report.operation)
    assert follower.outcomes == [report]
    loaded = bcp.load(tmp_path / "step-0070", states(), options=bcp.LoadOptions(step=71))
    assert follower.outcomes[1:] == [loaded]
    assert follower.watches[-1].step == 71
    bcp.prepare(states()).wait()
    assert len(follower.outcomes) == 2
    with pytest.raises(bcp.ExistsError) as caught:
        bcp.save(tmp_path / "step-0070", states())
    assert type(follower.outcomes[2]) is type(caught.value)


@pytest.mark.parametrize("follower", [["began"], ["joined"], ["happened"], ["ended"]], indirect=True)
def test_a_sink_that_raises_is_left_out(tmp_path: Path, follower: Follower) -> None:
    with captured_logs() as logs:
        bcp.save(tmp_path, states())
    assert follower.calls[-1] == follower.raising[0]
    assert sum("telemetry raised" in line["event"] for line in logs) == 1


def test_an_observer_that_raises_is_left_out(tmp_path: Path) -> None:
    calls = []

    def observe(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("meter")

    with captured_logs() as logs:
        bcp.save(tmp_path, states(), options=bcp.SaveOptions(observe=observe))
    assert len(calls) == 1
    assert sum("an observer raised" in line["event"] for line in logs) == 1


def joined_on_rank(folder: Path) -> list[tuple[str, str]]:
    sink = Follower(trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    add_sink(sink)
    try:
        bcp.save(folder / "c", {"model": {"w": torch.ones(8)}})
        bcp.load(folder / "c", {"model": {"w": torch.ones(8)}})
    finally:
        remove_sink(sink)
    dist.barrier()
    return [(watch.operation, watch.trace) for watch in dict.fromkeys(sink.watches)]


def test_all_ranks_have_rank_0s_trace(ranks4: Ranks, tmp_path: Path) -> None:
    first, *others = ranks4.run(joined_on_rank, tmp_path)
    assert others == [first] * 3
    assert {trace for _, trace in first} == {"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    assert len(first) == 2
    assert len({operation for operation, _ in first}) == 1


def test_events_outside_of_an_operation_are_nobodys() -> None:
    emit(PhaseEvent("alone", 0.0, 1.0))


def test_a_watch_keeps_so_many_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MOST_EVENTS", 3)
    seen: list[Event] = []
    watch = Watch("save", "run", observe=seen.append)
    for number in range(5):
        watch(PhaseEvent(str(number), 0.0, 1.0))
    assert (len(watch.events), watch.dropped, len(seen)) == (3, 2, 5)


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("gs://bucket/run/step-00100", 100),
        ("/ckpt/run7/100/", 100),
        ("run/global_step12/actor", 12),
        ("run/latest", None),
        ("checkpoint", None),
        ("run2/a/b", None),
        ("step-5.tmp", None),
    ],
)
def test_the_step_is_the_number_at_the_end(path: str, step: int | None) -> None:
    assert step_of(path) == step
