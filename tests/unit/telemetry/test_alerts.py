from __future__ import annotations

import io
import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from logs import captured_logs
from opentelemetry import metrics

import bcp
from bcp.events import LoadResult, SaveResult
from bcp.telemetry import Alert, Alerts, Watch
from bcp.telemetry import alerts as module

MIB = 1 << 20
STATE = {"model": {"w": torch.ones(1000)}}


@pytest.fixture(autouse=True)
def configured_no_more() -> Iterator[None]:
    yield
    bcp.telemetry.configure()


def saved(**changes: Any) -> SaveResult:
    known = {"path": "run/8", "operation": "0", "rank": 3, "world_size": 4, "nbytes": 256 * MIB, "state_nbytes": 0}
    return SaveResult(**{**known, "dedup_saved_bytes": 0, "seconds": 2.0, "blocking_seconds": 0.5, **changes})


def judged(
    limits: dict[str, float], report: SaveResult | LoadResult, *events: bcp.extend.Event, **watch: Any
) -> list[Alert]:
    """Return the alerts of a save or load with that report and these events."""
    found: list[Alert] = []
    alerts = Alerts(**limits, on_alert=found.append)  # type: ignore[arg-type]
    followed = Watch("save", "run/8", rank=3, world_size=4, **watch)
    alerts.began(followed)
    for event in events:
        followed(event)
        alerts.happened(followed, event)
    followed.result = report
    alerts.ended(followed)
    return found


def test_slow_saves_are_told_with_rank_step_path_and_remedy() -> None:
    (alert,) = judged({"min_throughput": 200e6}, saved())
    assert (alert.name, alert.limit, alert.value) == ("min_throughput", 200e6, 128 * MIB)
    assert (alert.path, alert.step, alert.rank) == ("run/8", 8, 3)
    assert "134.2 MB/s" in alert.sentence
    assert judged({"min_throughput": 100e6}, saved()) == []
    with pytest.raises(FrozenInstanceError):
        alert.value = 0.0  # type: ignore[misc]


def test_small_saves_are_not_judged_by_throughput() -> None:
    assert judged({"min_throughput": 200e6}, saved(nbytes=0)) == []
    assert judged({"min_throughput": 200e6}, saved(nbytes=64 * MIB - 1)) == []
    assert len(judged({"min_throughput": 200e6}, saved(nbytes=64 * MIB))) == 1


@pytest.mark.parametrize(
    ("background", "stall"), [(True, 0.5), (False, 2.0)], ids=["an asynchronous save", "a synchronous save"]
)
def test_a_stall_is_the_time_that_training_waits(*, background: bool, stall: float) -> None:
    assert judged({"max_stall": stall + 0.25}, saved(step_wait_seconds=0.25), background=background) == []
    (alert,) = judged({"max_stall": stall + 0.2}, saved(step_wait_seconds=0.25), background=background)
    assert (alert.name, alert.value) == ("max_stall", stall + 0.25)


def test_a_save_that_is_durable_late_is_told() -> None:
    assert judged({"max_durable": 2.0}, saved()) == []
    (alert,) = judged({"max_durable": 1.5}, saved())
    assert (alert.name, alert.value) == ("max_durable", 2.0)


def request(seconds: float, key: str = "model/a") -> bcp.extend.RequestEvent:
    return bcp.extend.RequestEvent("gs://bucket/run", "put", key, 32 * MIB, 1.0, 1.0 + seconds)


def test_the_first_slow_request_of_an_operation_is_told_at_once() -> None:
    found: list[Alert] = []
    alerts = Alerts(max_request_seconds=5, on_alert=found.append)
    watches = [Watch("load", "run/8"), Watch("save", "run/9")]
    alerts.happened(watches[0], request(5.0))
    assert found == []
    alerts.happened(watches[0], request(6.0, "model/b"))
    alerts.happened(watches[0], request(7.0))
    alerts.happened(watches[1], request(8.0))
    assert [(alert.path, alert.value) for alert in found] == [("run/8", 6.0), ("run/9", 8.0)]
    assert "put of model/b in gs://bucket/run" in found[0].sentence


