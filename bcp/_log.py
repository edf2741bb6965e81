"""The library's one logger: structlog over the standard library's logger ``"bcp"``.

An application that configures logging receives every line through its own handlers, with the values in the text and in
the record's ``bcp`` attribute. Any other application sees errors only, on stderr: an error line tells of a save that
is lost, when no caller is left to raise it to. bcp never writes to stdout. The configuration of structlog itself is the
application's and has no effect here.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import structlog

__all__ = ["log"]


_CALLER = 4
"""Frames from the standard library's call to the line that logs; three of them are structlog's."""


class _Unconfigured(logging.Handler):
    """Print errors of an application that has configured no logging, and drop all other lines."""

    def emit(self, record: logging.LogRecord) -> None:
        """Hand an error to the handler that Python uses if there is no other."""
        others = len(_logger.handlers) > 1 or (_logger.propagate and logging.getLogger().handlers)
        if logging.lastResort is not None and not others:
            logging.lastResort.handle(record)


def _as_record(_logger: object, _method: str, event: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    """Return the arguments of the standard library's call: the text, and the values beside it."""
    exception = event.pop("exc_info", None)
    words = [str(event.pop("event")), *(f"{name}={value!r}" for name, value in event.items())]
    return (" ".join(words),), {"exc_info": exception, "extra": {"bcp": event}, "stacklevel": _CALLER}


_logger = logging.getLogger("bcp")
_logger.addHandler(_Unconfigured(logging.ERROR))
log: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    _logger,
    processors=[
        structlog.stdlib.filter_by_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        _as_record,
    ],
    wrapper_class=structlog.stdlib.BoundLogger,
)
"""Takes an event and its values, as in ``log.warning("old files were not deleted", path=path)``."""
