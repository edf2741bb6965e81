"""One backend seen from below a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from bcp.backends.keys import check_key, check_prefix
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

__all__ = ["PrefixedBackend", "child"]


def child(backend: Backend, prefix: str) -> Backend:
    """Return a view of a backend below ``prefix``. Closing the view does nothing: the backend's owner closes that."""
    check_key(prefix)
    if isinstance(backend, PrefixedBackend):
        return PrefixedBackend(backend.whole, f"{backend.prefix}/{prefix}")
    return PrefixedBackend(backend, prefix)


class PrefixedBackend:
    """A view of a backend in which every key stands below one prefix."""

    def __init__(self, whole: Backend, prefix: str) -> None:
        self.whole = whole
        self.prefix = prefix  # put before each key, without a slash at the end

    def __repr__(self) -> str:
        return f"{self.whole!r}/{self.prefix}"

    @property
    def retry_count(self) -> int:
        """How many requests the backend behind it has made again."""
        return retries_of(self.whole)

    @property
    def at_once(self) -> int:
        """How many parts or reads the backend behind it likes to have under way."""
        return at_once_of(self.whole)

    async def put(self, key: str, data: Buffer) -> None:
        """Store a small object."""
        await self.whole.put(self._key(key), data)

    async def version(self, key: str) -> Version | None:
        """Return the version of an object."""
        return await self.whole.version(self._key(key))

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        """Store a small object if it is still the one that was found."""
        return await self.whole.put_if(self._key(key), data, expected)

    def open_write(self, key: str, nbytes: int | None = None) -> AbstractAsyncContextManager[PartWriter]:
        """Write a large object in parts."""
        return self.whole.open_write(self._key(key), nbytes)

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from the object's bytes."""
        await self.whole.read_into(self._key(key), start, out)

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill the buffers by one read."""
        await read_scattered(self.whole, self._key(key), start, outs)

    async def get(self, key: str) -> Buffer:
        """Read a small object whole."""
        return await self.whole.get(self._key(key))

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List objects; their keys are relative to the view."""
        skip = len(self.prefix) + 1
        infos = await self.whole.list(f"{self.prefix}/{prefix}")
        return [replace(info, key=info.key[skip:]) for info in infos]

    async def folders(self, prefix: str = "") -> Sequence[str]:
        """List folders of the view."""
        return await folders_of(self.whole, f"{self.prefix}/{check_prefix(prefix)}")

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        await self.whole.delete([self._key(key) for key in keys])

    async def unfinished(self) -> Sequence[Unfinished]:
        """List the unfinished writes of the view, if the whole backend can."""
        above = f"{self.prefix}/"
        writes = await self.whole.unfinished() if isinstance(self.whole, Sweeper) else []
        return [replace(write, key=write.key.removeprefix(above)) for write in writes if write.key.startswith(above)]

    async def discard(self, unfinished: Sequence[Unfinished]) -> None:
        """Remove unfinished writes of the view."""
        if isinstance(self.whole, Sweeper):
            await self.whole.discard([replace(write, key=self._key(write.key)) for write in unfinished])

    async def is_sealed(self, key: str) -> bool:
        """Whether nobody may write to an object or to a directory above it, if the whole backend knows."""
        is_sealed = getattr(self.whole, "is_sealed", None)
        return is_sealed is not None and bool(await is_sealed(self._key(key)))

    async def aclose(self) -> None:
        """Do nothing: the whole backend is its opener's to close."""

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{check_key(key)}"
