"""A save through torch.distributed.checkpoint: what rank 0 and every rank do in each of DCP's calls.

DCP carries the messages between ranks. :func:`open_on_all` is rank 0's part in DCP's planning, :func:`write` every
rank's own part, and :func:`commit` the end on rank 0. All bytes go the way of ``bcp.save``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from bcp import _save as saving
from bcp._job import SaveJob
from bcp._save.leader import HELLO_BYTES, Planned, Target, open_save
from bcp._workflow import write_parts
from bcp.dcp.groups import by_parameter, is_of_group
from bcp.dcp.names import Names, assigned
from bcp.dcp.shards import FRAMEWORK, PlannedShards, shard_table
from bcp.errors import InputError
from bcp.format.layout_file import decode_layout, encode_layout
from bcp.format.receipt import Receipt
from bcp.pipeline import unwrap_stage_errors
from bcp.plan.write import RankTable
from bcp.plan.write.survey import Survey
from bcp.protocols import ObjectKey
from bcp.runtime.threads import in_thread, in_thread_gc_paused, with_thread_setup

__all__ = ["NAMES", "Begun", "Task", "Written", "commit", "open_on_all", "write"]

NAMES: ObjectKey = ("dcp", "names")
"""Key of the record of names among the values of the first receipt. No row of the layout has it."""


@dataclass(frozen=True, slots=True)
class Task:
    """The part of one rank, as rank 0 tells it.

    Attributes:
        rank: this rank's number among those that save.
        world_size: how many ranks save.
        opening: the operation, encoded.
        table: digest of the shards that the rank was planned with.
        share: the intervals of its shards that the rank writes, and their places, encoded.
        keys: kind and name of each name of its plan.
    """

    rank: int
    world_size: int
    opening: bytes
    table: bytes
    share: bytes
    keys: Mapping[str, ObjectKey]


@dataclass(frozen=True, slots=True)
class Written:
    """The answer of one rank: its files are durable.

    Attributes:
        message: for the commit; empty for rank 0, which writes its receipt last.
        groups: hyper-parameters of groups, as text.
        nbytes: bytes of its data files.
    """

    message: bytes
    groups: Mapping[ObjectKey, str]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A save whose writing is divided; rank 0 keeps it until the commit."""

    planned: Planned
    names: Names


async def open_on_all(job: SaveJob, plans: Sequence[SavePlan]) -> tuple[Begun, list[Task]]:
    """Refuse to harm a checkpoint, and divide the writing among all ranks; nothing is written yet.

    Args:
        job: the save, on rank 0.
        plans: of all ranks, by rank.

    Raises:
        ExistsError: a checkpoint is there, and may not be overwritten.
        StateError: a tensor cannot be saved, or ranks disagree about one.
        CoverageError: the chunks of a tensor leave a gap or overlap.

    """
    async with job.opened:
        return await _open(job, plans)


async def _open(job: SaveJob, plans: Sequence[SavePlan]) -> tuple[Begun, list[Task]]:
    keys, names = await in_thread_gc_paused(_named, plans)
    tables = await in_thread_gc_paused(lambda: [RankTable.of(shard_table(plan.items, keys)) for plan in plans])
    opened, opening = await open_save(Target.of(job), FRAMEWORK, [bytes(HELLO_BYTES)] * len(plans))
    surveyed, answer = await opened.survey([table.encoded.hello for table in tables])
    survey = Survey.decode(answer)
    messages = [table.encoded.message(rank, survey) for rank, table in enumerate(tables)]
    planned, shares = await in_thread_gc_paused(surveyed.divide, messages)
    tasks = [
        Task(rank, len(plans), opening, table.encoded.table, share, {fqn: keys[fqn] for fqn in _fqns([plan])})
        for rank, (plan, table, share) in enumerate(zip(plans, tables, shares, strict=True))
    ]
    return Begun(planned, names), tasks


def _fqns(plans: Sequence[SavePlan]) -> set[str]:
    return {item.index.fqn for plan in plans for item in plan.items}


