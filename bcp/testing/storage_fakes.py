"""Backends for tests: one that counts, and one that fails or calls back where it is told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from bcp.errors import InputError
from bcp.protocols import (
    Backend,
    Buffer,
    ObjectInfo,
    PartWriter,
    ScatterReader,
    Sweeper,
    Unfinished,
    Version,
    folders_of,
)

__all__ = ["OPERATIONS", "CountingBackend", "FaultyBackend"]

OPERATIONS = (
    "put",
    "version",
    "put_if",
    "open_write",
    "write_part",
    "commit",
    "read_into",
    "read_scattered",
    "get",
    "list",
    "folders",
    "delete",
    "unfinished",
    "discard",
)
"""Operations that can be counted and made to fail; ``commit`` is the good end of an ``open_write`` context."""


class CountingBackend:
    """Passes everything on, and counts.

    Attributes:
        inner: the backend that does the work.
        calls: how often each of :data:`OPERATIONS` began.
        read: bytes read, by key; only of calls that succeeded.
        written: bytes written, by key; of every part that succeeded, whether the object appeared or not.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    async def before(self, operation: str, key: str) -> None:
        """Hook before every operation; its error is raised by the operation."""
        del key
        self.calls[operation] += 1

    async def put(self, key: str, data: Buffer) -> None:
        """Store a small object."""
        await self.before("put", key)
        await self.inner.put(key, data)
        self.written[key] += memoryview(data).nbytes

    async def version(self, key: str) -> Version | None:
        """Return the version of an object."""
        await self.before("version", key)
        return await self.inner.version(key)

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        """Store a small object if it is still the one that was found."""
        await self.before("put_if", key)
        version = await self.inner.put_if(key, data, expected)
        self.written[key] += memoryview(data).nbytes if version is not None else 0
        return version

    @asynccontextmanager
    async def open_write(self, key: str, nbytes: int | None = None) -> AsyncIterator[PartWriter]:
        """Write a large object in parts."""
        await self.before("open_write", key)
        async with self.inner.open_write(key, nbytes) as parts:
            yield _CountingParts(self, key, parts)
            await self.before("commit", key)

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from the object's bytes."""
        await self.before("read_into", key)
        await self.inner.read_into(key, start, out)
        self.read[key] += out.nbytes

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill many buffers with one read where the inner backend can, and else one after the other."""
        await self.before("read_scattered", key)
        if isinstance(self.inner, ScatterReader):
            await self.inner.read_scattered(key, start, outs)
        else:
            for out in outs:
                await self.inner.read_into(key, start, out)
                start += out.nbytes
        self.read[key] += sum(out.nbytes for out in outs)

    async def get(self, key: str) -> Buffer:
        """Read a small object whole."""
        await self.before("get", key)
        data = await self.inner.get(key)
        self.read[key] += memoryview(data).nbytes
        return data

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List objects."""
        await self.before("list", prefix)
        return await self.inner.list(prefix)

    async def folders(self, prefix: str = "") -> Sequence[str]:
        """List folders, by a list of all objects if the inner backend cannot do better."""
        await self.before("folders", prefix)
        return await folders_of(self.inner, prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; counts as one call, with the keys joined by blanks."""
        await self.before("delete", " ".join(keys))
        await self.inner.delete(keys)

    async def unfinished(self) -> Sequence[Unfinished]:
        """List unfinished writes, if the inner backend can."""
        await self.before("unfinished", "")
        return await self.inner.unfinished() if isinstance(self.inner, Sweeper) else []

    async def discard(self, unfinished: Sequence[Unfinished]) -> None:
        """Remove unfinished writes; counts as one call, with their keys joined by blanks."""
        await self.before("discard", " ".join(write.key for write in unfinished))
        if isinstance(self.inner, Sweeper):
            await self.inner.discard(unfinished)

    async def aclose(self) -> None:
        """Close the inner backend."""
        await self.inner.aclose()


class _CountingParts:
    """Counts the parts of one object."""

    def __init__(self, backend: CountingBackend, key: str, inner: PartWriter) -> None:
        self._backend = backend
        self._key = key
        self._inner = inner

    async def write_part(self, index: int, offset: int, data: Buffer) -> None:
        """Write one part."""
        await self._backend.before("write_part", self._key)
        await self._inner.write_part(index, offset, data)
        self._backend.written[self._key] += memoryview(data).nbytes


class FaultyBackend(CountingBackend):
    """Fails, or calls back, at the n-th call of one operation; everything else works, before and after.

    A full disk in the third part, a rank that hangs in its commit::

        FaultyBackend(inner, "write_part", OSError(errno.ENOSPC, "full"), nth=3)
        FaultyBackend(inner, "commit", lambda key: anyio.sleep_forever())
    """

    def __init__(
        self,
        inner: Backend,
        operation: str,
        fault: BaseException | Callable[[str], Awaitable[object]],
        *,
        nth: int = 1,
        key: str = "",
    ) -> None:
        """Prepare the fault.

        Args:
            inner: the backend that does the work.
            operation: one of :data:`OPERATIONS`.
            fault: the error to raise, or an async function that is called with the key before the operation goes on.
            nth: which call of the operation is hit, from 1; only calls whose key contains ``key`` are counted for that.
            key: a piece of the key, or "" for all keys.

        """
        super().__init__(inner)
        if operation not in OPERATIONS:
            raise InputError(f"operation {operation!r} is unknown; use one of {', '.join(OPERATIONS)}")
        self._operation = operation
        self._fault = fault
        self._key = key
        self._left = nth

    async def before(self, operation: str, key: str) -> None:
        """Count, and be the fault when its time has come."""
        await super().before(operation, key)
        if operation != self._operation or self._key not in key:
            return
        self._left -= 1
        if self._left:
            return
        if isinstance(self._fault, BaseException):
            raise self._fault
        await self._fault(key)
