"""Traces, metrics, reports, progress bars, log lines, alerts and measured blocks, made of events.

Nothing is printed and nothing is sent anywhere until :func:`configure` is called, or the application sets up
OpenTelemetry.
"""

from typing import TYPE_CHECKING

from bcp.runtime.imports import lazy_names

if TYPE_CHECKING:
    from bcp.telemetry.alerts import Alert, Alerts
    from bcp.telemetry.configuration import configure
    from bcp.telemetry.measured import measure
    from bcp.telemetry.watch import LiveSink, Sink, Watch, add_sink, remove_sink, sinks

__all__ = ["Alert", "Alerts", "LiveSink", "Sink", "Watch", "add_sink", "configure", "measure", "remove_sink", "sinks"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "bcp.telemetry.alerts": ["Alert", "Alerts"],
            "bcp.telemetry.configuration": ["configure"],
            "bcp.telemetry.measured": ["measure"],
            "bcp.telemetry.watch": ["LiveSink", "Sink", "Watch", "add_sink", "remove_sink", "sinks"],
        },
        __all__,
        together=[  # whoever asks for the sinks finds those of OpenTelemetry
            "bcp.telemetry.alerts",
            "bcp.telemetry.configuration",
            "bcp.telemetry.measured",
            "bcp.telemetry.otel",
            "bcp.telemetry.watch",
        ],
    )
