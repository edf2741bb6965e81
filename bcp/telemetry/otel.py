"""OpenTelemetry, by its API alone: the application's SDK decides where spans and metrics go, or that there are none."""

from __future__ import annotations

from bcp.telemetry.metrics import Metrics
from bcp.telemetry.spans import Spans
from bcp.telemetry.watch import add_sink

__all__ = ["follow_all"]


def follow_all() -> None:
    """Make spans and metrics of all saves and loads that begin from now on."""
    add_sink(Spans())
    add_sink(Metrics())
