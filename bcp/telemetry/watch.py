"""The events of one save or load on this rank: kept, summed up, and passed on while they happen."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol, runtime_checkable

from bcp._log import bound, log
from bcp.events import Event, LoadResult, Observer, PhaseEvent, SaveResult, StageEvent, ignore, observed_by, told
from bcp.runtime.process import process_lock
from bcp.telemetry.amounts import bytes_words, duration_words
from bcp.telemetry.settings import settings

__all__ = ["Contents", "Kind", "LiveSink", "Sink", "Watch", "add_sink", "remove_sink", "sinks", "step_of"]

Kind = Literal["save", "load", "prepare"]

Contents = Callable[[str], tuple[str, Sequence[str]]]
"""Takes the name of an item; returns the key of its file and names of tensors in it, both empty if unknown."""

MOST_EVENTS = 200_000
"""Events that one operation keeps: about 100 MB. Those behind them are passed on and counted."""


class Sink(Protocol):
    """Something in this process that follows all saves and loads of this rank: traces, metrics, alerts, log lines.

    Its methods are called as observers are: they must be quick. One that raises is logged and left out from then on.
    """

    def began(self, watch: Watch) -> None:
        """Take note of a save or load that begins. On rank 0 this may set :attr:`Watch.trace`."""

    def joined(self, watch: Watch) -> None:
        """Take note that all ranks have met: :attr:`Watch.operation` and :attr:`Watch.trace` are rank 0's."""

    def ended(self, watch: Watch) -> None:
        """Take note of its end: either :attr:`Watch.result` or :attr:`Watch.error` is set."""


@runtime_checkable
class LiveSink(Sink, Protocol):
    """A sink that follows each event besides."""

    def happened(self, watch: Watch, event: Event) -> None:
        """Take an event.

        A :class:`~bcp.events.TierEvent` may come outside of any save or load: its watch has ended, or never began.
        """


_sinks: tuple[Sink, ...] = ()
_lock = process_lock()


def add_sink(sink: Sink) -> None:
    """Let a sink follow all saves and loads that begin from now on; does nothing for one that is there already."""
    global _sinks  # noqa: PLW0603 -- of the process
    with _lock:
        if sink not in _sinks:
            _sinks = (*_sinks, sink)


def remove_sink(sink: Sink) -> None:
    """Let a sink follow no save and no load that begins from now on."""
    global _sinks  # noqa: PLW0603 -- of the process
    with _lock:
        _sinks = tuple(other for other in _sinks if other is not sink)


def sinks() -> Sequence[Sink]:
    """Return the sinks that follow saves and loads, in the order in which they were added."""
    return _sinks


