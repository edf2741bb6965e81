"""Thresholds of saves and loads: each crossing is a log line, a metric and a call."""

from __future__ import annotations

import os
import statistics
import time
from asyncio import TimerHandle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real

from opentelemetry import metrics

from bcp._log import log
from bcp.errors import InputError
from bcp.events import Event, LoadResult, RequestEvent, SaveResult, StageEvent, TierEvent
from bcp.runtime import event_loop as _loop
from bcp.telemetry.watch import Watch

__all__ = ["Alert", "Alerts"]

MIB = 1 << 20
SMALL_NBYTES = 64 * MIB
"""Saves and loads below this are not judged by throughput: latency decides how long they take."""
SMALL_PART_NBYTES = MIB
FEWEST_PARTS = 4
LEAST_SECONDS = 1.0
"""Parts in less than this are no stragglers, for any median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One crossing of a threshold, as one rank saw it.

    Attributes:
        name: of the threshold, as in ``max_stall``.
        value: the value that crossed it, in the threshold's unit.
        limit: the threshold.
        path: where the checkpoint is; empty for ``max_age`` before the first save or load.
        step: its training step, if it is known.
        rank: the rank that saw it.
        sentence: the fact and the remedy, for people.
    """

    name: str
    value: float
    limit: float
    path: str
    step: int | None
    rank: int
    sentence: str


