"""Failures of a save: the true reason, and the removal of its files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from bcp._deletion import Attempt, Committed, delete_unnamed, may_delete, read_committed, withdraw
from bcp._job import SaveJob
from bcp._log import log
from bcp.errors import BcpError, ExistsError, StorageError
from bcp.format.metadata import METADATA_KEY, operation_of, receipt_key
from bcp.protocols import Backend, Version
from bcp.stages.items import WriteItem

__all__ = ["CleanUp", "check_not_replaced", "not_replaced", "put_back", "undone_on_error"]


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
    if now in (old_version, None):
        return
    committed = await read_committed(backend)
    if committed.data is not None:
        raise replaced(path, operation, committed) from error


_ADVICE = "Give every job a path of its own, or save again with overwrite=True"


def replaced(path: str, operation: str, committed: Committed) -> ExistsError:
    """Return the error of a save whose place another one has taken.

    It does not say that this save was not committed: storage may have carried out a request that it then refused, and
    the other save may have replaced this one.
    """
    winner = "an operation with metadata that cannot be read" if not committed.operation else committed.operation
    return ExistsError(
        f"another job committed a checkpoint at {path}, {'operation ' if committed.operation else ''}{winner}, while "
        f"operation {operation} was saving there. The checkpoint there is that job's, and not of this save. {_ADVICE}"
    )


async def put_back(backend: Backend, old: Committed, version: Version) -> bool:
    """Take back a commit whose files are gone; return whether another save has replaced it already.

    ``version`` is that of the commit, and ``old`` the metadata before it. Metadata that were too large to be read are
    gone already, so that none come back.
    """
    if not old.data:
        return not await withdraw(backend, {METADATA_KEY: version})
    if await backend.put_if(METADATA_KEY, old.data, version) is not None:
        return False
    return await backend.version(METADATA_KEY) is not None


CLEAN_UP_SECONDS = 30.0


class CleanUp:
    """The files that a failed save removes, and its knowledge of who has committed.

    Only rank 0 requests the commit. Every other rank cleans up after itself until it has told rank 0 that its part is
    done. From then on rank 0 cleans up for all: until it requests the commit, and again if another save has won. The
    files of a commit whose outcome is not known stay. The next save to the path sweeps them.
    """

    def __init__(self, job: SaveJob) -> None:
        # not the job, which leads to tensors: the frames of an error's traceback keep this until the next collection
        self._rank, self._path, self._backend, self._policy = job.rank, job.path, job.backend, job.options.retries
        self._keys: list[str] = []
        self._attempt = Attempt("")
        self._is_lost = False

    def begin(self, operation: str, items: Sequence[WriteItem]) -> None:
        """Note the files that this rank is about to write."""
        self._attempt = Attempt(operation)
        self._keys = [*dict.fromkeys(item.key for item in items), receipt_key(self._rank, operation)]

    def leave_to_rank_0(self) -> None:
        """Note that from here on this rank's files may belong to a checkpoint."""
        if self._rank:
            self._keys = []

    def send(self, replaces: str) -> None:
        """Note that the commit is requested now; ``replaces`` is the operation that it is to replace."""
        self._attempt = replace(self._attempt, replaces=replaces, is_sent=True)

    async def settle(self, backend: Backend, old_version: Version | None, error: Exception | None = None) -> Version:
        """Find out by reading who has committed.

        Args:
            backend: the storage.
            old_version: of the metadata that this save found.
            error: failure of the request to commit; None if storage has refused it.

        Returns:
            The version of this save's own metadata, which are committed. It may be an older one.

        Raises:
            ExistsError: another save has committed.
            StorageError: nobody can know yet; nothing will be deleted.

        """
        operation, path = self._attempt.operation, self._path
        try:
            version = await backend.version(METADATA_KEY)  # first: it is not newer than what is read then
            committed = await read_committed(backend, self._policy)
        except (BcpError, OSError) as unread:
            raise self._unknown(f"then {unread}", error) from error or unread
        if committed.operation == operation:
            return version or ""
        self._attempt = replace(self._attempt, is_refused=error is None)
        self._is_lost = may_delete(operation, committed, self._attempt)
        if committed.operation and committed.operation != self._attempt.replaces:
            raise replaced(path, operation, committed) from error
        if error is not None:
            seen = "the metadata from before this save" if committed.data is not None else "no metadata"
            raise self._unknown(f"storage shows {seen} now", error) from error
        if committed.data is None:
            raise StorageError(
                f"{path}: the checkpoint that operation {operation} was to replace was deleted or moved away "
                "meanwhile: storage shows no metadata there now. Save again"
            )
        if version != old_version:
            raise replaced(path, operation, committed)
        raise ExistsError(
            f"another job is committing a checkpoint at {path}, as is operation {operation}; this save was not "
            f"committed. {_ADVICE}"
        )

    def _unknown(self, seen: str, error: Exception | None) -> StorageError:
        """Return the error of a save that may be committed."""
        made = StorageError(
            f"{self._path}: the commit of operation {self._attempt.operation} has no known outcome: "
            f"{error or 'storage refused it'}; {seen}. The checkpoint may be committed, now or later. No file was "
            "deleted. Load it, or save again"
        )
        made.errno = error.errno if isinstance(error, OSError) else None
        return made

    async def remove(self) -> None:
        """Delete the files that no checkpoint can have."""
        backend, keys = self._backend, self._keys
        if not keys or (self._attempt.is_sent and not self._is_lost):
            return
        if not self._rank:
            listed = await backend.list()
            keys = [info.key for info in listed if operation_of(info.key) == self._attempt.operation]
        await delete_unnamed(backend, keys, self._attempt)


@asynccontextmanager
async def undone_on_error(job: SaveJob) -> AsyncIterator[CleanUp]:
    """Remove the written files if the save fails or is cancelled, within some seconds; then raise the same error."""
    undo = CleanUp(job)
    try:
        yield undo
    except BaseException:
        with anyio.move_on_after(CLEAN_UP_SECONDS, shield=True):
            try:
                await undo.remove()
            except Exception as error:  # noqa: BLE001 -- the save's own error is on its way out
                log.warning("files of a failed save were not deleted", path=job.path, error=repr(error))
        raise
