"""Who may delete: the files of a checkpoint go only after a read of the metadata that does not name them.

Every sweep, undo and retention deletes files by :func:`delete_unnamed`, and metadata by :func:`withdraw`.
:func:`may_delete` is the rule. An edit deletes the files that it has emptied by :func:`delete_dropped`, and a move to a
cold place those that it has copied by :func:`delete_copied`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from bcp._log import log
from bcp.backends import child
from bcp.backends.siblings import referring
from bcp.backends.small import get_small
from bcp.errors import CheckpointError, CorruptError, StorageError
from bcp.format.metadata import METADATA_KEY, decode_commit, is_record, operation_of
from bcp.protocols import Backend, RetryPolicy, Sweeper, Unfinished, Version
from bcp.runtime.threads import in_thread_gc_paused

__all__ = [
    "TRIES",
    "Attempt",
    "Committed",
    "delete_copied",
    "delete_dropped",
    "delete_unnamed",
    "may_delete",
    "pause",
    "read_committed",
    "remove_folders",
    "swept",
    "withdraw",
]

TRIES = 5
"""Reads of an answer that contradicts another one, before it is believed."""

BATCH = 1000

_NO_KEY = "nothing"
"""A key that no object has: its deletion removes its directory if that is empty."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The metadata of a path as one read has found them."""

    data: bytes | None = None  # the contents; None for no metadata
    operation: str = ""  # id of the save that they name; empty for none, or for metadata that cannot be decoded
    also: frozenset[str] = frozenset()  # other operations whose files they name, after an edit

    @property
    def may_name_anything(self) -> bool:
        """Whether the metadata are there and cannot be decoded: they may name every file."""
        return self.data is not None and not self.operation

    @property
    def operations(self) -> frozenset[str]:
        """All operations whose files they name."""
        return self.also | {self.operation} if self.operation else self.also


@dataclass(frozen=True, slots=True)
class Attempt:
    """One save's request to commit, as far as the save knows about it."""

    operation: str  # id of the save
    replaces: str = ""  # operation of the metadata that the save found at its beginning; empty for none
    is_sent: bool = False  # the request was made, and may be carried out even after an error
    is_refused: bool = False  # storage has said that the request has changed nothing, and never will
    also: frozenset[str] = frozenset()  # other operations whose files the request commits: a copy of an edited one


def may_delete(operation: str, committed: Committed, attempt: Attempt | None) -> bool:
    """Return whether the files of an operation may go.

    Args:
        operation: the one that wrote the files.
        committed: the metadata, just read. The read may be older than a commit of ``attempt``.
        attempt: the caller's own request to commit; None for a caller that has none.

    """
    if _is_unsent(operation, attempt):
        return True
    if committed.may_name_anything or operation in committed.operations:
        return False
    if attempt is None or not _is_own(operation, attempt):
        return True
    if not committed.operation:
        return False  # the request may still be under way, and find no metadata in its way
    return attempt.is_refused or committed.operation != attempt.replaces


def _is_own(operation: str, attempt: Attempt | None) -> bool:
    """Whether the caller's own request would commit the files."""
    return attempt is not None and operation in {attempt.operation, *attempt.also}


def _is_unsent(operation: str, attempt: Attempt | None) -> bool:
    """Whether the files are the caller's own, and the caller alone could have made a request that commits them."""
    return attempt is not None and operation == attempt.operation and not attempt.is_sent


async def pause(policy: RetryPolicy | None, number: int) -> None:
    """Wait before try ``number``: not before the first one, 0, and longer before each further one."""
    policy = policy or RetryPolicy()
    if number:
        await anyio.sleep(min(policy.first_pause_seconds * 2 ** (number - 1), policy.longest_pause_seconds))


async def read_committed(backend: Backend, policy: RetryPolicy | None = None) -> Committed:
    """Read the metadata. They count as absent if two different requests do not find them.

    Raises StorageError if storage fails, or contradicts itself in every try.
    """
    for number in range(TRIES):
        await pause(policy, number)
        try:
            data = bytes(await get_small(backend, METADATA_KEY))
        except FileNotFoundError:
            if await backend.version(METADATA_KEY) is None:
                return Committed()
            continue
        except CorruptError:  # a file too large for metadata, which nobody can decode either
            return Committed(b"")
        try:
            commit = await in_thread_gc_paused(decode_commit, data, METADATA_KEY)
        except CheckpointError:
            return Committed(data)
        return Committed(data, commit.operation, frozenset(commit.writers))
    raise StorageError(f"{backend!r} has {METADATA_KEY} and does not find it, {TRIES} times; nothing was deleted")


