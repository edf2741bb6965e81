"""Find and delete the remains of saves and edits: files that no metadata name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bcp._deletion import Committed, delete_dropped, delete_unnamed, read_committed
from bcp._text import shown
from bcp.backends import child
from bcp.backends.place import Path, place_of
from bcp.errors import CheckpointError, InputError, NotACheckpointError
from bcp.format.metadata import METADATA_KEY, decode_metadata, operation_of
from bcp.plan.layout import named_files
from bcp.protocols import Backend, ObjectInfo, Sweeper, Unfinished
from bcp.runtime.threads import in_thread_gc_paused
from bcp.tools.calls import called

__all__ = ["DAY_SECONDS", "Remains", "acollect", "collect"]

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Remains:
    """The files that one save has left without a commit, as :func:`bcp.tools.collect` returns them.

    Attributes:
        place: folder of the save, relative to the path; "" for the path itself.
        operation: id of the save.
        files: number of its files, unfinished ones included.
        nbytes: bytes of the finished files.
        age_seconds: time since the last write of a finished file; None where storage does not tell it.
        is_old: whether their age lets them go.
        deleted: whether the files were deleted.
    """

    place: str
    operation: str
    files: int
    nbytes: int
    age_seconds: float | None
    is_old: bool
    deleted: bool


@dataclass(slots=True)
class _Save:
    """The files of one save, or those that an edit has emptied and not deleted.

    Attributes:
        finished: its files.
        unfinished: its files that nobody has finished.
        edit: id of the edit whose metadata have the operation of the files, and do not list them; "" for none.
    """

    finished: list[ObjectInfo] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    edit: str = ""

    def age(self, now: float) -> float | None:
        """Return seconds since the last write; None if a time is unknown."""
        times = [info.modified for info in self.finished]
        known = [when for when in times if when is not None]
        return now - max(known) if known and len(known) == len(times) else None


def collect(
    path: Path,
    *,
    min_age_seconds: float = DAY_SECONDS,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Remains]:
    """Delete the remains of saves that never committed, of a run or of one checkpoint.

    A killed save leaves its files until the next save to the same path. Nothing else deletes the remains of a run that
    has ended. Files of a committed checkpoint always stay, and so do files that bcp has not written. An edit that is
    killed after its commit leaves files in which nothing is left: these go, too.

    A save that runs looks like remains. Only its age tells the difference: it has to write a file within
    ``min_age_seconds``.

    Args:
        path: the folder or URL of a run, or of a checkpoint. All of it is listed.
        min_age_seconds: leave the remains whose last file is younger, or whose age is unknown. With 0 all remains go:
            pass it only if no job saves there.
        dry_run: delete nothing.
        storage_options: for the file system of a URL.

    Returns:
        The remains that were found, in the order of their places.

    Raises:
        InputError: ``min_age_seconds`` is negative, or the path cannot be any.
        NotACheckpointError: there are no files at the path.
        StorageError: storage failed, and nothing or some of the remains were deleted.

    Example:
        >>> bcp.tools.collect("ckpt", dry_run=True)
        []

    """
    return called(
        lambda: acollect(path, min_age_seconds=min_age_seconds, dry_run=dry_run, storage_options=storage_options),
        f"clean up {shown(str(path))}",
    )


async def acollect(
    path: Path,
    *,
    min_age_seconds: float = DAY_SECONDS,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Remains]:
    """Do the same as :func:`collect` from a coroutine."""
    if isinstance(min_age_seconds, bool) or not isinstance(min_age_seconds, int | float) or not min_age_seconds >= 0:
        raise InputError(f"min_age_seconds={min_age_seconds!r} has to be a number of seconds, 0 or more")
    place = place_of(path, None, storage_options, cold="run")
    async with place.opened:
        found: list[Remains] = []
        for (folder, operation), save in sorted((await _uncommitted(place.backend, place.path)).items()):
            age = save.age(time.time())
            is_old = min_age_seconds == 0 or (age is not None and age >= min_age_seconds)
            keys = [info.key for info in save.finished]
            deleted = is_old and not dry_run
            if deleted and save.edit:
                below = _below(place.backend, folder)
                dropped = [key.removeprefix(f"{folder}/") for key in keys]
                deleted = bool(await delete_dropped(below, dropped, by=save.edit))
            elif deleted:
                kept = await delete_unnamed(place.backend, keys, unfinished=save.unfinished)
                deleted = not kept  # somebody has committed them meanwhile
            nbytes = sum(info.nbytes for info in save.finished)
            found.append(Remains(folder, operation, len(keys) + len(save.unfinished), nbytes, age, is_old, deleted))
    return found


async def _uncommitted(backend: Backend, path: str) -> Mapping[tuple[str, str], _Save]:
    """Return the files of saves that no metadata name, by folder and operation."""
    listed = await backend.list()
    unfinished: Sequence[Unfinished] = await backend.unfinished() if isinstance(backend, Sweeper) else ()
    if not listed and not unfinished:
        raise NotACheckpointError(f"there is nothing at {path}: check the path")
    saves: dict[tuple[str, str], _Save] = {}
    for info in listed:
        if operation := operation_of(info.key):
            saves.setdefault((_folder(info.key), operation), _Save()).finished.append(info)
    for write in unfinished:
        if operation := operation_of(write.key):
            saves.setdefault((_folder(write.key), operation), _Save()).unfinished.append(write)
    with_metadata = {info.key.rpartition("/")[0] for info in listed if info.key.rpartition("/")[2] == METADATA_KEY}
    by_folder: dict[str, Committed] = {}
    for folder in {folder for folder, _ in saves} & with_metadata:
        by_folder[folder] = await read_committed(_below(backend, folder))
    remains = {key: save for key, save in saves.items() if not _may_name(by_folder.get(key[0]), key[1])}
    for (folder, operation), save in saves.items():
        committed = by_folder.get(folder)
        if committed is not None and operation in committed.also:
            named = await in_thread_gc_paused(_named, committed, folder)
            if empty := [info for info in save.finished if named is not None and info.key not in named]:
                remains[folder, operation] = _Save(empty, edit=committed.operation)
    return remains


def _named(committed: Committed, folder: str) -> set[str] | None:
    """Return the keys of all files that the metadata of an edit name; None if they cannot be decoded."""
    try:
        metadata = decode_metadata(committed.data or b"", METADATA_KEY)
    except CheckpointError:
        return None
    commit = metadata.commit
    keys = [commit.data_key(kind, rank) for rank, kind in named_files(metadata.layout)]
    keys += map(commit.receipt_key, range(len(commit.writers)))
    return {f"{folder}/{key}" if folder else key for key in keys}


def _below(backend: Backend, folder: str) -> Backend:
    return child(backend, folder) if folder else backend


def _may_name(committed: Committed | None, operation: str) -> bool:
    """Whether the metadata of a folder, None if it has none, may name the files of a save."""
    return committed is not None and (committed.may_name_anything or operation in committed.operations)


def _folder(key: str) -> str:
    """Return the folder of the save that has written a file."""
    return "/".join(key.split("/")[:-2])
