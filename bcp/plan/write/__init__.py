"""Plan a save: the bytes that each rank writes, and their place in its data files (paper sec. 3.3, 4.1).

No rank knows the shards of the others, so planning takes three steps with a message before each of the last two:

1. Each rank describes its shards in a :class:`RankTable`, and sends rank 0 a digest of it.
2. Rank 0 finds the ranks with equal tables, asks one rank of each group for its table, and divides the writing.
3. Each rank turns its share into a :class:`RankPlan`: intervals of its own shards.

:func:`plan_save` takes all three steps in one process, and sends the same bytes. A save takes them one by one, with a
collective operation in between (:mod:`bcp._save.plan`, :mod:`bcp._save.leader`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bcp._messages.base import refused
from bcp.plan.columns import within
from bcp.plan.layout import Layout
from bcp.plan.shards import ShardTable
from bcp.plan.units import claimed_paths, decode_claims
from bcp.plan.write.divide import WriteDivision, Writes, divide_writes, expand, holds
from bcp.plan.write.replicas import ComparedRows, rows_of
from bcp.plan.write.survey import (
    EncodedTable,
    Survey,
    decode_share,
    digest,
    encode_shares,
    gather_tables,
    survey_tables,
)
from bcp.plan.write.world import AllTables, FactoredTable, factor

__all__ = ["RankPlan", "RankTable", "WorldPlan", "divide_save", "exchange_tables", "plan_save"]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The writes of one rank."""

    # flat intervals of its shards, and their places; :func:`~bcp.plan.write.files.data_files` cuts them into parts
    writes: Writes
    # (kind, path) of the leaves that are not tensors and whose values go into its receipt
    objects: Sequence[tuple[str, str]]
    units: Sequence[str]  # paths of the units that it writes, and of shared parts of sharded states
    compared: ComparedRows  # the shards that it compares with other ranks


@dataclass(frozen=True, slots=True)
class RankTable:
    """The shards of one rank, prepared for planning."""

    table: ShardTable  # the shards
    factored: FactoredTable  # the same, split into tensors, boxes and flat intervals
    encoded: EncodedTable  # the same as bytes, for messages to rank 0

    @classmethod
    def of(cls, table: ShardTable) -> RankTable:
        """Factor and encode a table."""
        factored = factor(table)
        return cls(table, factored, EncodedTable.of(factored, digest(table)))

    def plan(self, share: bytes) -> RankPlan:
        """Read the rank's share of a save, one of :func:`~bcp.plan.write.survey.encode_shares`.

        Raises MessageError if the bytes are no share, or if the share names parts that the rank does not have.
        """
        answer = decode_share(share)
        paths = [path for claim in decode_claims(self.table.units) for path in claimed_paths(claim)]
        owned = within(answer.owned, len(self.table.objects)) and within(answer.units, len(paths))
        replicas = rows_of(self.factored, answer.replicas, len(self.table.objects), answer.compared)
        if not (owned and replicas and holds(self.table, self.factored, answer.rows)):
            raise refused("Share", share, "it names objects, units or intervals that this rank does not have", 0)
        return RankPlan(
            expand(self.table, self.factored, answer.rows),
            [self.table.objects[row] for row in answer.owned.tolist()],
            [paths[number] for number in answer.units.tolist()],
            replicas,
        )


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """The plan of a save for all ranks."""

    layout: Layout  # the place of every element of every tensor
    ranks: Sequence[RankPlan]  # the writes of each rank, by rank


def divide_save(
    survey: Survey,
    messages: Sequence[bytes],
    *,
    balance: str,
    block_bytes: int,
    names: Sequence[int] | None = None,
) -> WriteDivision:
    """Divide the writing among all ranks; runs on rank 0. Options and other errors are as in :func:`plan_save`.

    ``names`` has the numbers of the ranks for messages; None: as they count.

    Raises:
        MessageError: a message is no :meth:`~bcp.plan.write.survey.EncodedTable.message` that answers the survey.
    """
    return divide_writes(gather_tables(survey, messages), balance=balance, block_bytes=block_bytes, names=names)


def plan_save(tables: Sequence[ShardTable], *, balance: str = "split", block_bytes: int = 1 << 20) -> WorldPlan:
    """Plan a save of all ranks in one process (paper sec. 4.1). Pure: equal tables give equal plans.

    Replicas are written once. Every element is proved to be in exactly one shard, up to replicas. Each rank
    then writes about equally many bytes, into one data file a kind.

    Args:
        tables: the shards of every rank, by rank.
        balance: ``"split"`` cuts replicated shards, ``"worst-fit"`` gives away whole shards.
        block_bytes: bytes of the blocks that data files are checksummed and read in; noted in the layout.

    Raises:
        StateError: ranks disagree about a tensor's shape, dtype or tie, or about units.
        CoverageError: the shards of a tensor leave a gap, overlap, or stick out.

    Example:
        Two data-parallel ranks hold the same 1,024 x 1,024 matrix, and write half of it each:

        >>> from bcp.plan.box import Box
        >>> from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
        >>> weight = TensorMeta("model", "weight", "float32", 4, (1024, 1024))
        >>> replica = ShardTable.build([ShardRow(weight, Box.whole(weight.shape))])
        >>> plan = plan_save([replica, replica])
        >>> [(rank.writes.start.tolist(), rank.writes.stop.tolist()) for rank in plan.ranks]
        [([0], [524288]), ([524288], [1048576])]
        >>> plan.layout.file_nbytes.tolist()
        [2097152, 2097152]
    """
    ranks = [RankTable.of(table) for table in tables]
    survey, messages = _exchange(ranks, balance, block_bytes)
    division = divide_save(survey, messages, balance=balance, block_bytes=block_bytes)
    shares = encode_shares(division)
    return WorldPlan(division.layout, [rank.plan(share) for rank, share in zip(ranks, shares, strict=True)])


def exchange_tables(tables: Sequence[ShardTable], *, balance: str = "split", block_bytes: int = 1 << 20) -> AllTables:
    """Return the tables of all ranks as rank 0 receives them: the first half of :func:`plan_save`."""
    return gather_tables(*_exchange([RankTable.of(table) for table in tables], balance, block_bytes))


def _exchange(ranks: Sequence[RankTable], balance: str, block_bytes: int) -> tuple[Survey, list[bytes]]:
    """Return rank 0's survey, and every rank's answer to it."""
    survey = survey_tables([rank.encoded.hello for rank in ranks], balance=balance, block_bytes=block_bytes)
    received = Survey.decode(survey.encode())
    return survey, [table.encoded.message(rank, received) for rank, table in enumerate(ranks)]
