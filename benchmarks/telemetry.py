"""The cost of telemetry: everything on, and nothing configured, each against a process without any of it.

    python -m benchmarks.telemetry [--quick] [--json FILE] [--check] [--dir FOLDER]

Saves with and without telemetry take turns in one process, and each is compared with the one beside it. CPU seconds are
those of all threads, exporters included, until the process is idle again. The telemetry of one such save, its recording
included, is repeated without the save too: that figure has a noise of some per cent of itself. The difference of saves
has one of some per cent of a save, and only its likely least value is held against a goal. A save has a fixed cost, so
the goal is that of a rank's usual share, 8 GiB; 512 MiB are measured beside it. docs/monitoring.md shows a run.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from anyio import to_thread
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import bcp
from bcp.backends import LocalBackend
from bcp.telemetry import Alerts, Sink, Watch, add_sink, configure, measure, remove_sink, sinks
from bcp.telemetry.encode import figures_of, merged, packed
from bcp.telemetry.store import encode
from benchmarks.figures import Figures, cpu_ms, parser
from benchmarks.speed.state import equal_tensors

__all__ = ["Arms", "blocking", "cpu", "opened", "replay"]

MIB = 1 << 20
SHARE = 8192 * MIB
"""Bytes of one rank: 70 billion parameters with the states of Adam have 980 GB, and 128 ranks share them."""

GOAL_CPU_PERCENT, GOAL_BLOCKING_MS, GOAL_BLOCK_US = 1.0, 2.0, 2.0
UNMEASURABLE_PERCENT, UNMEASURABLE_MS = 0.1, 0.1
GROUPS = ("operation", "phase", "stage", "item", "request", "measure")
RECORDINGS = "record" in {field.name for field in fields(bcp.SaveOptions)}
"""Whether this bcp can store a recording with a checkpoint."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to save.

    Attributes:
        name: in figures.
        switch: sets up telemetry for it.
        on: whether telemetry goes anywhere; recordings are stored then.
        finish: waits for its exporters.
    """

    name: str
    switch: Callable[[], None]
    on: bool = False
    finish: Callable[[], object] = bool

    def options(self, **more: Any) -> bcp.SaveOptions:
        """Return the options of its saves."""
        recording: dict[str, Any] = {"record": self.on} if RECORDINGS else {}
        return bcp.SaveOptions(overwrite=True, **recording, **more)


class Arms:
    """The ways to save, which are switched by the public API alone.

    Attributes:
        none: no sink at all.
        default: nothing configured, and no recordings.
        everything: all groups of spans to a batch processor, metrics, JSON lines in a file, alerts, recordings.
    """

    def __init__(self, folder: Path) -> None:
        self.none = Arm("without telemetry", self._none)
        self.default = Arm("nothing configured", self._default)
        self.everything = Arm("everything on", self._everything, on=True, finish=self._flush)
        configure()
        self._sinks: Sequence[Sink] = tuple(sinks())
        self._log = (folder / "log.jsonl").open("w", encoding="utf-8")
        self._exporter = InMemorySpanExporter()
        self._spans = TracerProvider()
        self._reader = InMemoryMetricReader()

    def install_sdk(self) -> None:
        """Let this process have OpenTelemetry's SDK from now on; that cannot be undone."""
        self._spans.add_span_processor(BatchSpanProcessor(self._exporter, max_queue_size=1 << 16))
        trace.set_tracer_provider(self._spans)
        metrics.set_meter_provider(MeterProvider([self._reader]))

    def close(self) -> None:
        """Leave the process as it was, but for the SDK."""
        self._default()
        self._log.close()

    def _none(self) -> None:
        configure()
        for sink in tuple(sinks()):
            remove_sink(sink)

    def _default(self) -> None:
        configure()
        for sink in self._sinks:
            add_sink(sink)

    def _everything(self) -> None:
        self._default()
        alerts = Alerts(
            min_throughput=1.0,
            max_request_seconds=1e6,
            straggler_ratio=1e6,
            max_stall=1e6,
            max_age=1e6,
            max_durable=1e6,
        )
        configure(logs="json", stream=self._log, level="debug", run="benchmark", spans=GROUPS, alerts=alerts)

    def _flush(self) -> None:
        self._spans.force_flush()
        self._reader.get_metrics_data()
        self._exporter.clear()


