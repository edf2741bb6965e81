"""Failures of a save: the true reason, and the removal of its files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from bcp._job import SaveJob
from bcp._log import log
from bcp.errors import BcpError, CheckpointError, ExistsError, StorageError
from bcp.format.metadata import METADATA_KEY, decode_metadata, operation_of, receipt_key
from bcp.protocols import Backend, Version
from bcp.runtime.threads import in_thread_gc_paused
from bcp.stages.items import WriteItem

__all__ = ["CleanUp", "check_not_replaced", "not_replaced", "taken", "undone_on_error"]


@asynccontextmanager
async def not_replaced(backend: Backend, path: str, operation: str, old_version: Version | None) -> AsyncIterator[None]:
    """Raise ExistsError in place of a storage error if another job has committed meanwhile.

    A commit deletes the files of older saves, so writes of a save that cannot commit any more may fail in any way.
    """
    try:
        yield
    except StorageError as error:
        await check_not_replaced(backend, path, operation, old_version, error)
        raise


async def check_not_replaced(
    backend: Backend, path: str, operation: str, old_version: Version | None, error: StorageError
) -> None:
    """Raise ExistsError because of ``error`` if the metadata is not the one that this save found."""
    try:
        now = await backend.version(METADATA_KEY)
    except BcpError:  # storage does not answer at all; the first error says why
        return
    if now not in (old_version, None):
        raise await taken(backend, path, operation, old_version) from error


async def taken(
    backend: Backend, path: str, operation: str, old_version: Version | None
) -> CheckpointError | StorageError:
    """Return the error of a save whose place another job has taken."""
    advice = "this save was not committed. Give every job a path of its own, or save again with overwrite=True"
    try:
        data = await backend.get(METADATA_KEY)
    except FileNotFoundError:
        return StorageError(
            f"{path}: the checkpoint that operation {operation} was to replace was deleted or moved away meanwhile; "
            "this save was not committed. Save again"
        )
    if await backend.version(METADATA_KEY) == old_version:
        return ExistsError(f"another job is committing a checkpoint at {path}, as is operation {operation}; {advice}")
    try:
        winner = f"operation {(await in_thread_gc_paused(decode_metadata, data, path)).commit.operation}"
    except CheckpointError:
        winner = "an operation with metadata that cannot be read"
    return ExistsError(
        f"another job committed a checkpoint at {path}, {winner}, while operation {operation} was saving there; "
        f"{advice}"
    )


CLEAN_UP_SECONDS = 30.0


class CleanUp:
    """The files that a failed save removes. Only rank 0 knows whether the metadata may be there already.

    So every other rank cleans up after itself until it has told rank 0 that its part is done. Rank 0 cleans up for all
    until it writes the metadata. The next save to the path sweeps the files that are left then.
    """

    def __init__(self, rank: int) -> None:
        self.committing = False  # the metadata may have been written; false again if another job's was there first
        self._rank = rank
        self._keys: list[str] = []
        self._operation = ""

    def begin(self, operation: str, items: Sequence[WriteItem]) -> None:
        """Note the files that this rank is about to write."""
        self._operation = operation
        self._keys = [*dict.fromkeys(item.key for item in items), receipt_key(self._rank, operation)]

    def leave_to_rank_0(self) -> None:
        """Note that from here on this rank's files may belong to a checkpoint."""
        if self._rank:
            self._keys = []

    async def keys(self, backend: Backend) -> list[str]:
        """Return the files to remove."""
        if not self._keys or self.committing:
            return []
        if self._rank:
            return self._keys
        return [info.key for info in await backend.list() if operation_of(info.key) == self._operation]


@asynccontextmanager
async def undone_on_error(job: SaveJob) -> AsyncIterator[CleanUp]:
    """Remove the written files if the save fails or is cancelled, within some seconds; then raise the same error."""
    undo = CleanUp(job.rank)
    try:
        yield undo
    except BaseException:
        with anyio.move_on_after(CLEAN_UP_SECONDS, shield=True):
            try:
                keys = await undo.keys(job.backend)
                if keys:
                    await job.backend.delete(keys)
            except Exception as error:  # noqa: BLE001 -- the save's own error is on its way out
                log.warning("files of a failed save were not deleted", path=job.path, error=repr(error))
        raise
