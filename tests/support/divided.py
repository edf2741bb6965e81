"""Plans of saves without ranks, with blocks as small as the tests' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bcp.plan.layout import Layout
from bcp.plan.shards import ShardTable
from bcp.plan.write import exchange_tables, plan_save
from bcp.plan.write.divide import Writes
from bcp.plan.write.world import AllTables


@dataclass(frozen=True)
class Divided:
    layout: Layout
    writes: tuple[Writes, ...]


def world_of(tables: Sequence[ShardTable]) -> AllTables:
    """Send what all ranks hold to rank 0."""
    return exchange_tables(tables, block_bytes=4096)


def divided(tables: Sequence[ShardTable], *, balance: str = "split", block_bytes: int = 4096) -> Divided:
    """Divide the work of a save."""
    plan = plan_save(tables, balance=balance, block_bytes=block_bytes)
    return Divided(plan.layout, tuple(rank.writes for rank in plan.ranks))
