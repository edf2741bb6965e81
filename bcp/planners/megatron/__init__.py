"""The planner for Megatron-core, which is imported only where it is used."""

from __future__ import annotations

from bcp.planners.megatron.planner import MegatronPlanner, holds_megatron
from bcp.planners.megatron.rng import MegatronRng

__all__ = ["MegatronPlanner", "MegatronRng", "holds_megatron"]
