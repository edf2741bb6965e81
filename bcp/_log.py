"""The library's one logger: structlog over the standard library's logger ``"bcp"``.

An application that configures logging receives every line through its own handlers, with the values in the text and in
the record's ``bcp`` attribute. Any other application sees warnings and errors on stderr, as Python shows those of all
loggers: they tell of a save that is lost, or of a checkpoint that was passed over, when no caller is left to raise an
error to. :func:`bcp.telemetry.configure` adds an output of its own, beside the application's handlers. bcp never writes
to stdout. The configuration of structlog itself is the application's and has no effect here.

No value shows the password or the query of a URL. Texts for people have escapes for control characters; values beside
them are exact.

A line inside a save or load has the values that :func:`bound` and :func:`bind` attach to it, in its threads too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import structlog

from bcp._text import hidden, printable

__all__ = ["Output", "bind", "bound", "log", "mark_logged", "set_output", "was_logged"]

Values = Callable[[], Mapping[str, object]]
Output = Callable[[str, dict[str, Any]], None]
"""Takes the level of a line, by its name in lower case, and the line's values; its text is ``event``."""

_CALLER = 4
"""Frames from the standard library's call to the line that logs; three of them are structlog's."""
_MARK = "_bcp_logged"

_values: ContextVar[Values] = ContextVar("bcp log values", default=dict)
_output: Output | None = None


@contextmanager
def bound(values: Values) -> Iterator[None]:
    """Attach values to all lines in the block, its tasks and its threads. ``values`` is called for each line."""
    token = _values.set(values)
    try:
        yield
    finally:
        _values.reset(token)


def bind(**more: object) -> None:
    """Attach more values to all later lines of the running task and its threads."""
    outer = _values.get()
    _values.set(lambda: {**outer(), **more})


def set_output(output: Output | None) -> None:
    """Send every line to that output too, instead of the one before; None ends it."""
    global _output  # noqa: PLW0603 -- one a process, as the logger
    _output = output


def mark_logged(error: BaseException) -> None:
    """Remember that an error line has told of this error."""
    vars(error)[_MARK] = True


def was_logged(error: BaseException) -> bool:
    """Say whether an error line has told of this error."""
    return _MARK in vars(error)


class _Unconfigured(logging.Handler):
    """Print warnings and errors of an application that has configured no logging, and drop all other lines."""

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line to the handler that Python uses if there is no other."""
        others = len(_logger.handlers) > 1 or (_logger.propagate and logging.getLogger().handlers)
        if logging.lastResort is None or others or _output is not None:
            return
        if record.exc_info and not record.exc_text:  # the text of an error may quote the name of a file
            text = logging.Formatter().formatException(record.exc_info)
            record.exc_text = printable(hidden(text), "\n\t")
        logging.lastResort.handle(record)


def _to_output(_logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hand a copy of the line to the configured output, whatever the level of the standard library's logger."""
    if _output is not None:
        _output(method, {name: _without_secrets(value) for name, value in {**_values.get()(), **event}.items()})
    return event


def _without_secrets(value: object) -> object:
    return hidden(value) if isinstance(value, str) else value


def _with_values(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {**event, **{name: value for name, value in _values.get()().items() if name not in event}}


def _as_record(_logger: object, _method: str, event: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    """Return the arguments of the standard library's call: the text, and the values beside it."""
    exception = event.pop("exc_info", None)
    event = {name: _without_secrets(value) for name, value in event.items()}
    words = [printable(str(event.pop("event"))), *(f"{name}={value!r}" for name, value in event.items())]
    return (" ".join(words),), {"exc_info": exception, "extra": {"bcp": event}, "stacklevel": _CALLER}


_logger = logging.getLogger("bcp")
_logger.addHandler(_Unconfigured(logging.WARNING))
log: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    _logger,
    processors=[
        _to_output,
        structlog.stdlib.filter_by_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        _with_values,
        _as_record,
    ],
    wrapper_class=structlog.stdlib.BoundLogger,
)
"""Takes an event and its values, as in ``log.warning("old files were not deleted", path=path)``."""