async def delete_unnamed(
    backend: Backend,
    keys: Iterable[str],
    attempt: Attempt | None = None,
    *,
    by: str = "",
    unfinished: Sequence[Unfinished] = (),
    policy: RetryPolicy | None = None,
    beside: Backend | None = None,
    is_needed: bool | None = None,
) -> Sequence[str]:
    """Delete files that no committed metadata name; return the keys of the files that stay.

    Metadata themselves always stay. Files that metadata never name, as recordings and records, need no read. Files in
    the folder of a step also stay if the metadata of another step of the run refer to it.

    Args:
        backend: over the root of the keys.
        keys: the files; those of roles and of steps have the folder of their metadata before them.
        attempt: the caller's own request to commit.
        by: id of a save that has committed; nothing goes unless the metadata at the root name it.
        unfinished: writes to discard as well. Metadata name finished files only.
        policy: how long a contradiction of storage is asked about.
        beside: view of the root that knows what is beside it; None for ``backend``.
        is_needed: whether other steps refer to this one, if the caller knows.

    Raises:
        StorageError: storage failed; the files stay, or some of them.

    """
    places: dict[str, Committed] = {}
    needed: dict[str, bool] = {}
    if by:
        places[""] = await read_committed(backend, policy)
        if places[""].operation != by:
            return list(keys)
    free: list[str] = []
    kept: list[str] = []
    for key in keys:
        operation = None if is_record(key) else operation_of(key)
        place = "/".join(key.split("/")[:-2])
        if operation is not None and not _is_unsent(operation, attempt) and place not in places:
            places[place] = await read_committed(child(backend, place) if place else backend, policy)
        is_metadata = key.rpartition("/")[2] == METADATA_KEY
        is_free = operation is None or may_delete(operation, places.get(place, Committed()), attempt)
        if is_free and operation is not None and is_needed is not False and not _is_own(operation, attempt):
            if place not in needed:
                root = beside if beside is not None and not place else backend
                needed[place] = bool(await referring(child(root, place) if place else root))
            is_free = not needed[place]
        (free if is_free and not is_metadata else kept).append(key)
    if kept:
        log.info("files stay, because a checkpoint may need them", storage=repr(backend), count=len(kept))
    if unfinished and isinstance(backend, Sweeper):
        await backend.discard(unfinished)
    for first in range(0, len(free), BATCH):
        await backend.delete(free[first : first + BATCH])
    return kept


async def delete_dropped(
    backend: Backend, keys: Sequence[str], *, by: str, policy: RetryPolicy | None = None
) -> Sequence[str]:
    """Delete data files that an edit has left without any tensor or object; return the keys that went.

    The names of these files belong to operations of the checkpoint, whose metadata do not list them any more. Nothing
    goes unless the metadata are those of the edit, and none if another step of the run refers to this one.

    Args:
        backend: over the root of the keys.
        keys: the files that the metadata of the edit do not list.
        by: id of the edit.
        policy: how long a contradiction of storage is asked about.

    Raises:
        StorageError: storage failed; the files stay, or some of them.

    """
    if not keys or (await read_committed(backend, policy)).operation != by or await referring(backend):
        return ()
    for first in range(0, len(keys), BATCH):
        await backend.delete(keys[first : first + BATCH])
    return keys


async def delete_copied(backend: Backend, keys: Sequence[str], version: Version) -> bool:
    """Delete data files of a committed checkpoint; return whether its metadata have this version before and after.

    The caller has compared every block of another copy with its checksum, and readers of the path find that copy. If
    the metadata have another version before, nothing is deleted.

    Args:
        backend: over the checkpoint.
        keys: of the data files.
        version: of the metadata that name the files.

    Raises:
        StorageError: storage failed; the files stay, or some of them.

    """
    if await backend.version(METADATA_KEY) != version:
        return False
    for first in range(0, len(keys), BATCH):
        await backend.delete(keys[first : first + BATCH])
    return await backend.version(METADATA_KEY) == version


@contextmanager
def swept(path: str, operation: str) -> Iterator[None]:
    """Log a failure of a deletion after a commit: whatever it is, the checkpoint is committed.

    Args:
        path: of the checkpoint.
        operation: that has committed.

    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 -- see above
        log.warning("old files were not deleted", path=path, operation=operation, error=repr(error))


async def remove_folders(backend: Backend, folders: Iterable[str]) -> None:
    """Remove empty directories, where storage has any; those with files stay.

    Args:
        backend: the storage.
        folders: without a slash at their ends; those below a folder come before it.

    Raises:
        StorageError: storage failed.

    """
    await backend.delete([f"{folder}/{_NO_KEY}" for folder in folders])


async def withdraw(backend: Backend, versions: Mapping[str, Version | None]) -> bool:
    """Delete metadata that still have these versions, all of them or none; return whether none of others is there.

    A commit between the read and the deletion is lost. So a run calls this only while its ledger is this job's, and a
    save only for metadata of its own. :func:`bcp.tools.remove` refuses a path with files of another save.

    Args:
        backend: the storage.
        versions: by key; None for metadata of any version, as those of roles in a run's folder, which no ledger has.

    Raises:
        StorageError: storage failed.

    """
    now = {key: await backend.version(key) for key, version in versions.items() if version is not None}
    if any(version not in (None, versions[key]) for key, version in now.items()):
        return False
    if keys := [key for key in versions if now.get(key, "") is not None]:
        await backend.delete(keys)
    return True
