"""A save into the memory of the hosts: plan, copy, mark. Agents make it durable, whether this process lives or not.

Storage is not asked for anything, so training goes on while it is silent.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal

from bcp import _save as saving
from bcp._agree import OwnMessage, capture_error, gather_broadcast, no_answer
from bcp._job import SaveJob
from bcp._messages.tiers import Intent, KnownLayout, ToldLayout
from bcp._record import Record
from bcp._text import hidden
from bcp._workflow import edited, plan_save
from bcp.errors import BcpError, InputError, StorageError
from bcp.events import SaveResult, TierEvent
from bcp.format.container import digest
from bcp.format.receipt import Receipt, encode_receipt
from bcp.pipeline import unwrap_stage_errors
from bcp.protocols import Agreement, ObjectKey
from bcp.runtime.threads import (
    collect_failure_garbage,
    in_thread,
    in_thread_even_if_cancelled,
    in_thread_gc_paused,
    low_priority_threads,
)
from bcp.stages.items import PartReceipt, WriteItem
from bcp.stages.save import SaveContext, Writers, blocks_of, snapshot_graph
from bcp.tiers.memory import TierMemory
from bcp.tiers.notes import FullError, Mark
from bcp.tiers.twins import pair

__all__ = ["Aim", "NoRoomError", "akeep"]

NO_DIGEST = bytes(16)

SHOWN = 3
"""Hosts without room in a message."""


class NoRoomError(StorageError):
    """A host has no room for a snapshot, as all ranks know: the save is to go to storage. Nothing was copied."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What is to become of a snapshot.

    Attributes:
        step: of the training.
        place: of the checkpoint below the durable root, as in "step-00001000"; empty for the root itself.
        durable: whether it shall go to durable storage while the job lives. When it has died, its newest one goes.
        replaces: operation of the checkpoint that it may replace there; empty for none.
        branch: of the run; snapshots of another one count for nothing.
        on_full: as in :class:`~bcp.Tiers`.
    """

    step: int
    place: str
    durable: bool = True
    replaces: str = ""
    branch: str = ""
    on_full: Literal["raise", "durable"] = "raise"


@collect_failure_garbage()
async def akeep(job: SaveJob, memory: TierMemory, aim: Aim) -> SaveResult:
    """Plan, copy into the files of the memory, mark. The snapshot outlives this process when its caller goes on.

    The result is that of a snapshot which all ranks have marked; its seconds are those until then.

    Raises:
        FullError: this host has no room.
        NoRoomError: a host has no room, and the aim's ``on_full`` is ``"durable"``; raised on all ranks.

    """
    record = Record(job)
    with saving.only_save_to(job) as refusal, saving.Snapshot(job) as snapshot:
        async with job.opened, record.forgiving(job.operation) as agreement:
            with job.watch.phase("plan"):
                held, opening, plan, planned, items, values = await plan_save(agreement, job, snapshot, refusal)
                known = await _layout(agreement, job, memory, plan.key, planned.layout if planned else b"")
                if known.pairs:
                    await _pair(agreement, job, memory, held, plan)
                more = _twin_items(job, memory, held, known, opening.operation)
            mark = Mark(opening.operation, job.rank)
            try:
                with job.watch.phase("write"):
                    receipt = await in_thread_gc_paused(_blank_receipt, job, items, values, opening.operation)
                    intent = _intent(job, receipt, known, held.framework, aim)
                    take = partial(_take, memory, known, intent, items, more)
                    full = await _full(agreement, job, memory, aim, take)
                    if not full:
                        await _copy(job, [*items, *more], snapshot, memory)
                        await in_thread(memory.folder.mark, mark)
            except BaseException:
                await in_thread_even_if_cancelled(partial(memory.give_up, mark))
                raise
            if not full:
                snapshot.let_go_on()
                with job.watch.phase("commit"):
                    await gather_broadcast(agreement, "kept", job.rank, b"", no_answer)
                memory.all_marked(opening.operation, is_copied=known.is_copied)
                memory.promised = opening.operation if aim.durable else memory.promised
                result = saving.result(job, held, opening, receipt, items, snapshot)
                memory.followers.released(job.watch, result, memory.live)
                await record.share(agreement, result)
        if full:  # all ranks have left the operation in peace
            await in_thread(memory.give_up, mark)
            raise NoRoomError(full)
    memory.followers.recorded(opening.operation, record.shared)
    return result


async def _layout(agreement: Agreement, job: SaveJob, memory: TierMemory, key: bytes, layout: bytes) -> KnownLayout:
    """Let each host have the layout, which rank 0 knows; learn whether all hosts have the copies that they wait for.

    ``key`` is that of the plan. Ranks learn, too, whether they have to choose twins for it.
    """

    async def answer(messages: Sequence[bytes]) -> bytes:
        told, name = ToldLayout.decode_all(messages), digest(layout)
        is_known = all(each.digest == name for each in told)
        pairs = _all_pair(told) and not all(each.is_paired for each in told)
        return KnownLayout(name, b"" if is_known else layout, all(each.is_copied for each in told), pairs).encode()

    memory.followers.troubles(job.watch, await in_thread(memory.troubles))
    memory.followers.drifted(job.watch, await in_thread(memory.new_drifts))
    pairs, is_paired = _pairs(job, memory), memory.twins is not None and memory.twins.key == key
    own = ToldLayout(memory.layout, await in_thread(memory.is_copied), pairs, is_paired).encode()
    return KnownLayout.decode(await gather_broadcast(agreement, "layout", job.rank, own, answer), sender=0)


def _pairs(job: SaveJob, memory: TierMemory) -> bool:
    """Whether twins write this save. Ranks that are left save alone, and agents copy what they have."""
    return memory.spread is not None and job.names is None


def _twin_items(
    job: SaveJob, memory: TierMemory, held: saving.LocalState, known: KnownLayout, operation: str
) -> Sequence[WriteItem]:
    """Return what this rank writes for ranks of another host: agents compare and copy this snapshot, or nothing."""
    if not (_pairs(job, memory) and known.is_copied and memory.twins is not None):
        return []
    return memory.twins.items(held, operation)


def _all_pair(told: Sequence[ToldLayout]) -> bool:
    """Whether all ranks want twins. Raises InputError if only some of them do."""
    without = [rank for rank, each in enumerate(told) if not each.pairs]
    if 0 < len(without) < len(told):
        raise InputError(
            f"rank {without[0]} has another Tiers(copies=...) than rank {_first_with(told)}, which has 'auto': pass "
            "all ranks the same"
        )
    return not without


def _first_with(told: Sequence[ToldLayout]) -> int:
    return next(rank for rank, each in enumerate(told) if each.pairs)


async def _pair(
    agreement: Agreement, job: SaveJob, memory: TierMemory, held: saving.LocalState, plan: saving.SavePlan
) -> None:
    """Choose twins with all ranks; let the agent of this host copy the host that follows from them."""
    assert memory.spread is not None  # noqa: S101 -- this rank has said so
    twins = await pair(agreement, job, memory.spread, held, plan)
    await in_thread(memory.folder.put_sources, twins.sources)
    memory.twins = twins


async def _full(agreement: Agreement, job: SaveJob, memory: TierMemory, aim: Aim, take: Callable[[], None]) -> str:
    """Get the memory of this rank; return why all ranks shall do without, or an empty text.

    Raises:
        FullError: this host has no room, and the save is to fail then.

    """
    taken = await capture_error(in_thread(take))
    if isinstance(taken, FullError):
        _tell_full(job, memory, taken)
    if aim.on_full == "raise":
        if isinstance(taken, FullError):
            raise FullError(f"{taken}, or pass Tiers(on_full='durable')") from taken
        if isinstance(taken, BcpError):
            raise taken
        return ""
    own: OwnMessage = str(taken or "").encode(errors="backslashreplace")
    if isinstance(taken, BcpError) and not isinstance(taken, FullError):
        own = taken

    async def answer(messages: Sequence[bytes]) -> bytes:
        reasons = [message for message in messages if message]
        more = [b"so for %d more ranks" % (len(reasons) - SHOWN)] if len(reasons) > SHOWN else []
        return b"; ".join([*reasons[:SHOWN], *more])

    return (await gather_broadcast(agreement, "room", job.rank, own, answer)).decode()


def _take(
    memory: TierMemory, known: KnownLayout, intent: Intent, items: Sequence[WriteItem], more: Sequence[WriteItem]
) -> None:
    """Take all memory of a snapshot: for layout, intent and files. Blocks. Raises FullError if there is no room."""
    if known.layout:
        memory.folder.put_layout(known.layout)
    memory.layout = known.digest
    memory.folder.prepare(intent)
    memory.begin(_sizes(items), intent.operation, _sizes(more))


def _sizes(items: Sequence[WriteItem]) -> dict[str, int]:
    """Return the bytes of each file."""
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.key] = max(sizes.get(item.key, 0), item.part.stop)
    return sizes


def _blank_receipt(
    job: SaveJob, items: Sequence[WriteItem], values: Mapping[ObjectKey, str], operation: str
) -> Receipt:
    """Say what the files of this rank will be; all is known before they are copied, but for digests."""
    stored = []
    for item in items:
        blocks = blocks_of(item, saving.BLOCK_BYTES)
        stored.append(PartReceipt(item.part, item.part.start, item.nbytes, blocks, (NO_DIGEST,) * len(blocks)))
    return saving.make_receipt(items, stored, values, operation, job.rank, job.options)


def _intent(job: SaveJob, receipt: Receipt, known: KnownLayout, framework: str, aim: Aim) -> Intent:
    return Intent(
        rank=job.rank,
        world_size=job.world_size,
        operation=receipt.operation,
        place=aim.place,
        step=aim.step,
        framework=framework,
        part_bytes=job.options.part_bytes,
        layout=known.digest,
        receipt=encode_receipt(receipt),
        branch=aim.branch,
        copied=known.is_copied,
        durable=aim.durable,
        replaces=aim.replaces,
        metrics={name: value for name, value in job.metrics.items() if math.isfinite(value)},
        user=json.dumps(dict(job.options.metadata)).encode(),
    )


async def _copy(job: SaveJob, items: Sequence[WriteItem], snapshot: saving.Snapshot, memory: TierMemory) -> None:
    """Copy all parts to their places in the files."""
    options = job.options
    changing = [item for item in items if not item.is_steady]
    job.watch.contents = partial(saving.contents, {item.name: item for item in items})
    job.watch.nbytes = sum(item.nbytes for item in items)
    budget = snapshot.lend(items)
    with ExitStack() as stack:
        stack.callback(snapshot.release)
        stack.enter_context(low_priority_threads(nice=options.nice, io=options.ionice))
        context = SaveContext(memory, Writers(), saving.BLOCK_BYTES, snapshot.fence, len(changing), snapshot.copied)
        graph = edited(snapshot_graph(context, copy_workers=options.copy_workers), options.edit)
        if not changing:
            await snapshot.copied()
        with unwrap_stage_errors():
            kept = await graph.run(items, budget=budget, observe=job.watch)
    for item, blob in zip(items, kept, strict=True):
        if blob.nbytes != item.nbytes:
            raise BcpError(
                f"{item.name} has {blob.nbytes} bytes where {item.nbytes} were planned: a custom stage did it"
            )


def _tell_full(job: SaveJob, memory: TierMemory, error: StorageError) -> None:
    """Tell that the file system in memory has no room for a snapshot."""
    watch, now = job.watch, time.monotonic()
    place, seconds = str(memory.folder.root), now - watch.started
    watch(TierEvent("full", watch.step, watch.operation, now, seconds, watch.nbytes or 0, place, hidden(str(error))))
