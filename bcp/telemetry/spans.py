"""OpenTelemetry spans of saves and loads: one trace for each of them, over all ranks.

Rank 0's trace context travels to the other ranks in the first answer of a save or load. An operation's span is made
when this rank knows its parent; all others are made at the end, from events, with the times that these tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bcp._version import __version__
from bcp.errors import PeerError, StageError
from bcp.events import (
    LOST,
    PHASES,
    Event,
    LoadResult,
    PhaseEvent,
    RequestEvent,
    SaveResult,
    StageEvent,
    TierEvent,
    told,
)
from bcp.telemetry.settings import is_sdk, settings
from bcp.telemetry.watch import Watch

__all__ = ["Spans"]

_MOVING = ("write", "read")
"""The phases in which the stages run."""

T = TypeVar("T")
Attributes = Mapping[str, str | bool | int | float]
_w3c = TraceContextTextMapPropagator()


class Spans:
    """A :class:`~bcp.telemetry.watch.Sink` that makes spans; it does nothing in a process that has no SDK.

    Spans that other code makes inside an operation, as in a custom stage, become children of the operation's span.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._traces: WeakKeyDictionary[Watch, _Trace] = WeakKeyDictionary()
        self._drains: dict[tuple[int, str], float] = {}

    def began(self, watch: Watch) -> None:
        """Begin rank 0's span, and set the watch's trace context; the other ranks have to learn that first."""
        provider = self._provider or trace.get_tracer_provider()
        if "operation" not in settings.spans or not is_sdk(provider):
            return
        tracer = provider.get_tracer("bcp", __version__)
        caller = trace.get_current_span().get_span_context()
        made = self._traces[watch] = _Trace(tracer, settings.spans, caller if caller.is_valid else None)
        if watch.rank == 0:
            made.begin(watch, Context() if watch.background else None)
            watch.trace = made.traceparent

    def joined(self, watch: Watch) -> None:
        """Begin another rank's span below rank 0's."""
        made = self._traces.get(watch)
        if made is not None and made.span is None:
            made.begin(watch, _w3c.extract({"traceparent": watch.trace}, Context()))

    def happened(self, watch: Watch, event: Event) -> None:
        """Make an event of the operation's span, or the span of a snapshot's way to storage, which is over."""
        if not isinstance(event, TierEvent):
            return
        made = self._traces.get(watch)
        if made is not None and made.span is not None:
            made.span.add_event(f"bcp.{event.what}", _of_tier(event), _clock(watch, event.moment))
        elif event.what == "draining":
            self._drains[watch.rank, event.operation] = event.moment
        elif event.what in LOST or event.what in ("durable", "unwatched"):
            started = self._drains.pop((watch.rank, event.operation), None)
            if started is not None:
                self._make_drain(watch, event, started)

    def _make_drain(self, watch: Watch, event: TierEvent, started: float) -> None:
        provider = self._provider or trace.get_tracer_provider()
        if "phase" not in settings.spans or "operation" not in settings.spans or not is_sdk(provider):
            return
        tracer, parent = provider.get_tracer("bcp", __version__), _w3c.extract({"traceparent": watch.trace}, Context())
        attributes = {**_common(watch), **_of_tier(event), "bcp.event": event.what, "bcp.background": True}
        span = tracer.start_span("bcp.drain", parent, attributes=attributes, start_time=_clock(watch, started))
        if event.what in LOST:
            span.set_status(Status(StatusCode.ERROR, event.said))
        span.end(_clock(watch, event.moment))

    def ended(self, watch: Watch) -> None:
        """Make all other spans, and end the operation's."""
        made = self._traces.pop(watch, None)
        if made is not None:
            made.end(watch)


