"""Log lines of saves and loads, and the output that writes them as JSON or for a console."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TextIO

import structlog

from bcp._log import log, mark_logged
from bcp._text import printable
from bcp.events import Event, LoadResult, SaveResult, TierEvent
from bcp.runtime.process import process_rlock
from bcp.telemetry.failures import failure_of
from bcp.telemetry.watch import Watch

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

__all__ = ["Form", "LineOutput", "OperationLines"]

Form = Literal["json", "console"]


class OperationLines:
    """A sink that logs one line for each save and load of rank 0, and one for each failure of any rank."""

    def began(self, watch: Watch) -> None:
        """Log a line at debug level."""
        log.debug(f"{watch.kind} begins", world_size=watch.world_size, background=watch.background)

    def joined(self, watch: Watch) -> None:
        """Do nothing."""

    def happened(self, watch: Watch, event: Event) -> None:
        """Log the second end of a save into memory, and copies of it, on rank 0; other rooms log what goes wrong."""
        if isinstance(event, TierEvent) and event.what in ("durable", "copied"):
            tell = log.info if watch.rank == 0 else log.debug
            where = {"operation": event.operation, "rank": watch.rank, "path": watch.path, "rank_nbytes": event.nbytes}
            seconds = {} if event.seconds is None else {"seconds": round(event.seconds, 3)}
            tell(f"a snapshot is {event.what}", step=event.step, **where, **seconds)

    def ended(self, watch: Watch) -> None:
        """Log how it ended: at info level on rank 0, at debug level on others, at error level if it failed."""
        if watch.result is not None:
            tell = log.info if watch.rank == 0 else log.debug
            saved = "saved" if watch.tier == "storage" else "saved into memory"
            tell(saved if watch.kind == "save" else "loaded", **_figures(watch, watch.result))
        elif isinstance(watch.error, Exception):
            log.error(f"{watch.kind} failed", **_failure(watch, watch.error))
            mark_logged(watch.error)
        elif watch.error is not None:
            log.warning(f"{watch.kind} was cancelled", seconds=round(watch.seconds, 3), error=repr(watch.error))


def _figures(watch: Watch, result: SaveResult | LoadResult) -> Mapping[str, object]:
    """Return the values of the line of a save or load that went well. Throughput is this rank's."""
    common = {
        "seconds": round(result.seconds, 3),
        "throughput": round(result.throughput),
        "retries": result.retries,
        "world_size": result.world_size,
    }
    if isinstance(result, LoadResult):
        read = {"read_nbytes": result.read_nbytes, "received_nbytes": result.received_nbytes}
        return {"rank_nbytes": result.nbytes, **read, **common, "saved_world_size": result.saved_world_size}
    nbytes = {} if watch.all_nbytes is None else {"nbytes": watch.all_nbytes}
    blocking = (result.blocking_seconds if watch.background else result.seconds) + result.step_wait_seconds
    return {
        **nbytes,
        "rank_nbytes": result.nbytes,
        **common,
        "blocking_seconds": round(blocking, 3),
        "plan_cached": result.plan_cached,
    }


def _failure(watch: Watch, error: Exception) -> Mapping[str, object]:
    """Return the values of the line of a failure; those that are not known are left out."""
    record = failure_of(watch, error)
    values = {
        "host": record.host,
        "guilty": record.guilty,
        "phase": record.phase,
        "stage": record.stage,
        "item": record.item,
        "tensors": list(record.tensors),
        "file": record.file,
        "attempt": record.attempt or None,
        "seconds": round(watch.seconds, 3),
        "error": f"{type(error).__name__}: {error}",
        "errors": [{"type": kind, "message": message} for kind, message in record.errors],
        "notes": list(record.notes),
    }
    return {name: value for name, value in values.items() if value not in (None, "", [])}


class LineOutput:
    """Writes each line as it comes, one at a time. A broken stream loses lines and nothing else."""

    def __init__(self, form: Form, stream: TextIO | None, level: int) -> None:
        self.form = form
        self.stream = stream
        self.level = level
        self._lock = process_rlock()  # re-entrant: a signal handler may log
        self._processors: tuple[Processor, ...] = (
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(_json() if form == "json" else _console(colors=self._is_terminal())),
        )

    def __call__(self, method: str, event: dict[str, Any]) -> None:
        """Take a line."""
        if getattr(logging, method.upper()) < self.level:
            return
        line: Any = event
        for processor in self._processors:
            line = processor(None, method, line)
        stream = self.stream or sys.stderr
        with self._lock, contextlib.suppress(OSError, ValueError, AttributeError):
            stream.write(f"{line}\n")
            stream.flush()

    def _is_terminal(self) -> bool:
        is_terminal: Callable[[], bool] = getattr(self.stream or sys.stderr, "isatty", bool)
        return is_terminal()


def _json() -> tuple[Processor, ...]:
    return structlog.processors.ExceptionRenderer(), _first_things_first, structlog.processors.JSONRenderer()


def _console(*, colors: bool) -> tuple[Processor, ...]:
    renderer = structlog.dev.ConsoleRenderer(colors=colors, sort_keys=False)
    return _without_chain, structlog.processors.format_exc_info, _printable, renderer


def _printable(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Escape the control characters of all texts: the name of a run or of a folder may have any."""
    return {name: _escaped(value, "\n\t" if name == "exception" else "") for name, value in event.items()}


def _escaped(value: Any, kept: str) -> Any:
    return printable(value, kept) if isinstance(value, str) else value


def _first_things_first(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Put time, level and text before the values."""
    first = {name: event.pop(name) for name in ("timestamp", "level", "event")}
    return {**first, **event}


def _without_chain(_logger: object, _method: str, event: EventDict) -> EventDict:
    return {name: value for name, value in event.items() if name not in ("errors", "notes", "tensors")}
