"""A save that fails takes its files away again, as far as that cannot harm a checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from bcp._job import SaveJob
from bcp._log import log
from bcp._save.root import Root
from bcp.metadata import operation_of, receipt_key
from bcp.protocols import Backend
from bcp.stages.items import WriteItem

__all__ = ["Undo", "undone_on_error"]

CLEAN_UP_SECONDS = 30.0


class Undo:
    """What would have to be removed. Only rank 0 knows whether the metadata may be there already.

    So every other rank cleans up after itself until it has told rank 0 that its part is done, and rank 0 cleans
    up for all until it writes the metadata. What is left then is swept by the next save to the path.
    """

    def __init__(self, rank: int) -> None:
        """Begin with nothing to remove."""
        self._rank = rank
        self._keys: list[str] = []
        self._operation = ""

    def begin(self, operation: str, items: Sequence[WriteItem]) -> None:
        """Note what this rank is about to write."""
        self._operation = operation
        self._keys = [*dict.fromkeys(item.key for item in items), receipt_key(self._rank, operation)]

    def leave_to_rank_0(self) -> None:
        """Note that from here on this rank's files may belong to a checkpoint."""
        if self._rank:
            self._keys = []

    async def keys(self, backend: Backend, *, committing: bool) -> list[str]:
        """Return what is to be removed."""
        if not self._keys or committing:
            return []
        if self._rank:
            return self._keys
        return [info.key for info in await backend.list() if operation_of(info.key) == self._operation]


@asynccontextmanager
async def undone_on_error(job: SaveJob, root: Root) -> AsyncIterator[Undo]:
    """Remove what was written if the save fails or is cancelled; takes some seconds at most, and raises the same."""
    undo = Undo(job.rank)
    try:
        yield undo
    except BaseException:
        with anyio.move_on_after(CLEAN_UP_SECONDS, shield=True):
            try:
                keys = await undo.keys(job.backend, committing=root.committing)
                if keys:
                    await job.backend.delete(keys)
            except Exception as error:  # noqa: BLE001 -- the save's own error is on its way out
                log.warning("files of a failed save were not deleted", path=job.path, error=repr(error))
        raise
