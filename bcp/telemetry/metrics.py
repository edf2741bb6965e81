"""OpenTelemetry metrics of saves and loads. No label grows with the steps, the paths or the ranks of a job."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from weakref import WeakKeyDictionary

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from bcp._version import __version__
from bcp.errors import CorruptError, StageError
from bcp.events import (
    BudgetEvent,
    Event,
    LoadResult,
    PhaseEvent,
    RequestEvent,
    RetryEvent,
    SaveResult,
    StageEvent,
    StageStart,
    TierEvent,
)
from bcp.runtime.process import process_lock
from bcp.telemetry.settings import is_sdk
from bcp.telemetry.tiers import TierCounters, TierStates
from bcp.telemetry.watch import Watch

__all__ = ["BOUNDARIES", "Metrics"]

BOUNDARIES = [digit * 10.0**power for power in range(-3, 3) for digit in (1.0, 2.5, 5.0)] + [1000.0]
"""Advice for the buckets of durations, in seconds: three a decade, for requests in memory and for saves of minutes."""


@dataclass(slots=True)
class _Live:
    """One operation that is under way.

    Attributes:
        waiting: items in the queue of each stage.
        nbytes: staging memory that its items have borrowed.
        failed: name of the phase that raised; empty if none did.
        ends: when each phase ended, by ``time.monotonic()``.
    """

    waiting: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    failed: str = ""
    ends: dict[str, float] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, PhaseEvent):
            self.ends[event.phase] = event.ended
            self.failed = self.failed or (event.phase if event.error else "")
        elif isinstance(event, StageStart):
            self.waiting[event.stage] -= 1
        elif isinstance(event, StageEvent | BudgetEvent):
            if event.onward:
                self.waiting[event.onward] += 1
            if isinstance(event, BudgetEvent):
                self.nbytes += event.nbytes
            elif not event.onward:
                self.nbytes -= event.nbytes


@dataclass(frozen=True, slots=True)
class _Durable:
    """The newest durable checkpoint that this process knows.

    Attributes:
        committed: when it was committed, by ``time.time()``.
        holds: until when training's work is in it, by the same clock.
        step: of training, if it is known.
        world_size: how many ranks train.
    """

    committed: float
    holds: float
    step: int | None
    world_size: int


class _Instruments:
    """Everything but the gauges, which are asked and not told."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.blocking = self._seconds("bcp.save.blocking", "Time from the call until training could go on")
        self.stall = self._seconds("bcp.save.stall", "Blocking, and the time that optimizer steps waited")
        self.released = self._seconds("bcp.save.released", "Time from the call until all ranks had it in memory")
        self.durable = self._seconds("bcp.save.durable", "Time from the call to the commit")
        self.lag = self._seconds("bcp.save.lag", "Time from the end of the snapshot to the commit")
        self.load = self._seconds("bcp.load.duration", "Time of a load")
        self.stage = self._seconds("bcp.stage.duration", "Time from a stage's first item to its last one")
        self.phase = self._seconds("bcp.phase.duration", "Time of a phase")
        self.request = self._seconds("bcp.storage.request", "Time of one attempt of a request to storage")
        self.nbytes = meter.create_counter("bcp.bytes", "By", "Bytes in data files, or in loaded tensors")
        self.dedup = meter.create_counter("bcp.dedup.bytes", "By", "Bytes that another replica wrote for this rank")
        self.retries = meter.create_counter("bcp.retries", "{retry}", "Requests to storage that were made again")
        self.failures = meter.create_counter("bcp.failures", "{failure}", "Saves and loads that failed")
        self.corrupt = meter.create_counter("bcp.corrupt.blocks", "{block}", "Blocks that were not what was saved")
        self.tiers = TierCounters(meter)

    def begin(self, kind: str) -> None:
        """Let counters be zero before they count: Prometheus takes no notice of the first value of a series."""
        self.retries.add(0, {"kind": kind})
        self.corrupt.add(0)

    def _seconds(self, name: str, description: str) -> Histogram:
        return self._meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=BOUNDARIES)


