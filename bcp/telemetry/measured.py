"""Blocks of users' own code, measured as bcp measures its phases."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextvars import Token
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from bcp.errors import InputError
from bcp.events import PHASES, PhaseEvent, emit, told
from bcp.telemetry.settings import settings

__all__ = ["measure"]

F = TypeVar("F", bound=Callable[..., Any])


class measure:  # noqa: N801 -- read as a function: `with measure("tokenize"):`
    """Measure a block, or every call of a function; as ``with``, ``async with`` or a decorator.

    Inside a save or load (in a stage of your own, a dataloader's state, a codec) the block becomes a
    :class:`~bcp.extend.PhaseEvent`. Traces, recordings and reports contain it. Anywhere, if the group ``measure`` is
    among the spans of :func:`bcp.telemetry.configure`, it becomes an OpenTelemetry span ``bcp.measure.<name>``, which
    is the parent of spans made inside. An error that ends the block is recorded, and passes. Blocks nest. Without a
    listener, a block costs less than two microseconds.

    Args:
        name: of the block; the same for all blocks of one kind.
        attributes: of the span.

    Raises:
        InputError: the name is one of bcp's own phases, or a generator function is decorated, whose calls end before
            the work begins.

    Example:
        >>> import bcp
        >>> with bcp.telemetry.measure("tokenize", shard=3):
        ...     tokens = [1, 2, 3]
        >>> @bcp.telemetry.measure("evaluate")
        ... def evaluate(model): ...

    """

    __slots__ = ("_attributes", "_name", "_span", "_started", "_token")

    def __init__(self, name: str, **attributes: AttributeValue) -> None:
        if name in PHASES:
            raise InputError(f"measure({name!r}) has the name of a phase of bcp's own; choose another one")
        self._name = name
        self._attributes = attributes
        self._started: float | None = None
        self._span: Span | None = None
        self._token: Token[Context] | None = None

    def __enter__(self) -> Self:
        if self._started is not None:
            raise RuntimeError(f"measure({self._name!r}) is in a block already; make another one for this block")
        if "measure" in settings.spans:
            self._span = trace.get_tracer("bcp").start_span(f"bcp.measure.{self._name}", attributes=self._attributes)
            self._token = context.attach(trace.set_span_in_context(self._span))
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_back: TracebackType | None
    ) -> None:
        started, self._started = cast("float", self._started), None
        emit(PhaseEvent(self._name, started, time.monotonic(), "" if error is None else told(error)))
        if self._span is not None:
            self._end_span(self._span, error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_back: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace_back)

    def __call__(self, function: F) -> F:
        """Return the function with each call as a block of its own."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InputError(
                f"measure({self._name!r}) cannot decorate generators; measure a block in {function.__qualname__}"
            )
        name, attributes = self._name, self._attributes

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with measure(name, **attributes):
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            with measure(name, **attributes):
                return await function(*args, **kwargs)

        return cast("F", call_async if inspect.iscoroutinefunction(function) else call)

    def _end_span(self, span: Span, error: BaseException | None) -> None:
        self._span = None
        if self._token is not None:
            context.detach(self._token)
            self._token = None
        if error is not None:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, told(error)))
        span.end()