class Watch:
    """Follows one save or load on this rank.

    Attributes:
        kind: ``"save"``, ``"load"`` or ``"prepare"``.
        path: where the checkpoint is, as errors name it.
        rank: this rank.
        world_size: how many ranks take part.
        step: the training step, if it is known.
        background: whether the caller goes on before the end, as with ``async_checkpoint=True``.
        operation: id of the save; of the one that is loaded, for a load. Empty until the ranks have met.
        trace: trace context of rank 0, in the form of W3C's ``traceparent``; empty for none.
        created: when the loaded checkpoint was committed, in ISO 8601 as its metadata say; empty for a save.
        blocking: seconds from the call until training could go on; None until then, and if the caller waits for all.
        started: ``time.monotonic()`` at the call, in seconds.
        time: ``time.time()`` at the same moment.
        events: all that happened, in the order in which it ended; at most 200,000.
        dropped: how many more there were.
        tier: ``"memory"`` if the snapshot is in the memory of the hosts, so that nothing is durable at the end; else
            ``"storage"``.
        all_nbytes: bytes that all ranks wrote into data files; known on rank 0, once a save is committed.
        result: of an operation that ended well.
        error: the error that ended it.
        nbytes: bytes of all items of this rank; None until they are known.
        contents: finds file and tensors of an item by its name, for failures; knows none once the operation has ended.
    """

    def __init__(
        self,
        kind: Kind,
        path: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        step: int | None = None,
        background: bool = False,
        observe: Observer = ignore,
        started: float | None = None,
    ) -> None:
        now = time.monotonic()
        self.started = now if started is None else started
        self.time = time.time() - (now - self.started)
        self.kind = kind
        self.path = path
        self.rank = rank
        self.world_size = world_size
        self.step = step_of(path) if step is None else step
        self.background = background
        self.operation = ""
        self.trace = ""
        self.created = ""
        self.blocking: float | None = None
        self.tier: Literal["storage", "memory"] = "storage"
        self.events: list[Event] = []
        self.dropped = 0
        self.all_nbytes: int | None = None
        self.result: SaveResult | LoadResult | None = None
        self.error: BaseException | None = None
        self.nbytes: int | None = None
        self.contents: Contents = _unknown
        self._written = 0
        self._observe = observe
        self._observers = [] if observe is ignore else [observe]
        self._sinks = [] if kind == "prepare" else list(_sinks)
        self._live = [sink for sink in self._sinks if isinstance(sink, LiveSink)]
        self._spans: dict[str, tuple[float, float]] = {}

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, StageEvent):
            start, end = self._spans.get(event.stage, (event.started, event.ended))
            self._spans[event.stage] = (min(start, event.started), max(end, event.ended))
            self._written += event.nbytes if event.stage == "upload" and not event.error else 0
        if len(self.events) < MOST_EVENTS:
            self.events.append(event)
        else:
            self.dropped += 1
        for observer in tuple(self._observers):
            try:
                observer(event)
            except Exception:  # noqa: BLE001 -- a save does not fail by those who look on
                self._observers.remove(observer)
                log.exception("an observer raised and is not called again", observer=repr(observer), path=self.path)
        for sink in tuple(self._live):
            try:
                sink.happened(self, event)
            except Exception:  # noqa: BLE001 -- same
                self._leave_out(sink)

    def sequel(self) -> Watch:
        """Return a watch for what becomes of a snapshot behind the end of its save: the same facts, and no events."""
        sequel = Watch(
            self.kind,
            self.path,
            rank=self.rank,
            world_size=self.world_size,
            step=self.step,
            background=self.background,
            observe=self._observe,
            started=self.started,
        )
        sequel.time, sequel.operation, sequel.trace, sequel.tier = self.time, self.operation, self.trace, self.tier
        return sequel

    def add(self, observer: Observer) -> None:
        """Pass later events on to one more observer."""
        self._observers.append(observer)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Follow the block, its tasks and its threads; tell the sinks of beginning and end."""
        with bound(self._values):
            self._tell_all("began")
            try:
                with observed_by(self):
                    yield
            except BaseException as error:
                self.error = error
                raise
            finally:
                self._tell_all("ended")
                self.error = None  # its traceback leads here, and to the state's tensors
                self.contents = _unknown  # items lead there too

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Make an event of the block."""
        started = time.monotonic()
        try:
            yield
        except BaseException as error:
            self(PhaseEvent(name, started, time.monotonic(), told(error)))
            raise
        self(PhaseEvent(name, started, time.monotonic()))

    def join(self, operation: str, trace: str, created: str = "") -> None:
        """Take id and trace context of the operation, which rank 0 has told, and a loaded checkpoint's time."""
        self.operation, self.trace, self.created = operation, trace, created
        self._tell_all("joined")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def stage_seconds(self) -> Mapping[str, float]:
        """Wall seconds from the first start to the last end of each stage."""
        return {stage: end - start for stage, (start, end) in self._spans.items()}

    def progress(self) -> str:
        """Say how much of a save is written and how much time is left, as far as that is known; else nothing."""
        if not self.nbytes:
            return ""
        words = f"{bytes_words(self._written)} of {bytes_words(self.nbytes)} written on rank {self.rank}"
        seconds = time.monotonic() - self._spans.get("upload", (math.inf, 0.0))[0]
        if self._written < self.nbytes and self._written and seconds > 0:
            words += f", about {duration_words(seconds / self._written * (self.nbytes - self._written))} left"
        return words

    def _values(self) -> Mapping[str, object]:
        """Return the values of every log line inside of the operation."""
        values = {"run": settings.run, "step": self.step, "operation": self.operation}
        known = {name: value for name, value in values.items() if value not in ("", None)}
        return {**known, "rank": self.rank, "path": self.path}

    def _tell_all(self, method: Literal["began", "joined", "ended"]) -> None:
        for sink in tuple(self._sinks):
            try:
                getattr(sink, method)(self)
            except Exception:  # noqa: BLE001 -- a save does not fail by those who look on
                self._leave_out(sink)

    def _leave_out(self, sink: Sink) -> None:
        """Log the error that a sink raises, and call it no more in this operation."""
        self._sinks = [other for other in self._sinks if other is not sink]
        self._live = [other for other in self._live if other is not sink]
        log.exception("telemetry raised and is left out of this operation", sink=repr(sink), path=self.path)


def _unknown(_item: str) -> tuple[str, Sequence[str]]:
    return "", ()


def step_of(path: str) -> int | None:
    """Return the number at the end of the last name of a path, as in ``run/step-00100`` or ``run/100/actor``.

    None where no name of the last two ends in a number.
    """
    for name in reversed(path.rstrip("/").split("/")[-2:]):
        match = re.fullmatch(r"(?:.*[^0-9])?([0-9]{1,18})", name)
        if match:
            return int(match[1])
    return None
