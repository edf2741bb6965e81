"""One self-contained HTML page of saves and loads, and their traces for Perfetto.

The page draws with Vega, whose code is in ``vl-convert-python``: 0.90 MB with vega-embed and Vega-Lite, 0.30 MB after
gzip. plotly.js is 4.8 MB, 1.5 MB after gzip, and a page of 1,024 ranks shall stay below 5 MB and 2 seconds.
Specifications are Vega's own: neither plotly nor Vega-Lite draws ranks in blocks of their topology, or lanes with queue
waits, and nothing has to be compiled in the browser. The code is passed as gzip, as the data are.

Figures of ranks, places and storage are computed here; the browser draws them. It computes only the queues of the
chosen rank. Nothing is fetched when the page is viewed, and its content security policy forbids it.
"""

from bcp.telemetry.page.assemble import page
from bcp.telemetry.page.trace import trace_json

__all__ = ["page", "trace_json"]
