"""The whole way of a plan without ranks: tables are stated, surveyed, gathered, divided, and expanded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bcp.plan.layout import Layout
from bcp.plan.shards import ShardTable
from bcp.plan.write.divide import Writes, divide, expand
from bcp.plan.write.survey import EncodedTable, Survey, decode_share, digest, encode_shares, gather, survey
from bcp.plan.write.world import AllTables, factor


@dataclass(frozen=True)
class Divided:
    layout: Layout
    writes: tuple[Writes, ...]
    owned: tuple[list[tuple[str, str]], ...] = ()


def world_of(tables: Sequence[ShardTable], balance: str = "split", block_bytes: int = 4096) -> AllTables:
    """Send what all ranks hold to rank 0."""
    stated = [EncodedTable.of(factor(table), digest(table)) for table in tables]
    plan = survey([each.hello for each in stated], balance=balance, block_bytes=block_bytes)
    told = Survey.decode(plan.encode())
    return gather(plan, [each.message(rank, told) for rank, each in enumerate(stated)])


def divided(tables: Sequence[ShardTable], *, balance: str = "split", block_bytes: int = 4096) -> Divided:
    """Divide the work of a save."""
    division = divide(world_of(tables, balance, block_bytes), balance=balance, block_bytes=block_bytes)
    shares = [decode_share(answer) for answer in encode_shares(division)]
    return Divided(
        division.layout,
        tuple(expand(table, factor(table), share.rows) for table, share in zip(tables, shares, strict=True)),
        tuple([table.objects[row] for row in share.owned] for table, share in zip(tables, shares, strict=True)),
    )
