"""Items flow through stages, under a byte budget. The only room that runs tasks.

A stage is an async function, one item in and one item out; a :class:`Pipeline` is stages in a row. Memory bounds,
order, back-pressure, cancellation and "which item failed in which stage" are the pipeline's business, never a stage's.
"""

from __future__ import annotations

from bcp.pipeline.beside import beside
from bcp.pipeline.budget import Budget
from bcp.pipeline.garbage import failures_collected, planning, uncollected
from bcp.pipeline.graph import Item, Pipeline
from bcp.pipeline.stage import Stage, tee
from bcp.pipeline.threads import at_last, beginning_with, giving_way, in_pool, in_thread, on_loop, thread_count

__all__ = [
    "Budget",
    "Item",
    "Pipeline",
    "Stage",
    "at_last",
    "beginning_with",
    "beside",
    "failures_collected",
    "giving_way",
    "in_pool",
    "in_thread",
    "on_loop",
    "planning",
    "tee",
    "thread_count",
    "uncollected",
]
