"""Items flow through stages, under a byte budget. The only room that runs tasks.

A stage is an async function, one item in and one item out; a :class:`Pipeline` is stages in a row. Memory bounds,
order, back-pressure, cancellation and "which item failed in which stage" are the pipeline's business, never a stage's.
"""

from __future__ import annotations

from bcp.pipeline.budget import Budget
from bcp.pipeline.failure import let_go, run_while_opening, unwrap_stage_errors
from bcp.pipeline.graph import Item, Pipeline
from bcp.pipeline.stage import Stage, tee

__all__ = ["Budget", "Item", "Pipeline", "Stage", "let_go", "run_while_opening", "tee", "unwrap_stage_errors"]
