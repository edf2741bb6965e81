"""Commit a save by one conditional request, once the files of all ranks are in storage (paper sec. 5.2).

Any host may do it, and several may at once: storage lets one request through, and the others find its outcome. A save
may replace the one checkpoint that its intents name, or none. So an older save never replaces a newer one, however late
its host comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from bcp._deletion import Committed, delete_unnamed, read_committed, swept
from bcp._messages.planning import Written
from bcp._messages.tiers import Drained, Intent
from bcp._written import check_written, decode_written
from bcp.agent.branch import has_gone_back
from bcp.backends import child
from bcp.backends.small import get_small
from bcp.format.metadata import METADATA_KEY, encode_metadata, operation_of
from bcp.protocols import Backend, ObjectInfo
from bcp.runtime.threads import in_thread, in_thread_gc_paused
from bcp.tiers.intent import commit_of
from bcp.tiers.records import forget_records, records_of

__all__ = ["Outcome", "checkpoint_in", "commit"]


class Outcome(Enum):
    """What has become of a save."""

    COMMITTED = "it is committed"
    REFUSED = "another checkpoint is at its place, which it may not replace"
    WAITING = "files of other ranks are not in storage yet"
    LEFT = "the run has gone back since, on other hosts"
    GONE = "its files in memory have made room for newer ones"


def checkpoint_in(run: Backend, intent: Intent) -> Backend:
    """Return storage at the place of the checkpoint, below the durable root."""
    return child(run, intent.place) if intent.place else run


async def commit(run: Backend, path: str, intent: Intent, layout: bytes, is_left: Callable[[], bool]) -> Outcome:
    """Commit a save if the files of all of its ranks are in storage.

    Args:
        run: the durable root, whose ledger says whether the run has gone back.
        path: of the checkpoint, for messages.
        intent: of any rank.
        layout: the encoded layout that the intent names.
        is_left: whether the save was given up meanwhile; asked in a thread.

    Raises:
        StorageError: storage failed, or files are not there any more. The save may be committed; call again.

    """
    store = checkpoint_in(run, intent)
    version = await store.version(METADATA_KEY)  # first: it is not newer than what is read then
    found = await read_committed(store)
    if intent.operation in found.operations:
        await forget_records(store, intent.operation)
        return Outcome.COMMITTED
    if found.data is not None and (found.may_name_anything or found.operation != intent.replaces):
        return Outcome.REFUSED
    written = await _written(store, intent)
    if written is None:
        return Outcome.WAITING
    listed = await store.list()
    await check_written(store, path, written, listed, intent.operation, encoded=False)
    data = encode_metadata(layout, commit_of(intent, b"".join(each.digest for each in written)))
    if (given_up := await _given_up(run, intent, is_left)) is not None:
        return given_up
    if await store.put_if(METADATA_KEY, data, version) is None:
        return Outcome.WAITING  # somebody else was quicker: the next call finds out who
    with swept(path, intent.operation):
        await _sweep(store, listed, found, intent.operation)
    return Outcome.COMMITTED


async def _given_up(run: Backend, intent: Intent, is_left: Callable[[], bool]) -> Outcome | None:
    """Return the outcome of a save that a later life of the job has not gone on from; None for any other one."""
    if await in_thread(is_left):
        return Outcome.GONE
    return Outcome.LEFT if await has_gone_back(run, intent) else None


async def _written(store: Backend, intent: Intent) -> list[Written] | None:
    """Return what each rank has written; None while a record is missing."""
    messages: dict[int, bytes] = {}
    for info in await records_of(store, intent.operation):
        try:
            drained = Drained.decode(bytes(await get_small(store, info.key)))
        except FileNotFoundError:  # the winner has tidied up
            return None
        messages |= zip(drained.ranks, drained.written, strict=True)
    if {*messages} != {*range(intent.world_size)}:
        return None
    return await in_thread_gc_paused(decode_written, [messages[rank] for rank in range(intent.world_size)])


async def _sweep(store: Backend, listed: Sequence[ObjectInfo], replaced: Committed, operation: str) -> None:
    """Delete the records, and the files of the checkpoint that was replaced."""
    keys = [info.key for info in listed if info.key.count("/") == 1 and operation_of(info.key) in replaced.operations]
    await delete_unnamed(store, keys, by=operation)
    await forget_records(store, operation)
