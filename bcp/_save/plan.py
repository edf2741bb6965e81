"""The division of the writing among all ranks: planned once for a layout, remembered after (paper sec. 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from bcp._job import SaveJob
from bcp._messages.planning import DifferingReplicas
from bcp._save.leader import (
    EQUAL,
    HELLO_BYTES,
    Opened,
    Opening,
    Planned,
    Target,
    broadcast_step,
    open_save,
    scatter_step,
)
from bcp._save.local_state import LocalState
from bcp._save.replicas import KnownReplicas, encode_digests, recalled, remember
from bcp._save.samples import NO_SUM, ReplicaRows
from bcp.errors import BcpError, InputError
from bcp.plan.columns import Words
from bcp.plan.shards import ShardTable
from bcp.plan.units import encode_shared
from bcp.plan.write import RankTable
from bcp.plan.write.files import DataFile, data_files
from bcp.plan.write.survey import Survey, digest
from bcp.protocols import Agreement
from bcp.runtime.cache import LruCache
from bcp.runtime.device import Fence
from bcp.runtime.process import process_lock
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["SavePlan", "known_replicas", "only_save_to", "plan_writes", "read_share"]

_plans: LruCache[bytes, SavePlan] = LruCache(16)
_in_flight: set[tuple[str, int]] = set()
_in_flight_lock = process_lock()


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The writes of this rank, the same for every save of one layout."""

    key: bytes  # digest of the whole job's layout. Equal keys on all ranks mean that all ranks have the plan.
    files: Sequence[DataFile]  # the rank's data files of model and optimizer
    objects: Sequence[tuple[str, str]]  # the leaves that are no tensors, and whose values go into the receipt
    units: Sequence[str]  # paths of the units that it writes, and of shared parts of sharded states
    replicas: ReplicaRows  # the shards that it compares with other ranks
    share: bytes = b""  # rank 0's answer, from which all of this follows


async def plan_writes(
    agreement: Agreement, job: SaveJob, held: LocalState | BcpError, fence: Fence | None
) -> tuple[LocalState, Opening, SavePlan, Planned | None]:
    """Agree with all ranks on the writes; an unchanged layout costs 32 bytes a rank (paper sec. 4.1).

    Replicas are compared after the fence; None if the state may change already, so that nothing can be compared. Ranks
    with sharded dataloader states also say a digest of each state's shared part. On rank 0, the last result is the step
    that leads to the commit; on other ranks it is None.
    """
    rank = job.rank
    if isinstance(held, BcpError):
        await broadcast_step(agreement, "begin", rank, held, None)
        raise held
    own = _Own(agreement, job, held, fence)
    table = held.shards.table
    replicas = await in_thread_gc_paused(known_replicas, job, table)
    # Every rank's key names all ranks' tables: where all have the same, all tables are what they were (sec. 4.1).
    known = _plans.get(await own.layout(replicas.table))
    hello = known.key + await own.total(known, replicas) if known else bytes(HELLO_BYTES)
    hello += encode_shared(held.shared, nothing=not job.states)
    begin = partial(open_save, Target.of(job, compares=own.compares), held.framework)
    begun, opened = await broadcast_step(agreement, "begin", rank, hello, begin)
    opening = Opening.decode(begun, sender=0)
    if opening.cached and known is not None:
        plan, planned, differs = known, Planned(opened, opened.layout) if opened else None, opening.differs
    else:
        plan, planned = await own.new_plan(replicas.table, opened)
        differs = opening.compares and await own.differs(plan, planned, replicas)
    while differs:
        differing = await own.differing(plan, planned)
        replicas = await in_thread_gc_paused(replicas.with_differing, differing)
        remember(table, job.folder, replicas)
        if not differing.tensors:
            break
        plan, planned = await own.new_plan(replicas.table, opened)
        differs = await own.differs(plan, planned, replicas)
    return held, opening, plan, planned


