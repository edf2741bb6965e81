"""What the checkpoints of a run refer to, as their commits in storage say: for the job that deletes some of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from bcp._log import log
from bcp.backends.objects.retry import in_turns
from bcp.errors import BcpError, CheckpointError, FormatVersionError, StorageError
from bcp.runs.folder import Folder

__all__ = ["StoredReferences"]


class StoredReferences:
    """The references of a run's checkpoints. Each commit from before is read once in a life.

    The ledger has them, too. But somebody may have put back an older one, which knows nothing of newer checkpoints.
    """

    def __init__(self, folder: Folder) -> None:
        """Take the folder of the run; nothing is read yet."""
        self._folder = folder
        self._found: dict[int, Collection[int]] = {}

    def note(self, step: int, refers: Iterable[int]) -> None:
        """Be told of a checkpoint that this job has committed."""
        self._found[step] = frozenset(refers)

    async def needed(self, leaving: Collection[int], staying: Collection[int]) -> Collection[int]:
        """Return the steps that have to stay, because another one that stays refers to them.

        Args:
            leaving: steps that are to be deleted.
            staying: all others of the run.

        Returns:
            Some of ``leaving``; all of them if a commit cannot be read, which is logged.

        """
        needed, asked = set[int](), set(staying)
        while asked:
            new = sorted(asked.difference(self._found))
            try:
                if new:
                    await self._folder.steps()
                found = await in_turns(partial(self._read, step) for step in new)
            except StorageError as error:
                log.warning("no checkpoint is deleted, for storage does not list the others", error=repr(error))
                return leaving
            for step, refers in zip(new, found, strict=True):
                if refers is None:
                    return leaving
                self._found[step] = refers
            asked = {base for step in asked for base in self._found[step]}.intersection(leaving) - needed
            needed |= asked
        return needed

    async def _read(self, step: int) -> Collection[int] | None:
        """Read the references of a step; None if they are not known. What has damaged metadata cannot be loaded."""
        found = set[int]()
        for name in self._folder.names_of(step):
            try:
                found |= {*(await self._folder.read_commit(name)).refers}
            except BcpError as error:
                if isinstance(error, CheckpointError) and not isinstance(error, FormatVersionError):
                    continue
                log.warning("no checkpoint is deleted, for a commit cannot be read", checkpoint=name, error=repr(error))
                return None
            except FileNotFoundError:
                continue
        return frozenset(found)