@contextmanager
def opened(folder: Path) -> Iterator[Arms]:
    """Make the arms, and leave telemetry as it was."""
    arms = Arms(folder)
    try:
        yield arms
    finally:
        arms.close()


def main() -> int:
    """Measure every part."""
    flags = parser(__doc__)
    flags.add_argument(
        "--dir", type=Path, default=Path(), help="folder on the disk to be written to; this one by default"
    )
    options = flags.parse_args()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the run", flush=True)
    print(f"recordings: {'stored where everything is on' if RECORDINGS else 'this bcp has none'}", flush=True)
    sizes = {128 * MIB: 8} if options.quick else {512 * MIB: 40, SHARE: 10}
    count, turns = (2_000, 8) if options.quick else (20_000, 40)
    figures = Figures()
    gc.freeze()
    with TemporaryDirectory(dir=options.dir) as folder, opened(Path(folder)) as arms:
        place = str(Path(folder) / "checkpoint")
        figures.head("A block of measure() while nobody listens")
        figures.measure("with measure(...): pass", _block_us, "us", GOAL_BLOCK_US)
        for arm in (arms.default, arms.everything):
            if arm is arms.everything:
                arms.install_sdk()
            figures.head(f"{arm.name.capitalize()}, compared with no telemetry at all")
            for nbytes, rounds in sizes.items():
                cpu(arms.none, arm, place, nbytes, rounds, figures)
                replay(arms.none, arm, place, nbytes, figures)
            blocking(arms.none, arm, place, count, turns, figures)
        return figures.close(options)


def _block_us() -> float:
    """Return the microseconds of an empty block."""
    configure()
    times = 100_000

    def work() -> None:
        for _ in range(times):
            with measure("nothing", shard=1):
                pass

    return 1000 * cpu_ms(work) / times


# -- CPU of a save ------------------------------------------------------------------------------------


def cpu(none: Arm, arm: Arm, place: str, nbytes: int, rounds: int, figures: Figures) -> None:
    """Compare the CPU seconds of synchronous saves of so many bytes in 64 tensors."""
    states = equal_tensors(64, nbytes).states
    work = partial(_paired, none, arm, rounds, partial(_cpu_seconds, states, place))
    name = f"{arm.name}: CPU of a save of {nbytes // MIB} MiB"
    limit = _goal(nbytes) if arm.on else UNMEASURABLE_PERCENT
    _report(figures, name, "%", work, lambda pairs: 100 / statistics.median(off for off, _ in pairs), limit)


def _goal(nbytes: int) -> float | None:
    return GOAL_CPU_PERCENT if nbytes >= SHARE else None


def _cpu_seconds(states: Mapping[str, Any], place: str, arm: Arm) -> float:
    """Save, and return the CPU seconds until the process is idle."""
    arm.switch()
    _idle()
    started = time.process_time()
    bcp.save(place, states, options=arm.options())
    arm.finish()
    _idle()
    return time.process_time() - started


def _idle() -> None:
    """Wait until no thread does anything: recordings are written, spans exported, and old buffers given back."""
    while True:
        before = time.process_time()
        time.sleep(0.02)
        if time.process_time() - before < 0.0005:  # noqa: PLR2004 -- the loop itself costs less
            return


def replay(none: Arm, arm: Arm, place: str, nbytes: int, figures: Figures) -> None:
    """Repeat the telemetry of a save alone, and compare its CPU seconds with those of the save."""
    states = equal_tensors(64, nbytes).states
    events: list[bcp.extend.Event] = []
    none.switch()
    started = time.monotonic()
    report = bcp.save(place, states, options=none.options(observe=events.append))
    backend = LocalBackend(Path(place).parent / "recordings")
    save_ms = min(1000 * _cpu_seconds(states, place, none) for _ in range(3))
    times = 20

    async def work(*, on: bool) -> None:
        for _ in range(times):
            watch = _repeat(place, started, events, report)
            if on:
                await _record(backend, watch, report)
                arm.finish()

    def percent() -> float:
        none.switch()
        without = cpu_ms(lambda: asyncio.run(work(on=False)))
        arm.switch()
        return 100 * (cpu_ms(lambda: asyncio.run(work(on=arm.on))) - without) / times / save_ms

    limit = _goal(nbytes) if arm.on else UNMEASURABLE_PERCENT
    figures.measure(f"{arm.name}: the same, {len(events)} events repeated alone", percent, "%", limit)