class Alerts:
    """Watches thresholds, for :func:`bcp.telemetry.configure`. None, the default of each, watches nothing.

    A crossing is a warning in the log, one more in the OpenTelemetry counter ``bcp.alerts``, and a call of
    ``on_alert``. A threshold is crossed at most once in each save or load, ``max_age`` once for each checkpoint.

    Args:
        min_throughput: bytes per second of one rank, from the call to the end of a save or load. Those of less than 64
            MiB on the rank are not judged.
        max_request_seconds: seconds of one attempt of a request to storage. Told at once.
        straggler_ratio: seconds per byte of the slowest part of a stage, divided by the median of all parts in that
            stage on the same rank. Only parts of at least 1 MiB count, four at least, and the slowest must take a
            second or longer. Slow ranks are found by ``bcp.report``, which knows all ranks.
        max_stall: seconds for which training waits in a save: all of it, or up to the snapshot if it is asynchronous;
            waits of lazy snapshots for the optimizer's step included.
        max_age: seconds since the newest durable state. Its age counts from the call of the last committed save or of
            the last load from storage. Without either, it counts from the job's start. Rank 0 tells, while nothing is
            saved too. Snapshots in the memory of the hosts count once agents have made them durable.
        max_durable: seconds from the call of a save to its commit.
        on_alert: called with each :class:`Alert`, on bcp's event loop or a thread of a storage client. It must be
            quick, and must not save or load. Its errors are logged.

    Raises:
        InputError: a threshold is no number above 0; above 1 for ``straggler_ratio``.

    """

    def __init__(
        self,
        *,
        min_throughput: float | None = None,
        max_request_seconds: float | None = None,
        straggler_ratio: float | None = None,
        max_stall: float | None = None,
        max_age: float | None = None,
        max_durable: float | None = None,
        on_alert: Callable[[Alert], object] | None = None,
    ) -> None:
        self.min_throughput = _above("min_throughput", min_throughput)
        self.max_request_seconds = _above("max_request_seconds", max_request_seconds)
        self.straggler_ratio = _above("straggler_ratio", straggler_ratio, 1)
        self.max_stall = _above("max_stall", max_stall)
        self.max_age = _above("max_age", max_age)
        self.max_durable = _above("max_durable", max_durable)
        self.on_alert = on_alert
        self._counter: metrics.Counter | None = None
        self._slow_requests: set[Watch] = set()
        self._newest: tuple[float, str, int | None] = (time.monotonic(), "", None)
        self._rank = int(rank) if (rank := os.environ.get("RANK", "")).isdigit() else 0
        self._timer: _Timer | None = None

    def start(self) -> None:
        """Begin to watch the age; does nothing if that is done already."""
        if self.max_age is not None and self._timer is None:
            self._durable(time.monotonic(), "", None)

    def stop(self) -> None:
        """Watch the age no longer."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    # -- the sink ------------------------------------------------------------------------------

    def began(self, watch: Watch) -> None:
        """Take note of the rank."""
        self._rank = watch.rank

    def joined(self, watch: Watch) -> None:
        """Do nothing."""

    def happened(self, watch: Watch, event: Event) -> None:
        """Look at a request, and at a snapshot in memory that has become durable."""
        if isinstance(event, TierEvent):
            self._judge_tier(watch, event)
            return
        limit = self.max_request_seconds
        if limit is None or not isinstance(event, RequestEvent) or watch in self._slow_requests:
            return
        seconds = event.ended - event.started
        if seconds > limit:
            self._slow_requests.add(watch)
            sentence = (
                f"{event.operation} of {event.key} in {event.store} ({event.nbytes:,} bytes, attempt {event.attempt}) "
                f"took {seconds:.3g} s; look at the storage and the network, or use fewer io_workers"
            )
            self._tell_of(watch, "max_request_seconds", seconds, limit, sentence)

    def ended(self, watch: Watch) -> None:
        """Judge the save or load."""
        self._slow_requests.discard(watch)
        result = watch.result
        if result is None:
            return
        self._judge_stages(watch)
        self._judge_throughput(watch, result)
        if isinstance(result, SaveResult):
            self._judge_save(watch, result)
        if self._timer is not None and watch.tier == "storage":
            self._durable(watch.started, watch.path, watch.step)

    def _judge_tier(self, watch: Watch, event: TierEvent) -> None:
        """Judge a snapshot in memory, once it is durable."""
        if event.what != "durable":
            return
        if event.seconds is not None:
            self._judge_durable(watch, event.seconds)
        if self._timer is not None:
            self._durable(watch.started, watch.path, event.step)

    def _judge_throughput(self, watch: Watch, result: SaveResult | LoadResult) -> None:
        limit = self.min_throughput
        if limit is not None and result.nbytes >= SMALL_NBYTES and result.throughput < limit:
            sentence = (
                f"the {watch.kind} moved {result.throughput / 1e6:.4g} MB/s on this rank; see the stage that takes "
                "longest in bcp.report, and the storage's load"
            )
            self._tell_of(watch, "min_throughput", result.throughput, limit, sentence)

    def _judge_save(self, watch: Watch, result: SaveResult) -> None:
        waited = result.blocking_seconds if watch.background else result.seconds
        stall = waited + result.step_wait_seconds
        if self.max_stall is not None and stall > self.max_stall:
            remedy = (
                "see which phase blocks in bcp.report; bcp.prepare and a larger budget_bytes shorten it"
                if watch.background
                else "async_checkpoint=True waits for the snapshot only"
            )
            self._tell_of(watch, "max_stall", stall, self.max_stall, f"training waited {stall:.3g} s; {remedy}")
        if watch.tier == "storage":
            self._judge_durable(watch, result.seconds)

    def _judge_durable(self, watch: Watch, seconds: float) -> None:
        if self.max_durable is not None and seconds > self.max_durable:
            sentence = f"the save was durable after {seconds:.3g} s; see the slowest stage and rank in bcp.report"
            self._tell_of(watch, "max_durable", seconds, self.max_durable, sentence)

    def _judge_stages(self, watch: Watch) -> None:
        limit = self.straggler_ratio
        if limit is None:
            return
        stragglers = list(_stragglers(watch.events))
        if not stragglers:
            return
        ratio, event = max(stragglers, key=lambda straggler: straggler[0])
        if ratio > limit:
            sentence = (
                f"{event.item} took {event.ended - event.started:.3g} s in stage {event.stage}, {ratio:.3g} times as "
                "long per byte as the median; see its requests and retries in bcp.report"
            )
            self._tell_of(watch, "straggler_ratio", ratio, limit, sentence)

    # -- the age -------------------------------------------------------------------------------

    def _durable(self, since: float, path: str, step: int | None) -> None:
        """Take note of a durable state, and wait for the next one."""
        assert self.max_age is not None  # noqa: S101 -- else there is no timer
        if since < self._newest[0]:
            return  # of an earlier save, which took longer than a later one
        self._newest = (since, path, step)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = _Timer(since + self.max_age - time.monotonic(), self._too_old)

    def _too_old(self) -> None:
        if self.max_age is None or self._rank != 0:
            return
        since, path, step = self._newest
        age = time.monotonic() - since
        newest = f"the newest durable state, {path}, is {age:.3g} s old" if path else f"no save in {age:.3g} s"
        sentence = f"{newest}; see if saves fail or hang, or save more often"
        self._tell(
            Alert(
                name="max_age", value=age, limit=self.max_age, path=path, step=step, rank=self._rank, sentence=sentence
            )
        )

    # -- telling -------------------------------------------------------------------------------

    def _tell_of(self, watch: Watch, name: str, value: float, limit: float, sentence: str) -> None:
        self._tell(
            Alert(
                name=name,
                value=value,
                limit=limit,
                path=watch.path,
                step=watch.step,
                rank=watch.rank,
                sentence=sentence,
            )
        )

    def _tell(self, alert: Alert) -> None:
        """Log the alert, count it, and call the application."""
        where = {name: value for name in ("path", "step", "rank") if (value := getattr(alert, name)) not in ("", None)}
        log.warning(alert.sentence, alert=alert.name, value=alert.value, limit=alert.limit, **where)
        if self._counter is None:
            self._counter = metrics.get_meter("bcp").create_counter(
                "bcp.alerts", unit="{alert}", description="Crossings of thresholds."
            )
        self._counter.add(1, {"alert": alert.name})
        if self.on_alert is not None:
            try:
                self.on_alert(alert)
            except Exception:  # noqa: BLE001 -- a save does not fail by those who look on
                log.exception("on_alert raised", alert=alert.name, on_alert=repr(self.on_alert))


class _Timer:
    """Calls a function once, after some seconds, on bcp's event loop: without a thread of its own.

    A forked child has none of its parent's timers. One that is due when the process ends is not called.
    """

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self._cancelled = False
        self._handle: TimerHandle | None = None
        with _loop.lock:
            self._loop = _loop.current_loop().asyncio_loop
            self._loop.call_soon_threadsafe(self._begin, seconds, function)

    def cancel(self) -> None:
        """Call the function no more."""
        self._cancelled = True
        with suppress(RuntimeError):  # the loop has been closed, or is the parent's
            self._loop.call_soon_threadsafe(self._end)

    def _begin(self, seconds: float, function: Callable[[], None]) -> None:
        if not self._cancelled:
            self._handle = self._loop.call_later(max(0.0, seconds), partial(self._fire, function))

    def _fire(self, function: Callable[[], None]) -> None:
        if not self._cancelled:
            function()

    def _end(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


def _stragglers(events: Iterable[Event]) -> Iterator[tuple[float, StageEvent]]:
    """Yield the slowest part of each stage, with its seconds per byte divided by the median."""
    stages: dict[str, list[StageEvent]] = defaultdict(list)
    for event in events:
        if isinstance(event, StageEvent) and not event.error and event.nbytes >= SMALL_PART_NBYTES:
            stages[event.stage].append(event)
    for parts in stages.values():
        if len(parts) < FEWEST_PARTS:
            continue
        slowest = max(parts, key=_pace)
        median = statistics.median(map(_pace, parts))
        if slowest.ended - slowest.started >= LEAST_SECONDS and median > 0:
            yield _pace(slowest) / median, slowest


def _pace(event: StageEvent) -> float:
    return (event.ended - event.started) / event.nbytes


def _above(name: str, value: float | None, least: float = 0) -> float | None:
    """Return a threshold, if it can be one."""
    if value is not None and (not isinstance(value, Real) or isinstance(value, bool) or not value > least):
        raise InputError(f"{name}={value!r}; pass a number above {least}, or None")
    return value