class Metrics:
    """A :class:`~bcp.telemetry.watch.Sink` that measures; it does nothing in a process that has no SDK.

    The rank is no label. It belongs to the resource that the application gives to its SDK, as ``dl.rank``.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self._given = meter is not None
        meter = meter or metrics.get_meter("bcp", __version__)
        self._to = _Instruments(meter)
        self._lock = process_lock()
        self._live: WeakKeyDictionary[Watch, _Live] = WeakKeyDictionary()
        self._stages: set[str] = set()
        self._newest: _Durable | None = None
        self._tiers = TierStates()
        gauges: list[tuple[str, str, str, Callable[[], Iterable[Observation]]]] = [
            ("bcp.checkpoint.age", "s", "Time since the newest durable checkpoint was committed", self._age),
            ("bcp.checkpoint.step", "{step}", "Step of the newest durable checkpoint", self._step),
            (
                "bcp.work.at_risk",
                "s",
                "Work of all ranks that the newest durable checkpoint lacks",
                self._at_risk,
            ),
            (
                "bcp.tier.age",
                "s",
                "Time since the call of the newest save in a tier",
                self._tiers.ages,
            ),
            ("bcp.drain.snapshots", "{snapshot}", "Snapshots on their way to storage", self._tiers.waiting),
            ("bcp.drain.bytes", "By", "Bytes of snapshots on their way to storage", self._tiers.nbytes),
            ("bcp.queue.occupancy", "{item}", "Items that wait for a stage", self._occupancy),
            ("bcp.staging.bytes", "By", "Staging memory in use", self._staging),
        ]
        for name, unit, description, ask in gauges:
            meter.create_observable_gauge(name, [_asking(ask)], unit, description)

    # -- as a sink ---------------------------------------------------------------------------------

    def began(self, watch: Watch) -> None:
        """Follow it, if there is an SDK."""
        if self._given or is_sdk(metrics.get_meter_provider()):
            with self._lock:
                self._live[watch] = _Live()
            self._to.begin(watch.kind)
            if watch.tier == "memory":
                self._to.tiers.begin()

    def joined(self, watch: Watch) -> None:
        """Do nothing."""

    def happened(self, watch: Watch, event: Event) -> None:
        """Record an event."""
        if isinstance(event, TierEvent):
            self._take(watch, event)
            return
        live = self._live.get(watch)
        if live is None:
            return
        if isinstance(event, RequestEvent):
            labels = {"operation": event.operation, "backend": _scheme(event.store), "status": event.status}
            self._to.request.record(event.ended - event.started, labels)
        elif isinstance(event, RetryEvent):
            self._to.retries.add(1, {"kind": watch.kind})
        else:
            live.take(event)
            if isinstance(event, PhaseEvent) and not event.error:
                self._to.phase.record(event.ended - event.started, {"kind": watch.kind, "phase": event.phase})

    def ended(self, watch: Watch) -> None:
        """Record how it ended."""
        with self._lock:
            live = self._live.pop(watch, None)
            self._stages.update(live.waiting if live else ())
        self._remember(watch, live or _Live())
        if live is None:
            return
        if watch.error is not None:
            self._record_failure(watch, watch.error, live)
        elif watch.result is not None:
            labels = {"kind": watch.kind}
            is_kept = watch.kind == "save" and watch.tier == "memory"
            self._to.nbytes.add(watch.result.nbytes, {"kind": "memory"} if is_kept else labels)
            for stage, seconds in watch.result.stage_seconds.items():
                self._to.stage.record(seconds, {**labels, "stage": stage})
            if isinstance(watch.result, LoadResult):
                self._to.load.record(watch.result.seconds)
            else:
                self._record_save(watch, watch.result, live)

    def _record_save(self, watch: Watch, result: SaveResult, live: _Live) -> None:
        labels = {"background": watch.background}
        blocking = result.seconds if watch.blocking is None else watch.blocking
        self._to.blocking.record(blocking, labels)
        self._to.stall.record(blocking + result.step_wait_seconds, labels)
        self._to.dedup.add(max(result.dedup_saved_bytes, 0))
        if watch.tier == "memory":
            return
        if "commit" in live.ends:
            self._to.durable.record(live.ends["commit"] - watch.started, labels)
        if {"commit", "snapshot"} <= live.ends.keys():
            self._to.lag.record(live.ends["commit"] - live.ends["snapshot"], labels)

    def _take(self, watch: Watch, event: TierEvent) -> None:
        """Record what has happened to a snapshot in memory."""
        lag = self._tiers.take(watch, event)
        self._to.tiers.count(event)
        if event.what == "released" and event.seconds is not None:
            self._to.released.record(event.seconds)
        if event.what != "durable":
            return
        if event.seconds is not None:
            self._to.durable.record(event.seconds, {"background": True})
            self._to.nbytes.add(event.nbytes, {"kind": "save"})
        if lag is not None:
            self._to.lag.record(lag, {"background": True})
        committed = watch.time + event.moment - watch.started
        self._newer(_Durable(committed, watch.time, event.step, watch.world_size))

    def _record_failure(self, watch: Watch, error: BaseException, live: _Live) -> None:
        """Count a failure by its stage, or its phase, and the type of its first cause."""
        causes = list(_chain(error))
        stage = next((cause.stage for cause in causes if isinstance(cause, StageError)), live.failed)
        labels = {"kind": watch.kind, "stage": stage, "error.type": type(error).__name__}
        self._to.failures.add(1, labels)
        if any(isinstance(cause, CorruptError) for cause in causes):
            self._to.corrupt.add(1)  # it ends at the first one

    def _remember(self, watch: Watch, live: _Live) -> None:
        """Take note of a checkpoint that is durable, unless a newer one is known."""
        if watch.result is None or (watch.kind == "save" and watch.tier == "memory"):
            return
        now = time.time()
        if watch.tier == "memory":
            self._tiers.holds("memory", now)
            return
        if watch.kind == "save":
            committed = watch.time + live.ends["commit"] - watch.started if "commit" in live.ends else now
            holds = watch.time
        else:
            committed, holds = _seconds_of(watch.created, now), now
        self._tiers.holds("storage", holds)
        self._newer(_Durable(committed, holds, watch.step, watch.world_size))

    def _newer(self, durable: _Durable) -> None:
        """Take note of a checkpoint, unless one is known that was committed later."""
        if self._newest is None or durable.committed >= self._newest.committed:
            self._newest = durable

    # -- the gauges --------------------------------------------------------------------------------

    def _age(self) -> Iterator[Observation]:
        if self._newest is not None:
            yield Observation(max(time.time() - self._newest.committed, 0.0))

    def _step(self) -> Iterator[Observation]:
        if self._newest is not None and self._newest.step is not None:
            yield Observation(self._newest.step)

    def _at_risk(self) -> Iterator[Observation]:
        if self._newest is not None:
            yield Observation(max(time.time() - self._newest.holds, 0.0) * self._newest.world_size)

    def _occupancy(self) -> Iterator[Observation]:
        with self._lock:
            waiting = Counter(dict.fromkeys(self._stages, 0))
        for live in self._under_way():
            waiting.update(dict(live.waiting))  # a copy: its loop may add a stage just now
        for stage, count in waiting.items():
            yield Observation(count, {"stage": stage})

    def _staging(self) -> Iterator[Observation]:
        yield Observation(sum(live.nbytes for live in self._under_way()))

    def _under_way(self) -> Sequence[_Live]:
        with self._lock:
            return list(self._live.values())


def _asking(ask: Callable[[], Iterable[Observation]]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda _: ask()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _scheme(store: str) -> str:
    """Return the kind of a store, as in ``gs``; ``file`` for a directory."""
    scheme, separator, _ = store.partition("://")
    return scheme if separator else "file"


def _seconds_of(created: str, otherwise: float) -> float:
    """Return a time in ISO 8601 as seconds since 1970; the other one if it is none."""
    with suppress(ValueError):
        return datetime.fromisoformat(created).timestamp()
    return otherwise
