"""The division of the writing among all ranks: planned once for a layout, remembered after (paper sec. 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from bcp._job import SaveJob
from bcp._save.leader import Opening, Planned, Target, broadcast_step, open_save, scatter_step
from bcp._save.local_state import LocalState
from bcp.errors import BcpError, InputError
from bcp.plan.units import encode_shared
from bcp.plan.write import RankTable
from bcp.plan.write.files import DataFile, data_files
from bcp.plan.write.survey import DIGEST_BYTES, Survey, digest
from bcp.protocols import Agreement
from bcp.runtime.cache import LruCache
from bcp.runtime.process import process_lock
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["SavePlan", "only_save_to", "plan_writes"]

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


async def plan_writes(
    agreement: Agreement, job: SaveJob, held: LocalState | BcpError
) -> tuple[LocalState, Opening, SavePlan, Planned | None]:
    """Agree with all ranks on the writes; an unchanged layout costs 16 bytes a rank (paper sec. 4.1).

    Ranks with sharded dataloader states also say a digest of each state's shared part. On rank 0, the last result is
    the step that leads to the commit; on other ranks it is None.
    """
    rank, options = job.rank, job.options
    if isinstance(held, BcpError):
        await broadcast_step(agreement, "begin", rank, held, None)
        raise held
    table = held.shards.table
    layout = f"{rank} {job.world_size} {options.balance} {options.part_bytes} ".encode()
    layout += await in_thread_gc_paused(digest, table)
    known = _plans.get(layout)
    # Every rank's key names all ranks' tables: where all have the same, all tables are what they were (sec. 4.1).
    hello = (known.key if known else bytes(DIGEST_BYTES)) + encode_shared(held.shared, nothing=not job.states)
    begin = partial(open_save, Target.of(job), held.framework)
    begun, opened = await broadcast_step(agreement, "begin", rank, hello, begin)
    opening = Opening.decode(begun, sender=0)
    if opening.cached and known is not None:
        return held, opening, known, Planned(opened, opened.layout) if opened else None
    prepared = await in_thread_gc_paused(RankTable.of, table)
    answer, surveyed = await broadcast_step(
        agreement, "survey", rank, prepared.encoded.hello, opened.survey if opened else None
    )
    survey = Survey.decode(answer)
    message = prepared.encoded.message(rank, survey)
    share, planned = await scatter_step(agreement, "plan", rank, message, surveyed.divide if surveyed else None)
    plan = await in_thread_gc_paused(_read_share, prepared, share, rank, survey.key, options.part_bytes)
    _plans.put(layout, plan)
    return held, opening, plan, planned


def _read_share(prepared: RankTable, share: bytes, rank: int, key: bytes, part_bytes: int) -> SavePlan:
    """Turn rank 0's answer into data files and owned values."""
    plan = prepared.plan(share)
    files = data_files(prepared.table, plan.writes, rank=rank, part_bytes=part_bytes)
    return SavePlan(key, files, plan.objects, plan.units)


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
