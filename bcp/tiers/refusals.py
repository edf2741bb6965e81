"""The refusals of a backend that only reads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bcp.errors import InputError
from bcp.protocols import Buffer, ObjectInfo, PartWriter, Version

__all__ = ["ReadOnly"]


class ReadOnly:
    """Methods of a :class:`~bcp.protocols.Backend` over marked files, which nobody changes.

    Raises:
        InputError: from each of them, unless a subclass does better.

    """

    async def version(self, key: str) -> Version | None:
        """Refuse."""
        raise self._refused(key)

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """Refuse: hosts tell what they hold when they look for a snapshot."""
        raise self._refused(prefix)

    async def put(self, key: str, data: Buffer) -> None:
        """Refuse."""
        del data
        raise self._refused(key)

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        """Refuse."""
        del data, expected
        raise self._refused(key)

    @asynccontextmanager
    async def open_write(self, key: str, nbytes: int | None = None) -> AsyncIterator[PartWriter]:
        """Refuse."""
        del nbytes
        raise self._refused(key)
        yield  # it is a generator

    async def delete(self, keys: Sequence[str]) -> None:
        """Refuse."""
        raise self._refused(", ".join(keys))

    async def aclose(self) -> None:
        """Close nothing."""

    def _refused(self, key: str) -> InputError:
        return InputError(f"{self!r} is for reads of files alone, and was asked to change or list {key!r}")