def _repeat(place: str, started: float, events: Sequence[bcp.extend.Event], report: bcp.SaveResult) -> Watch:
    """Let telemetry follow a save that has been."""
    watch = Watch("save", place, started=started)
    with watch.running():
        watch.join(report.operation, watch.trace)
        for event in events:
            watch(event)
        watch.result = report
    return watch


async def _record(backend: LocalBackend, watch: Watch, report: bcp.SaveResult) -> None:
    """Store the recording of a save by one rank."""
    message = await to_thread.run_sync(packed, watch, {}, 0, figures_of(report))
    data = await to_thread.run_sync(lambda: encode(merged(watch, [message])))
    await backend.put("telemetry", data)


# -- blocking -----------------------------------------------------------------------------------------


def blocking(none: Arm, arm: Arm, place: str, count: int, rounds: int, figures: Figures) -> None:
    """Compare the seconds for which asynchronous saves of so many tensors of 1 KiB block."""
    states = equal_tensors(count, count * 1024).states
    work = partial(_paired, none, arm, rounds, partial(_blocking_seconds, states, place))
    name = f"{arm.name}: blocking time, {count:,} tensors"
    _report(figures, name, "ms", work, lambda _: 1000.0, GOAL_BLOCKING_MS if arm.on else UNMEASURABLE_MS)


def _blocking_seconds(states: Mapping[str, Any], place: str, arm: Arm) -> float:
    """Save in the background, and return the seconds for which the caller waited."""
    arm.switch()
    started = time.perf_counter()
    pending = bcp.save(place, states, options=arm.options(), async_checkpoint=True)
    seconds = time.perf_counter() - started
    pending.wait()
    arm.finish()
    _idle()
    return seconds


# -- pairs --------------------------------------------------------------------------------------------

Pairs = Sequence[tuple[float, float]]


def _paired(none: Arm, arm: Arm, rounds: int, work: Callable[[Arm], float]) -> Pairs:
    """Measure both arms side by side, so many times, after one that warms up; the first of a pair changes."""
    pairs = []
    for first in islice(cycle((none, arm)), rounds + 1):
        gc.collect()
        gc.disable()  # as in timeit: its cost depends on everything else in the process
        try:
            seconds = {id(each): work(each) for each in (first, arm if first is none else none)}
        finally:
            gc.enable()
        pairs.append((seconds[id(none)], seconds[id(arm)]))
    return pairs[1:]


def _report(
    figures: Figures,
    name: str,
    unit: str,
    work: Callable[[], Pairs],
    scale: Callable[[Pairs], float],
    goal: float | None,
) -> None:
    """Add the median of the pairs' differences, and its bounds; the goal is the lower bound's."""
    pairs = work()
    differences = sorted(scale(pairs) * (on - off) for off, on in pairs)
    least, most = _likely(differences)
    off = statistics.median(off for off, _ in pairs)
    figures.add(f"{name}, without", 1000 * off, "ms")
    figures.add(f"{name}, more", statistics.median(differences), unit)
    figures.add(f"{name}, more for sure (95 %)", max(0.0, least), unit, goal)
    figures.add(f"{name}, within (95 %)", (most - least) / 2, unit)


def _likely(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the median of sorted values, with 95 % probability."""
    middle, apart = (len(values) - 1) / 2, 0.98 * len(values) ** 0.5
    return values[max(0, round(middle - apart))], values[min(len(values) - 1, round(middle + apart))]


if __name__ == "__main__":
    sys.exit(main())
