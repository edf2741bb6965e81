"""The uploads of a run by agents, as its storage shows them: their ends, and the branch that they have to be of."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import anyio

from bcp._log import log
from bcp.errors import CheckpointError, StorageError
from bcp.runs.folder import Folder
from bcp.tiers.intent import branch_words

__all__ = ["Uploads"]

LOOK_SECONDS = 2.0
"""Between two looks at storage for a save that agents make durable."""


class Uploads:
    """What rank 0 asks and tells storage about saves that agents make durable."""

    def __init__(self, folder: Folder) -> None:
        """Remember the run's folder; nothing is read yet."""
        self._folder = folder

    async def branch(self) -> str | None:
        """Return the branch of the run as storage has it: snapshots in memory of another one count for nothing.

        None if there is no ledger that can be read.

        Raises:
            FormatVersionError: a newer bcp has written the ledger.
            StorageError: storage failed.

        """
        ledger = self._folder.ledger or await self._folder.peek()
        return None if ledger is None else branch_words(ledger.run_id, ledger.branch)

    async def end(self, uploads: Collection[tuple[str, str]]) -> None:
        """End uploads of earlier lives of the job, which nobody goes on from.

        Args:
            uploads: the folder of each, and its operation.

        """
        if uploads:
            log.info("snapshots in memory are given up", folders=sorted({name for name, _ in uploads}))
        try:
            for name, operation in sorted(uploads):
                await self._folder.end_uploads(name, operation)
        except StorageError as error:
            log.warning("uploads that are given up may still be committed, for storage failed: %s", error)

    async def ended(self, name: str, operation: str) -> bool:
        """Wait until a save is committed, however long that takes; False if another one is in its place.

        Raises:
            CorruptError: the metadata there are damaged.

        """
        while True:
            with suppress(StorageError, FileNotFoundError):
                return (await self._folder.read_commit(name)).operation == operation
            await anyio.sleep(LOOK_SECONDS)

    async def can_replace(self, step: int) -> bool:
        """Whether agents could replace the checkpoints of a step: they do so only if they can read them."""
        for name in self._folder.names_of(step):
            try:
                await self._folder.read_commit(name)
            except FileNotFoundError:
                continue
            except (CheckpointError, StorageError):
                return False
        return True