def part(stage: str, item: str, seconds: float, nbytes: int = 32 * MIB) -> bcp.extend.StageEvent:
    return bcp.extend.StageEvent(stage, item, nbytes, 1.0, 1.0 + seconds)


def test_the_slowest_part_is_compared_with_the_median_of_its_stage() -> None:
    usual = [part("upload", f"part {index}", 2.0) for index in range(4)]
    others = [part("d2h", f"part {index}", 0.001) for index in range(4)] + [part("d2h", "part 4", 0.9)]
    (alert,) = judged({"straggler_ratio": 3}, saved(), *usual, *others, part("upload", "part 4", 8.0))
    assert (alert.name, alert.value) == ("straggler_ratio", 4.0)
    assert "part 4 took 8 s in stage upload" in alert.sentence
    assert judged({"straggler_ratio": 4}, saved(), *usual, part("upload", "part 4", 8.0)) == []


def test_large_few_and_tiny_parts_are_no_stragglers() -> None:
    usual = [part("upload", f"part {index}", 2.0, 8 * MIB) for index in range(4)]
    assert judged({"straggler_ratio": 3}, saved(), *usual, part("upload", "large", 8.0)) == []
    assert judged({"straggler_ratio": 3}, saved(), *usual, part("upload", "tiny", 8.0, MIB - 1)) == []
    assert judged({"straggler_ratio": 3}, saved(), *usual[:2], part("upload", "slow", 80.0)) == []


def test_a_failed_save_crosses_no_threshold() -> None:
    found: list[Alert] = []
    alerts = Alerts(max_stall=1e-9, max_durable=1e-9, min_throughput=1e18, on_alert=found.append)
    watch = Watch("save", "run/8")
    watch.error = ValueError()
    alerts.ended(watch)
    assert found == []


def test_a_real_save_and_load_alert_by_callback_and_log_line(tmp_path: Path) -> None:
    stream, found = io.StringIO(), list[Alert]()
    alerts = Alerts(max_stall=1e-9, max_durable=1e-9, on_alert=found.append)
    bcp.telemetry.configure(logs="json", stream=stream, level="warning", run="gpt", alerts=alerts)
    report = bcp.save(tmp_path / "5", STATE)
    bcp.load(tmp_path / "5", STATE)
    assert [alert.name for alert in found] == ["max_stall", "max_durable"]
    assert {alert.value for alert in found} == {report.seconds}
    stall, durable = map(json.loads, stream.getvalue().splitlines())
    assert (stall["alert"], durable["alert"]) == ("max_stall", "max_durable")
    assert (stall["level"], stall["event"], stall["value"]) == ("warning", found[0].sentence, report.seconds)
    assert (stall["run"], stall["step"], stall["operation"], stall["rank"]) == ("gpt", 5, report.operation, 0)
    bcp.telemetry.configure()
    bcp.save(tmp_path / "6", STATE)
    assert len(found) == 2


def test_requests_of_a_real_save_are_looked_at(tmp_path: Path) -> None:
    found: list[Alert] = []
    bcp.telemetry.configure(alerts=Alerts(max_request_seconds=1e-9, on_alert=found.append))
    bcp.save(tmp_path / "5", STATE)
    assert [alert.name for alert in found] == ["max_request_seconds"]


def test_an_error_of_the_callback_is_logged_and_the_save_goes_on(tmp_path: Path) -> None:
    def fail(_: Alert) -> None:
        raise ZeroDivisionError

    bcp.telemetry.configure(alerts=Alerts(max_stall=1e-9, max_durable=1e-9, on_alert=fail))
    with captured_logs() as lines:
        bcp.save(tmp_path / "5", STATE)
    told = [(line["log_level"], line["alert"]) for line in lines]
    assert told == [(level, name) for name in ("max_stall", "max_durable") for level in ("warning", "error")]


def test_alerts_are_counted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[int, dict[str, str]]] = []

    class Counter:
        def add(self, number: int, attributes: dict[str, str]) -> None:
            counted.append((number, attributes))

    class Meter:
        def create_counter(self, name: str, **_: str) -> Counter:
            assert name == "bcp.alerts"
            return Counter()

    monkeypatch.setattr(metrics, "get_meter", lambda _: Meter())
    judged({"max_stall": 0.1, "max_durable": 0.1}, saved())
    assert counted == [(1, {"alert": "max_stall"}), (1, {"alert": "max_durable"})]


