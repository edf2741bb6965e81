"""Twins: ranks with equal shards on another host, which write each other's tensors into the memory of their hosts.

So a snapshot has two holders, and no tensor goes over the network. Rank 0 chooses once for each layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from bcp import _save as saving
from bcp._agree import gather_scatter
from bcp._job import SaveJob
from bcp._messages.base import refused
from bcp._messages.tiers import Sources, TwinShares, TwinTable
from bcp.plan.shards import MAY_DIFFER, ONE_WRITER, ShardTable
from bcp.plan.twins import choose_twins
from bcp.plan.write import RankTable
from bcp.plan.write.divide import SHARE, expand, holds
from bcp.plan.write.files import DataFile, data_files
from bcp.plan.write.survey import decode_share
from bcp.protocols import Agreement
from bcp.runtime.threads import in_thread_gc_paused
from bcp.stages.items import WriteItem
from bcp.tiers.packing import packed, unpacked
from bcp.tiers.recovery import Hosts

__all__ = ["Spread", "TwinFiles", "pair"]


@dataclass(frozen=True, slots=True)
class Spread:
    """The hosts of a job whose files are to be on two hosts each.

    Attributes:
        hosts: all of them.
        host_of: number of the host of each rank.
        stride: least distance of the two hosts.
    """

    hosts: Hosts
    host_of: Sequence[int]
    stride: int


@dataclass(frozen=True, slots=True)
class TwinFiles:
    """The files that a rank writes for its twins in each save of one layout.

    Attributes:
        key: of the plan of these saves.
        sources: the host that this one copies.
        files: data files of model and optimizer, by the rank whose files they are.
        differing: tensors whose replicas are known to differ.
    """

    key: bytes
    sources: Sources
    files: Mapping[int, Sequence[DataFile]]
    differing: tuple[str, ...]

    def items(self, held: saving.LocalState, operation: str) -> list[WriteItem]:
        """Return the parts of one save."""
        return [item for rank, files in self.files.items() for item in saving.twin_items(held, files, operation, rank)]


async def pair(
    agreement: Agreement, job: SaveJob, spread: Spread, held: saving.LocalState, plan: saving.SavePlan
) -> TwinFiles:
    """Choose twins with all ranks, and lay out the files that this rank writes for others."""
    prepared = await in_thread_gc_paused(_prepared, job, held)
    own = TwinTable(_digest(prepared), decode_share(plan.share).rows.tobytes())

    def divide(messages: Sequence[bytes]) -> Sequence[bytes]:
        return _divided(spread, TwinTable.decode_all(messages))

    answer = await gather_scatter(agreement, "twins", job.rank, own.encode(), divide)
    shares = TwinShares.decode(answer, sender=0)
    files = await in_thread_gc_paused(_files, prepared, shares, job.options.part_bytes)
    hosts, source = spread.hosts, shares.source
    is_alone = source == spread.host_of[job.rank]
    sources = Sources((), ()) if is_alone else Sources((hosts.names[source],), (hosts.addresses[source],))
    return TwinFiles(plan.key, sources, files, _differing(prepared.table))


def _prepared(job: SaveJob, held: saving.LocalState) -> RankTable:
    return RankTable.of(saving.known_replicas(job, held.shards.table).table)


def _digest(prepared: RankTable) -> bytes:
    """Return a digest of all shards of a rank: equal digests, equal shards."""
    state = xxhash.xxh3_128()
    for column in (prepared.encoded.catalogue, prepared.encoded.slots, prepared.encoded.flat):
        state.update(len(column).to_bytes(8, "little"))
        state.update(column)
    return state.digest()


def _divided(spread: Spread, told: Sequence[TwinTable]) -> list[bytes]:
    """Return the answer to each rank."""
    numbers: dict[bytes, int] = {}
    held = np.array([numbers.setdefault(each.held, len(numbers)) for each in told], dtype=np.int64)
    host_of = np.array(spread.host_of, dtype=np.int64)
    twins = choose_twins(held, host_of, spread.stride)
    source_of = np.argsort(twins.copied_by)
    answers = []
    for rank, host in enumerate(spread.host_of):
        others = twins.of(rank)
        answers.append(TwinShares(int(source_of[host]), packed(others), tuple(told[each].rows for each in others)))
    return [each.encode() for each in answers]


def _files(prepared: RankTable, shares: TwinShares, part_bytes: int) -> dict[int, Sequence[DataFile]]:
    """Lay out the files of other ranks, as these do.

    There are none if ranks have trained apart. Raises MessageError for a share of shards that this rank does not have.
    """
    table, files = prepared.table, dict[int, Sequence[DataFile]]()
    if table.marks is not None and bool((table.marks & ONE_WRITER).all()):
        return files
    for rank, rows in zip(unpacked(shares.ranks).tolist(), shares.rows, strict=True):
        share = np.frombuffer(rows, dtype=SHARE)
        if not holds(table, prepared.factored, share):
            raise refused("TwinShares", rows, f"rank {rank} has shards that this rank does not have", 0)
        writes = expand(table, prepared.factored, share)
        if len(writes):
            files[rank] = data_files(table, writes, rank=rank, part_bytes=part_bytes)
    return files


def _differing(table: ShardTable) -> tuple[str, ...]:
    """Return the tensors whose replicas are known to differ."""
    marks = np.zeros(len(table.tensors), np.int64) if table.marks is None else table.marks
    return tuple(table.tensors.fqn[row] for row in np.flatnonzero(marks & MAY_DIFFER).tolist())
