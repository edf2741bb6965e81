"""The configuration of telemetry in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import Literal, TextIO, cast, get_args

from bcp._log import set_output
from bcp.errors import InputError
from bcp.runtime.process import process_rlock
from bcp.telemetry.alerts import Alerts
from bcp.telemetry.logs import Form, LineOutput, OperationLines
from bcp.telemetry.settings import COARSE, GROUPS, MOST_SPANS, settings
from bcp.telemetry.watch import add_sink, remove_sink

__all__ = ["Level", "configure"]

Level = Literal["debug", "info", "warning", "error"]

_lock = process_rlock()  # re-entrant: a signal handler may configure
_lines = OperationLines()
_output: LineOutput | None = None
_alerts: Alerts | None = None


def configure(
    *,
    logs: Form | Literal["logging"] | None = None,
    stream: TextIO | None = None,
    level: Level = "info",
    run: str | None = None,
    spans: Collection[str] = COARSE,
    most_spans: int = MOST_SPANS,
    alerts: Alerts | None = None,
) -> None:
    """Set up log lines, groups of spans and alerts of this process, on every rank alike.

    A call states the whole configuration: an argument that is left out gets its default, and ``configure()`` undoes
    all earlier calls. The same call twice does the same as once. Saves and loads that are under way keep the alerts and
    spans that they began with. The root logger, the application's handlers and its configuration of structlog stay as
    they are.

    Args:
        logs: ``"json"`` writes each line of bcp as one JSON object, ``"console"`` as text for people. ``"logging"``
            writes nothing itself: the application's handlers on the root logger or on logger ``"bcp"`` get the lines,
            if their levels let them pass. (They get them with the other two as well.) None: no line tells of a save, a
            load or its failure.
        stream: where to write; standard error by default.
        level: the lowest level that is written. ``info`` has a line for each save and load of rank 0, ``error`` one for
            each failure, with the rank that failed.
        run: name of the run, in all lines, spans and recordings; ``$BCP_RUN`` by default.
        spans: groups of OpenTelemetry spans that are made: ``operation`` and ``phase`` by default, and ``stage``,
            ``item``, ``request`` and ``measure``.
        most_spans: spans of the group ``item``, and of the group ``request``, in one save or load on one rank: those
            that failed, then the slowest. The operation's span has the number of the others.
        alerts: thresholds to watch.

    Raises:
        InputError: an argument is none of those that are allowed; nothing has changed.

    Example:
        >>> import bcp
        >>> bcp.telemetry.configure(logs="json", run="llama-7b", alerts=bcp.telemetry.Alerts(max_stall=10))
        >>> bcp.telemetry.configure()  # undo it

    """
    global _output, _alerts  # noqa: PLW0603 -- of the process
    number = _check(logs, stream, level, spans, most_spans, alerts)
    with _lock:
        settings.run = os.environ.get("BCP_RUN", "") if run is None else run
        settings.spans = frozenset(spans)
        settings.most_spans = most_spans
        if logs is None:
            remove_sink(_lines)
        else:
            add_sink(_lines)
        _output = LineOutput(cast("Form", logs), stream, number) if logs in get_args(Form) else None
        set_output(_output)
        if _alerts is not None and _alerts is not alerts:
            remove_sink(_alerts)
            _alerts.stop()
        if alerts is not None:
            add_sink(alerts)
            alerts.start()
        _alerts = alerts


def _check(
    logs: str | None, stream: object, level: str, spans: Collection[str], most_spans: int, alerts: object
) -> int:
    """Refuse arguments that cannot be meant; return the number of the level."""
    forms = (*get_args(Form), "logging")
    if logs not in (None, *forms):
        raise InputError(f"logs={logs!r} is unknown; use {', '.join(map(repr, forms))} or None")
    if stream is not None and not hasattr(stream, "write"):
        raise InputError(f"stream={stream!r} cannot be written to; pass an open text file")
    if stream is not None and logs not in get_args(Form):
        raise InputError(f"stream={stream!r} needs logs='json' or logs='console', which write to it")
    if level not in get_args(Level):
        raise InputError(f"level={level!r} is unknown; use {', '.join(map(repr, get_args(Level)))}")
    if isinstance(spans, str) or (unknown := sorted(set(spans) - GROUPS)):
        given = spans if isinstance(spans, str) else unknown
        raise InputError(f"spans has {given!r}; pass a collection of any of {', '.join(sorted(GROUPS))}")
    if isinstance(most_spans, bool) or not isinstance(most_spans, int) or most_spans < 0:
        raise InputError(f"most_spans={most_spans!r}; pass a number of spans, 0 or more")
    if not isinstance(alerts, Alerts | None):
        raise InputError(f"alerts={alerts!r}; pass bcp.telemetry.Alerts(...), or None")
    return int(getattr(logging, level.upper()))