@pytest.mark.parametrize(
    "wrong",
    [{"max_age": 0}, {"max_stall": -1.0}, {"straggler_ratio": 1}, {"min_throughput": "fast"}, {"max_age": True}],
    ids=str,
)
def test_impossible_thresholds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(bcp.InputError, match=next(iter(wrong))):
        Alerts(**wrong)


# -- age -------------------------------------------------------------------------------------------


class Timers:
    """Timers whose time comes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.waiting: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(module, "_Timer", self._timer)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _timer(self, seconds: float, function: Callable[[], None]) -> Timers:
        self.waiting = [(self.now + seconds, function)]
        return self

    def cancel(self) -> None:
        self.waiting = []

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds
        due = [function for moment, function in self.waiting if moment <= self.now]
        self.waiting = [] if due else self.waiting
        for function in due:
            function()


def ended(alerts: Alerts, kind: Any, path: str, started: float, report: object) -> None:
    watch = Watch(kind, path, started=started)
    watch.result = report  # type: ignore[assignment]
    alerts.began(watch)
    alerts.ended(watch)


def test_the_age_counts_from_the_call_of_the_newest_committed_save(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, found = Timers(monkeypatch), list[Alert]()
    alerts = Alerts(max_age=60, on_alert=found.append)
    alerts.start()
    timers.pass_seconds(50)
    ended(alerts, "save", "run/8", timers.now - 20, saved())
    timers.pass_seconds(39)
    assert found == []
    timers.pass_seconds(2)
    (alert,) = found
    assert (alert.name, alert.value, alert.limit, alert.path, alert.step, alert.rank) == (
        *("max_age", 61.0, 60, "run/8", 8),
        0,
    )
    timers.pass_seconds(1000)
    assert len(found) == 1
    ended(alerts, "save", "run/9", timers.now, saved())
    timers.pass_seconds(60)
    assert [alert.path for alert in found] == ["run/8", "run/9"]


def test_a_save_that_failed_or_began_earlier_makes_nothing_younger(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, found = Timers(monkeypatch), list[Alert]()
    alerts = Alerts(max_age=60, on_alert=found.append)
    alerts.start()
    ended(alerts, "save", "run/9", timers.now, saved())
    ended(alerts, "save", "run/8", timers.now - 30, saved())
    ended(alerts, "save", "run/10", timers.now + 30, None)
    timers.pass_seconds(60)
    assert [alert.path for alert in found] == ["run/9"]


def test_the_age_of_a_job_without_any_save_counts_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, found = Timers(monkeypatch), list[Alert]()
    Alerts(max_age=60, on_alert=found.append).start()
    timers.pass_seconds(60)
    assert [(alert.path, alert.step) for alert in found] == [("", None)]
    assert "no save in 60 s" in found[0].sentence


def test_only_rank_0_tells_of_the_age(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, found = Timers(monkeypatch), list[Alert]()
    monkeypatch.setenv("RANK", "1")
    Alerts(max_age=60, on_alert=found.append).start()
    timers.pass_seconds(1000)
    assert found == []


def test_the_watchdog_runs_while_nothing_happens_and_has_no_thread_of_its_own(tmp_path: Path) -> None:
    bcp.save(tmp_path, STATE)
    threads = set(threading.enumerate())
    found: queue.Queue[Alert] = queue.Queue()
    bcp.telemetry.configure(alerts=Alerts(max_age=0.01, on_alert=found.put))
    assert found.get(timeout=60).name == "max_age"
    assert set(threading.enumerate()) <= threads


def test_alerts_that_are_configured_no_more_do_not_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, found = Timers(monkeypatch), list[Alert]()
    alerts = Alerts(max_age=60, on_alert=found.append)
    bcp.telemetry.configure(alerts=alerts)
    bcp.telemetry.configure(alerts=alerts)
    bcp.telemetry.configure()
    timers.pass_seconds(1000)
    assert found == []