class _Trace:
    """The spans of one operation on this rank.

    Attributes:
        span: of the operation; None until its parent is known.
    """

    def __init__(self, tracer: Tracer, groups: frozenset[str], caller: SpanContext | None) -> None:
        self._tracer = tracer
        self._groups = groups
        self._caller = caller
        self._token: Token[Context] | None = None
        self.span: Span | None = None

    @property
    def traceparent(self) -> str:
        """The span's context in the form of W3C's header; empty if it has none."""
        carrier: dict[str, str] = {}
        _w3c.inject(carrier, trace.set_span_in_context(self.span or trace.INVALID_SPAN, Context()))
        return carrier.get("traceparent", "")

    def begin(self, watch: Watch, context: Context | None) -> None:
        """Begin the operation's span as a child of the one in a context; None for the caller's context."""
        links = self._links("caller", self._caller if context is not None else None)
        self.span = self._tracer.start_span(
            f"bcp.{watch.kind}",
            context,
            attributes=_common(watch),
            links=links,
            start_time=_clock(watch, watch.started),
        )
        self._token = contexts.attach(trace.set_span_in_context(self.span))

    def end(self, watch: Watch) -> None:
        """Make the spans of the operation's parts, and end its own."""
        end = time.monotonic()
        if self.span is None:
            self.begin(watch, Context())  # the ranks never met
        assert self.span is not None  # noqa: S101 -- it has begun
        if self._token is not None:
            contexts.detach(self._token)
        blocking = self._blocking(watch, self.span, end) if watch.background else None
        common = _common(watch)
        links = self._links("blocking", blocking)
        left_out = _Parts(self._tracer, self._groups, watch, self.span, links, common).make()
        self.span.set_attributes({**common, "bcp.background": watch.background, **_figures(watch.result), **left_out})
        _fail(self.span, watch.error, _clock(watch, end))
        self.span.end(_clock(watch, end))

    def _blocking(self, watch: Watch, save: Span, end: float) -> SpanContext:
        """Make the span of the time for which a background save held up its caller."""
        parent = save if self._caller is None else trace.NonRecordingSpan(self._caller)
        span = self._tracer.start_span(
            "bcp.save.blocking",
            trace.set_span_in_context(parent, Context()),
            attributes=_common(watch),
            links=self._links("save", save.get_span_context()),
            start_time=_clock(watch, watch.started),
        )
        if watch.blocking is None:  # it failed before
            _fail(span, watch.error, _clock(watch, end))
        span.end(_clock(watch, end if watch.blocking is None else watch.started + watch.blocking))
        return span.get_span_context()

    @staticmethod
    def _links(role: str, target: SpanContext | None) -> Sequence[Link]:
        return [] if target is None else [Link(target, {"bcp.link": role})]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Makes the spans below an operation's.

    Attributes:
        tracer: makes them.
        groups: that are wanted.
        watch: has the events.
        root: the operation's span.
        links: of stages and the commit.
        common: attributes of all of them.
    """

    tracer: Tracer
    groups: frozenset[str]
    watch: Watch
    root: Span
    links: Sequence[Link]
    common: Attributes

    def make(self) -> Attributes:
        """Make them all but the quickest items and requests; return how many of these were left out, if any."""
        phases = [event for event in self.watch.events if isinstance(event, PhaseEvent)]
        made = [(event, self._phase(event)) for event in phases if event.phase in PHASES and "phase" in self.groups]
        moving = next((span for event, span in made if event.phase in _MOVING), self.root)
        stages = [event for event in self.watch.events if isinstance(event, StageEvent)]
        if "stage" in self.groups:
            for name, events in _grouped(stages, lambda event: event.stage):
                self._stage(name, moving, events)
        left_out: dict[str, int] = {}
        if "item" in self.groups:
            items, left_out["bcp.items.left_out"] = _telling(list(_grouped(stages, lambda event: event.item)), _of_item)
            for name, events in items:
                self._item(name, moving, events)
        if "request" in self.groups:
            outer = [(event, span) for event, span in made if event.phase != "snapshot"]
            request_events = [event for event in self.watch.events if isinstance(event, RequestEvent)]
            requests, left_out["bcp.requests.left_out"] = _telling(request_events, _of_request)
            for request in requests:
                self._request(request, outer)
        return {name: count for name, count in left_out.items() if count}

    def _phase(self, event: PhaseEvent) -> Span:
        late = event.phase == "commit"
        links, more = (self.links, self._background) if late else ((), {})
        name = f"bcp.{event.phase}"
        return self._span(name, self.root, event.started, event.ended, more, error=event.error, links=links)

    def _stage(self, name: str, parent: Span, events: Sequence[StageEvent]) -> None:
        """Make one span for all items in a stage."""
        figures: Attributes = {
            "bcp.items": len(events),
            "bcp.bytes": sum(event.nbytes for event in events),
            "bcp.busy_seconds": sum(event.ended - event.started for event in events),
            "bcp.queue_wait_seconds": sum(event.waited for event in events),
            **self._background,
        }
        self._way(f"bcp.stage.{name}", parent, events, figures, self.links)

    def _item(self, name: str, parent: Span, events: Sequence[StageEvent]) -> None:
        """Make one span for all stages of an item: a span takes 15 us of a core, an attribute 0.2 us."""
        figures: dict[str, str | bool | int | float] = {"bcp.item": name, "bcp.bytes": events[0].nbytes}
        for event in events:
            figures[f"bcp.{event.stage}.seconds"] = event.ended - event.started
            figures[f"bcp.{event.stage}.queue_wait_seconds"] = event.waited
        self._way("bcp.item", parent, events, figures, ())

    def _way(
        self, name: str, parent: Span, events: Sequence[StageEvent], figures: Attributes, links: Sequence[Link]
    ) -> None:
        """Make a span from the first start of these events to their last end."""
        first, last = min(event.started for event in events), max(event.ended for event in events)
        error = next((event.error for event in events if event.error), "")
        self._span(name, parent, first, last, figures, error=error, links=links)

    def _request(self, event: RequestEvent, phases: Iterable[tuple[PhaseEvent, Span]]) -> None:
        """Make a request's span, below the phase in which it began."""
        around = (span for phase, span in phases if phase.started <= event.started <= phase.ended)
        more: Attributes = {
            "bcp.storage.operation": event.operation,
            "bcp.storage.store": event.store,
            "bcp.storage.key": event.key,
            "bcp.storage.attempt": event.attempt,
            "bcp.storage.status": event.status,
            "bcp.bytes": event.nbytes,
        }
        error = event.said if event.status != "ok" else ""
        parent = next(around, self.root)
        name = "bcp.storage.request"
        self._span(name, parent, event.started, event.ended, more, error=error, kind=SpanKind.CLIENT)

    @property
    def _background(self) -> Attributes:
        return {"bcp.background": True} if self.watch.background else {}

    def _span(
        self,
        name: str,
        parent: Span,
        started: float,
        ended: float,
        more: Attributes | None = None,
        *,
        error: str = "",
        links: Sequence[Link] = (),
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Make a span that is over."""
        attributes = {**self.common, **(more or {})}
        if error:
            attributes["error.type"] = _type_of(error)
        context = trace.set_span_in_context(parent, Context())
        span = self.tracer.start_span(name, context, kind, attributes, links, _clock(self.watch, started))
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_clock(self.watch, ended))
        return span


def _grouped(events: Sequence[StageEvent], key: Callable[[StageEvent], str]) -> Iterable[tuple[str, list[StageEvent]]]:
    """Return the events of each key, in the order of their first ones."""
    groups: dict[str, list[StageEvent]] = {}
    for event in events:
        groups.setdefault(key(event), []).append(event)
    return groups.items()


def _telling(candidates: Sequence[T], weight: Callable[[T], tuple[bool, float]]) -> tuple[Sequence[T], int]:
    """Return the ones of the greatest weight, in their order, and the number of the others."""
    most = settings.most_spans
    if len(candidates) <= most:
        return candidates, 0
    kept = sorted(nlargest(most, range(len(candidates)), key=lambda index: weight(candidates[index])))
    return [candidates[index] for index in kept], len(candidates) - most


def _of_item(item: tuple[str, Sequence[StageEvent]]) -> tuple[bool, float]:
    """Return whether a stage failed on an item, and the seconds for which the stages worked on it."""
    _, events = item
    return any(event.error for event in events), sum(event.ended - event.started for event in events)


def _of_request(event: RequestEvent) -> tuple[bool, float]:
    return event.status != "ok", event.ended - event.started


def _clock(watch: Watch, moment: float) -> int:
    return int(watch.time * 1e9) + int((moment - watch.started) * 1e9)


def _of_tier(event: TierEvent) -> Attributes:
    """Return the attributes that tell what has happened to a snapshot in memory."""
    known = {"bcp.operation": event.operation, "bcp.step": event.step, "bcp.bytes": event.nbytes}
    words = {"bcp.place": event.place, "bcp.reason": event.said}
    return {name: value for name, value in {**known, **words}.items() if value not in (None, "")}


def _common(watch: Watch) -> dict[str, Any]:
    """Return the attributes of every span."""
    known = {
        "bcp.operation": watch.operation,
        "bcp.step": watch.step,
        "bcp.path": watch.path.partition("?")[0] if "://" in watch.path else watch.path,  # a query may hold a token
        "bcp.run": settings.run,
        "dl.rank": watch.rank,
        "dl.world_size": watch.world_size,
    }
    return {name: value for name, value in known.items() if value not in (None, "")}


def _figures(result: SaveResult | LoadResult | None) -> Attributes:
    """Return the attributes of an operation's span that tell of its success."""
    if result is None:
        return {}
    return {"bcp.operation": result.operation, "bcp.bytes": result.nbytes, "bcp.retries": result.retries}


def _fail(span: Span, error: BaseException | None, timestamp: int) -> None:
    """Note on a span that the operation has failed, and by whom."""
    if error is None:
        return
    span.set_attribute("error.type", type(error).__name__)
    if isinstance(error, StageError):
        span.set_attributes({"bcp.stage": error.stage, "bcp.item": error.item})
    if isinstance(error, PeerError):
        span.set_attribute("bcp.guilty_rank", error.rank)
    span.record_exception(error, timestamp=timestamp)
    span.set_status(Status(StatusCode.ERROR, told(error)))


def _type_of(text: str) -> str:
    """Return the type of an error that an event has as text; "error" for a server's words."""
    name = text.partition(":")[0]
    return name if name.isidentifier() else "error"
