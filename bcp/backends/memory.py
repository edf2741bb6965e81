"""Objects in this process's memory: for tests, and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

from bcp.backends.keys import Tiling, check_key, check_prefix, content_version, scatter
from bcp.errors import CorruptError, StorageError
from bcp.protocols import Buffer, ObjectInfo, Version, flat_view
from bcp.runtime.process import process_lock

__all__ = ["MemoryBackend"]


class MemoryBackend:
    """A :class:`~bcp.protocols.Backend` in memory, shared by name within one process.

    Every ``MemoryBackend("x")`` sees the same objects, from any thread and any event loop, until
    ``MemoryBackend.forget("x")``. A forked child has its own copy.
    """

    _stores: ClassVar[dict[str, dict[str, bytes]]] = {}
    _lock: ClassVar[threading.Lock] = process_lock()

    def __init__(self, name: str = "") -> None:
        self.name = name
        with self._lock:
            self._objects = self._stores.setdefault(name, {})

    def __repr__(self) -> str:
        return f"MemoryBackend({self.name!r})"

    @classmethod
    def forget(cls, name: str) -> None:
        """Drop the store of that name and its objects; backends that still hold it keep them."""
        with cls._lock:
            cls._stores.pop(name, None)

    async def put(self, key: str, data: Buffer) -> None:
        """Store a copy of the bytes."""
        self._store(check_key(key), bytes(data))

    async def version(self, key: str) -> Version | None:
        """Return the digest of the object's bytes."""
        stored = self._objects.get(check_key(key))
        return None if stored is None else content_version(stored)

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        """Store a copy of the bytes if the object is the one that was found, under the lock that every write takes."""
        check_key(key)
        copy = bytes(data)
        with self._lock:
            stored = self._objects.get(key)
            if (None if stored is None else content_version(stored)) != expected:
                return None
            self._objects[key] = copy
        return content_version(copy)

    @asynccontextmanager
    async def open_write(self, key: str, nbytes: int | None = None) -> AsyncIterator[_Parts]:
        """Collect copies of the parts; the object appears when the context ends well."""
        check_key(key)
        parts = _Parts(f"{self!r}, writing {key!r}", nbytes)
        yield parts
        self._store(key, parts.close())

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out``; fewer bytes than that: :class:`~bcp.errors.CorruptError`."""
        target = flat_view(out)
        target[:] = self._range(key, start, len(target))

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill the buffers one after the other."""
        scatter(self._range(key, start, sum(map(len, outs))), outs)

    async def get(self, key: str) -> Buffer:
        """Return the object's bytes."""
        return self._get(key)

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List objects in key order."""
        # dict.copy is one step under the GIL, so other threads may store meanwhile
        stored = self._objects.copy()
        return [ObjectInfo(key, len(stored[key])) for key in sorted(stored) if key.startswith(prefix)]

    async def folders(self, prefix: str = "") -> Sequence[str]:
        """List folders."""
        start = len(check_prefix(prefix))
        below = [key[start:].partition("/") for key in self._objects.copy() if key.startswith(prefix)]
        return sorted({name for name, slash, _ in below if slash})

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; absent ones are skipped."""
        for key in keys:
            check_key(key)
            with self._lock:
                self._objects.pop(key, None)

    async def aclose(self) -> None:
        """Do nothing: the objects outlive the backend."""

    def _store(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[key] = data

    def _range(self, key: str, start: int, nbytes: int) -> memoryview:
        """Return so many of the object's bytes, or raise CorruptError where it is too short."""
        stored = self._get(key)
        if nbytes and start + nbytes > len(stored):
            raise CorruptError(
                f"{self!r}: {key!r} is too short: wanted bytes {start} to {start + nbytes}, and the object has "
                f"{len(stored)} bytes"
            )
        return memoryview(stored)[start : start + nbytes]

    def _get(self, key: str) -> bytes:
        """Return the object's bytes, or raise FileNotFoundError."""
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise FileNotFoundError(f"{self!r} has no object {key!r}") from None


class _Parts:
    """Receives the parts of one object."""

    def __init__(self, where: str, nbytes: int | None) -> None:
        self._where = where
        self._tiling = Tiling(where, nbytes)
        self._data: dict[int, bytes] = {}
        self._closed = False

    async def write_part(self, index: int, offset: int, data: Buffer) -> None:
        """Keep a copy of the part."""
        if self._closed:
            raise StorageError(f"{self._where}: part {index} came after the end")
        part = bytes(data)
        self._tiling.add(index, offset, len(part))
        self._data[index] = part

    def close(self) -> bytes:
        """Return the whole object."""
        self._closed = True
        self._tiling.check()
        return b"".join(self._data[index] for index in sorted(self._data))