def known_replicas(job: SaveJob, table: ShardTable) -> KnownReplicas:
    """Return the table of this rank with what earlier saves have found about its replicas."""
    remembers = job.world_size > 1 and job.options.replicas != "error"
    return recalled(table, job.folder) if remembers else KnownReplicas(table)


@dataclass(frozen=True, slots=True)
class _Own:
    """This rank's part in planning one save."""

    agreement: Agreement
    job: SaveJob
    held: LocalState
    fence: Fence | None  # None: nothing is compared

    @property
    def compares(self) -> bool:
        """Whether this rank compares its replicas with others."""
        return self.fence is not None and self.job.world_size > 1 and self.job.options.replicas != "ignore"

    async def layout(self, table: ShardTable) -> bytes:
        """Return the name of a plan among those that this rank remembers."""
        job, options = self.job, self.job.options
        layout = f"{job.rank} {job.world_size} {options.balance} {options.part_bytes} ".encode()
        return layout + await in_thread_gc_paused(digest, table)

    async def new_plan(self, table: ShardTable, opened: Opened | None) -> tuple[SavePlan, Planned | None]:
        """Make a plan with all ranks, and remember it."""
        rank = self.job.rank
        prepared = await in_thread_gc_paused(RankTable.of, table)
        answer, surveyed = await broadcast_step(
            self.agreement, "survey", rank, prepared.encoded.hello, opened.survey if opened else None
        )
        survey = Survey.decode(answer)
        message = prepared.encoded.message(rank, survey)
        divide = surveyed.divide if surveyed else None
        share, planned = await scatter_step(self.agreement, "plan", rank, message, divide)
        part_bytes = self.job.options.part_bytes
        plan = await in_thread_gc_paused(read_share, prepared, share, rank, survey.key, part_bytes)
        _plans.put(await self.layout(table), plan)
        return plan, planned

    async def total(self, plan: SavePlan, replicas: KnownReplicas) -> bytes:
        """Return the sum of the digests of this rank's replicas."""
        return plan.replicas.total(await self._digests(plan), replicas.values) if self.compares else NO_SUM

    async def _digests(self, plan: SavePlan) -> Words:
        held = self.held
        return await in_thread_gc_paused(plan.replicas.digests, held.shards, held.address, self.fence or {})

    async def differs(self, plan: SavePlan, planned: Planned | None, replicas: KnownReplicas) -> bool:
        """Ask all ranks whether replicas differ."""
        take = planned.compare if planned else None
        answer, _ = await broadcast_step(
            self.agreement, "compare", self.job.rank, await self.total(plan, replicas), take
        )
        return answer != EQUAL

    async def differing(self, plan: SavePlan, planned: Planned | None) -> DifferingReplicas:
        """Find out which replicas differ."""
        message = encode_digests(plan.replicas, await self._digests(plan))
        take = planned.find_differing if planned else None
        answer, _ = await broadcast_step(self.agreement, "replicas", self.job.rank, message, take)
        return DifferingReplicas.decode(answer, sender=0)


def read_share(prepared: RankTable, share: bytes, rank: int, key: bytes, part_bytes: int) -> SavePlan:
    """Turn rank 0's answer into data files and owned values."""
    plan = prepared.plan(share)
    files = data_files(prepared.table, plan.writes, rank=rank, part_bytes=part_bytes)
    replicas = ReplicaRows.of(prepared.table, plan.compared)
    return SavePlan(key, files, plan.objects, plan.units, replicas, share)


@contextmanager
def only_save_to(job: SaveJob) -> Iterator[InputError | None]:
    """Claim a path for one save of this rank; yields the reason to refuse where an earlier one is still running."""
    claim = (job.place, job.rank)
    with _in_flight_lock:
        taken = claim in _in_flight
        _in_flight.add(claim)
    try:
        yield (
            InputError(
                f"a save to {job.path} is still running on rank {job.rank}; pending.wait() for it, or save elsewhere"
            )
            if taken
            else None
        )
    finally:
        if not taken:
            with _in_flight_lock:
                _in_flight.discard(claim)
