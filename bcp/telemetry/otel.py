"""OpenTelemetry, by its API alone: the application's SDK decides where spans and metrics go, or that there are none.

The import of this module makes spans and metrics of all saves and loads that begin from then on.
"""

from bcp.telemetry.metrics import Metrics
from bcp.telemetry.spans import Spans
from bcp.telemetry.watch import add_sink

add_sink(Spans())
add_sink(Metrics())
