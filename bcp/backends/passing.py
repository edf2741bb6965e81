"""A view of a backend that passes all calls on. Views that change some of them begin with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from bcp.backends.scattered import read_scattered
from bcp.protocols import (
    Backend,
    Buffer,
    ObjectInfo,
    PartWriter,
    Sweeper,
    Unfinished,
    Version,
    at_once_of,
    folders_of,
    retries_of,
)

__all__ = ["PassingBackend"]


class PassingBackend:
    """The same storage under the same keys.

    Attributes:
        whole: the backend that does the work.
    """

    def __init__(self, whole: Backend) -> None:
        self.whole = whole

    def __repr__(self) -> str:
        return repr(self.whole)

    @property
    def retry_count(self) -> int:
        """How many requests the backend has made again."""
        return retries_of(self.whole)

    @property
    def at_once(self) -> int:
        """How many parts or reads the backend likes to have under way."""
        return at_once_of(self.whole)

    async def put(self, key: str, data: Buffer) -> None:
        """Store a small object."""
        await self.whole.put(key, data)

    async def version(self, key: str) -> Version | None:
        """Return the version of an object."""
        return await self.whole.version(key)

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        """Store a small object if it is still the one that was found."""
        return await self.whole.put_if(key, data, expected)

    def open_write(self, key: str, nbytes: int | None = None) -> AbstractAsyncContextManager[PartWriter]:
        """Write a large object in parts."""
        return self.whole.open_write(key, nbytes)

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from the object's bytes."""
        await self.read_scattered(key, start, [out])

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill the buffers by one read."""
        await read_scattered(self.whole, key, start, outs)

    async def get(self, key: str) -> Buffer:
        """Read a small object whole."""
        return await self.whole.get(key)

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List objects."""
        return await self.whole.list(prefix)

    async def folders(self, prefix: str = "") -> Sequence[str]:
        """List folders."""
        return await folders_of(self.whole, prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        await self.whole.delete(keys)

    async def unfinished(self) -> Sequence[Unfinished]:
        """List the unfinished writes, if the backend can."""
        return await self.whole.unfinished() if isinstance(self.whole, Sweeper) else []

    async def discard(self, unfinished: Sequence[Unfinished]) -> None:
        """Remove unfinished writes."""
        if isinstance(self.whole, Sweeper):
            await self.whole.discard(unfinished)

    async def is_sealed(self, key: str) -> bool:
        """Whether nobody may write to an object, if the backend knows."""
        is_sealed = getattr(self.whole, "is_sealed", None)
        return is_sealed is not None and bool(await is_sealed(key))

    async def aclose(self) -> None:
        """Close the backend."""
        await self.whole.aclose()