def _named(plans: Sequence[SavePlan]) -> tuple[dict[str, ObjectKey], Names]:
    """Give every name of the plans a kind and a name, and keep the way back."""
    keys, names = assigned(_fqns(plans))
    paths = [plan.planner_data for plan in plans if isinstance(plan.planner_data, Mapping)]
    if len(paths) < len(plans):  # another planner than DCP's own, or one that does not flatten
        return keys, replace(names, paths=None)
    return keys, names.with_paths({fqn: path for each in paths for fqn, path in each.items() if fqn in keys}, keys)


async def write(job: SaveJob, task: Task, plan: SavePlan, planner: SavePlanner) -> tuple[Written, Receipt]:
    """Write the data files of this rank, and its receipt unless it is rank 0.

    Raises:
        StateError: a tensor or value cannot be saved.
        ExistsError: another save has committed meanwhile.
        StorageError: storage failed.

    """
    opening = saving.Opening.decode(task.opening, sender=0)
    job = replace(job, planner=lambda: PlannedShards(plan.items, task.keys, planner))
    with job.watch.running(), with_thread_setup(job.caller.enter), saving.Snapshot(job) as snapshot:
        async with job.opened, saving.undone_on_error(job) as undo:
            held = await in_thread_gc_paused(snapshot.take_stock)
            prepared = await in_thread_gc_paused(RankTable.of, held.shards.table)
            if prepared.encoded.table != task.table:
                raise InputError(
                    f"rank {job.rank}: the planner's finish_plan() returned other items than create_global_plan() "
                    "planned for this rank; change items in create_global_plan(), where all ranks see them"
                )
            part_bytes = job.options.part_bytes
            own = await in_thread_gc_paused(saving.read_share, prepared, task.share, job.rank, b"", part_bytes)
            items = await in_thread_gc_paused(saving.write_items, held, own, opening.operation, job.rank, job.options)
            values = await in_thread(saving.owned_values, job, held, own)
            undo.begin(opening.operation, items)
            async with saving.not_replaced(job.backend, job.path, opening.operation, opening.version):
                with unwrap_stage_errors():
                    stored = await write_parts(job, items, snapshot)
                receipt = saving.make_receipt(items, stored, values, opening.operation, job.rank, job.options)
                message = await saving.put_receipt(job.backend, receipt) if job.rank else b""
    groups = {key: text for key, text in values.items() if is_of_group(key)}
    return Written(message, groups, sum(file.stored_nbytes for file in receipt.files)), receipt


async def commit(job: SaveJob, begun: Begun, receipt: Receipt, written: Sequence[Written]) -> None:
    """Write the receipt of rank 0 and, last of all, the metadata. From here on the checkpoint exists.

    Args:
        job: the save, on rank 0.
        begun: the result of :func:`open_on_all`.
        receipt: of rank 0, which gets the record of names and the hyper-parameters by parameter.
        written: the answers of all ranks, by rank.

    Raises:
        ExistsError: another save has committed here since this one began.
        StorageError: files are missing, or storage failed.

    """
    planned, groups = begun.planned, {key: text for each in written for key, text in each.groups.items()}
    values = await in_thread_gc_paused(by_parameter, groups)
    layout = await in_thread_gc_paused(_with_values, planned.layout, sorted(values))
    receipt = replace(receipt, objects={**receipt.objects, **values, NAMES: begun.names.encode()})
    opened = replace(planned.opened, target=Target.of(job))  # whose storage is open
    async with job.opened, saving.undone_on_error(job) as undo:
        undo.begin(receipt.operation, ())
        first = await saving.put_receipt(job.backend, receipt)
        done = replace(planned, opened=opened, layout=layout)
        await done.commit(undo, [first, *(each.message for each in written[1:])])


def _with_values(layout_bytes: bytes, keys: Sequence[ObjectKey]) -> bytes:
    """Return an encoded layout with further values, which rank 0 has."""
    if not keys:
        return layout_bytes
    layout = decode_layout(layout_bytes)
    ranks = dict(zip(layout.objects, layout.object_rank.tolist(), strict=True)) | dict.fromkeys(keys, 0)
    objects = sorted(ranks)
    return encode_layout(replace(layout, objects=objects, object_rank=np.array([ranks[key] for key in objects])))
