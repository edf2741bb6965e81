"""The table of contents of a checkpoint of bcp or of another library, or what is at the path instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from bcp.backends.small import get_small
from bcp.errors import CorruptError, NotACheckpointError, UncommittedError
from bcp.format.foreign_files import is_foreign
from bcp.format.metadata import METADATA_KEY, is_over_foreign, operation_of, stored_files
from bcp.interop.recognise import foreign_metadata
from bcp.protocols import Backend
from bcp.read.foreign import foreign_words
from bcp.runtime.threads import in_thread_gc_paused
from bcp.telemetry.store import FOLDER as TELEMETRY

__all__ = ["read_metadata"]

SHOWN = 10  # names in an error message
STEP = re.compile(r"\d$|^(latest|last|best|final)$")
"""Names of checkpoints of a run: ``step-1000``, ``100``, ``latest``. Others may be roles: ``actor``."""


async def read_metadata(backend: Backend, path: str) -> bytes:
    """Read ``metadata.arrow``, or make the table of contents of files of another library.

    An imported table of contents stands over files that anybody may change. One listing compares their sizes.

    ``path`` names the checkpoint in messages.

    Raises:
        UncommittedError: the files of a save lie there, and no metadata.
        NotACheckpointError: there is none; the message says what is there instead, and what to do with it.
        CorruptError: files of another library are damaged, name files outside of their folder, or were changed since
            they were imported.
        CheckpointError: files of another library have what bcp does not read.
        StorageError: storage failed.

    """
    try:
        data = bytes(await get_small(backend, METADATA_KEY))
    except FileNotFoundError:
        infos = await backend.list()
    else:
        if is_foreign(data):
            raise NotACheckpointError(f"{path}/{METADATA_KEY} was not written by a save of bcp; check the path")
        if is_over_foreign(data):
            await _check_unchanged(backend, path, data)
        return data
    keys = [info.key for info in infos]
    below = {key.removesuffix("/" + METADATA_KEY) for key in keys if key.endswith("/" + METADATA_KEY)}
    if below:
        raise NotACheckpointError(f"{path} holds {_below(path, below)}")
    saved = [key for key in keys if not key.startswith(TELEMETRY)]
    if any(operation_of(key) for key in saved):
        raise UncommittedError(
            f"{path} holds data of a save that never committed ({len(saved)} files, no {METADATA_KEY}): the job died "
            "or is still saving; load an older checkpoint"
        )
    found = await foreign_metadata(backend, path, infos)
    if found is not None:
        return found
    words = await foreign_words(backend, path, saved)
    has = f"it has no {METADATA_KEY}" if infos else "there are no files"
    raise NotACheckpointError(words or f"{path} is not a checkpoint: {has}; check the path")


async def _check_unchanged(backend: Backend, path: str, data: bytes) -> None:
    """Compare the files that imported metadata name with those of the folder. Links are no files.

    Raises:
        CorruptError: the metadata are damaged, or a file is missing or has another size.
        StorageError: storage failed.

    """
    files = await in_thread_gc_paused(stored_files, data, f"{path}/{METADATA_KEY}")
    if files is None:
        return
    sizes = {info.key: info.nbytes for info in await backend.list()}
    for key, nbytes in zip(files.key, files.nbytes.tolist(), strict=True):
        if sizes.get(key) != nbytes:
            now = f"has {sizes[key]} bytes" if key in sizes else "is missing or a link"
            raise CorruptError(
                f"{path}/{key} {now}, and had {nbytes} bytes when {METADATA_KEY} was made: it was changed since it was "
                "imported; put it back, or import the folder again with overwrite=True (--overwrite)"
            )


def _below(path: str, names: Collection[str]) -> str:
    """Say which checkpoints lie below a path, and how to load one: steps of a run are not taken for roles."""
    checkpoints = {name.partition("/")[0] for name in names}
    ordered = sorted(checkpoints, key=lambda name: [(len(run), run) for run in re.split(r"(?<=\D)(?=\d)", name)])
    if any("/" in name or STEP.search(name) for name in names):
        return f"checkpoints {_first(ordered)}; pass one of them, as in {path}/{ordered[-1]}"
    return f"no checkpoint of its own, but roles below it: {_first(ordered)}; pass role=..."


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
