"""Traces, metrics, reports, progress bars, log lines, alerts and measured blocks, made of events.

Nothing is printed and nothing is sent anywhere until :func:`configure` is called, or the application sets up
OpenTelemetry.
"""

from __future__ import annotations

from bcp.telemetry.alerts import Alert, Alerts
from bcp.telemetry.configuration import configure
from bcp.telemetry.measure import measure
from bcp.telemetry.otel import follow_all
from bcp.telemetry.watch import LiveSink, Sink, Watch, add_sink, remove_sink, sinks

__all__ = ["Alert", "Alerts", "LiveSink", "Sink", "Watch", "add_sink", "configure", "measure", "remove_sink", "sinks"]

follow_all()
