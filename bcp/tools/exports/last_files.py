"""The small files that end an export: indexes, and the files beside weights."""

from __future__ import annotations

from collections.abc import Sequence

from bcp.backends.small import get_small
from bcp.protocols import Backend, Buffer

__all__ = ["LastFiles", "SmallFiles", "no_files"]

SmallFiles = Sequence[tuple[str, bytes]]
"""Names and contents of files."""


async def no_files() -> SmallFiles:
    """Return no files."""
    return ()


class LastFiles:
    """Small files that rank 0 writes at the end. Until all of them are there, the older ones can come back.

    Attributes:
        are_there: whether this rank has written all of them.
    """

    def __init__(self, backend: Backend, files: SmallFiles, *, may_replace: bool) -> None:
        """Note the files; nothing is written yet.

        Args:
            backend: the folder.
            files: the files; none on ranks that do not write them.
            may_replace: whether there may be older files under these names.

        """
        self.are_there = False
        self._backend, self._files, self._may_replace = backend, files, may_replace
        self._older: dict[str, Buffer | None] = {}  # of each file whose write has begun

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files, in order."""
        return tuple(name for name, _ in self._files)

    async def write(self) -> None:
        """Write the files in order."""
        for name, data in self._files:
            self._older[name] = await self._find(name) if self._may_replace else None
            await self._backend.put(name, data)
        self.are_there = True

    async def undo(self) -> None:
        """Delete the files that were written, and put back the older ones."""
        await self._backend.delete([name for name, older in self._older.items() if older is None])
        for name, older in self._older.items():
            if older is not None:
                await self._backend.put(name, older)

    async def _find(self, name: str) -> Buffer | None:
        """Return the contents of an older file; None if there is none."""
        try:
            return await get_small(self._backend, name)
        except FileNotFoundError:
            return None
