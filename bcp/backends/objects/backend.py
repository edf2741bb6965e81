"""A :class:`~bcp.protocols.Backend` over an object store: the part that all stores share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import anyio

from bcp._log import log
from bcp.backends.keys import Tiling, check_key, check_prefix, scatter
from bcp.backends.objects.parts import Grid
from bcp.backends.objects.retry import Retries, in_turns
from bcp.backends.objects.store import ConditionError, If, RequestError, Stat, Store, Upload
from bcp.errors import CorruptError, StorageError
from bcp.protocols import Buffer, ObjectInfo, RetryPolicy, Unfinished, Version, flat_view
from bcp.runtime.cache import LruCache
from bcp.runtime.threads import in_thread

__all__ = ["ObjectBackend"]

T = TypeVar("T")
MIB = 1 << 20
RANGE_BYTES = 16 * MIB
"""Bytes of one ranged read: enough for a connection to come to speed, and few enough to be asked for once more."""

STRAIGHT_BYTES = MIB
"""A buffer of so many bytes is read by requests of its own; a request takes longer than the copy of fewer."""

AT_ONCE_BYTES = 8 * MIB
"""An object of up to so many bytes is kept until it is whole, and stored by one request in place of three."""

UNKNOWN_BYTES = 16 * MIB
"""Parts of an object of unknown size are put together to so many bytes: 10,000 of them are 160 GB."""

REFUSALS = 5
"""Refusals of one conditional write, each contradicted by a read, after which its outcome counts as unknown."""

_ANSWERS: dict[str, tuple[type[Exception], ...]] = {
    "get": (FileNotFoundError,),
    "read": (FileNotFoundError, ConditionError),
}
"""Errors that callers of an operation expect; of any other operation they are senseless answers."""

CLEAN_UP_SECONDS = 30.0
_PINNED = 4096  # objects whose version is remembered while they are being read


class ObjectBackend:
    """Objects below one root of a store; requests that fail are made again.

    A reader sees one version of an object: a read that finds another version than the reads before it is an error.
    Large objects appear whole, with a checksum that the store has compared, or not at all.
    """

    def __init__(self, store: Store, policy: RetryPolicy | None = None) -> None:
        """Take the store, which belongs to this backend from now on.

        Args:
            store: makes single requests.
            policy: how they are made again.

        """
        self.store = store
        self.retries = Retries(policy)
        self._versions: LruCache[str, Version] = LruCache(_PINNED)

    def __repr__(self) -> str:
        return f"ObjectBackend({self.store.name})"

    @property
    def retry_count(self) -> int:
        """How many requests were made again so far."""
        return self.retries.retries

    @property
    def at_once(self) -> int:
        """How many parts or reads shall be under way at once."""
        return self.store.at_once

    # -- small objects ------------------------------------------------------------------------

    async def put(self, key: str, data: Buffer) -> None:
        """Store a small object by one request."""
        view = flat_view(data)
        self._versions.forget(check_key(key))
        await self._request("put", key, f"storing {key!r}", partial(self.store.put, key, view), len(view))

    async def version(self, key: str) -> Version | None:
        """Return the store's version of an object."""
        stat = await self._stat(check_key(key))
        return None if stat is None else stat.version

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        """Store a small object if it still has the version that was found; the store compares.

        A refusal does not tell who was first. The request may have been carried out before: by an attempt whose answer
        was lost, or by a proxy that has repeated it. So the object is read, and compared with the data: a commit has
        contents that no other has.
        """
        view, refusals = flat_view(data), 0
        self._versions.forget(check_key(key))

        async def attempt() -> Version | None:
            nonlocal refusals
            try:
                return await self.store.put(key, view, If(expected))
            except ConditionError:
                refusals += 1
                return await self._settled(key, view, expected, is_last=refusals >= REFUSALS)

        return await self._request("put_if", key, f"storing {key!r} on condition", attempt, len(view))

    async def _settled(self, key: str, data: memoryview, expected: Version | None, *, is_last: bool) -> Version | None:
        """Return the version of a refused object that is there all the same; None if another one is there.

        Raises RequestError if the store shows the very object that the condition asks for.
        """
        seen = "the one from before"
        try:
            stored, version = await self.store.get(key)
        except FileNotFoundError:
            if expected is not None and await self.store.stat(key) is None:
                return None
            seen = "none"
        else:
            if stored == data:
                return version
            if version != expected:
                return None
        raise RequestError(f"the store says that there is another {key!r}, and shows {seen}", transient=not is_last)

    async def get(self, key: str) -> Buffer:
        """Read a small object whole."""
        data, _ = await self._request("get", key, f"reading {check_key(key)!r}", partial(self.store.get, key))
        return data

    # -- large objects ------------------------------------------------------------------------

    @asynccontextmanager
    async def open_write(self, key: str, nbytes: int | None = None) -> AsyncIterator[_Parts]:
        """Write a large object in parts, several at once."""
        self._versions.forget(check_key(key))
        parts = _Parts(self, key, nbytes)
        try:
            yield parts
            await parts.finish()
        except BaseException:
            with anyio.move_on_after(CLEAN_UP_SECONDS, shield=True):
                await parts.abort()
            raise

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` by several ranged reads at once."""
        await self.read_scattered(key, start, [out])

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill the buffers by ranged reads: large ones straight, small neighbours by one read and a copy."""
        check_key(key)
        pieces = list(_pieces(start, [flat_view(out) for out in outs]))
        if not pieces:
            await self._exists(key)
            return
        first, *rest = pieces
        if rest and key not in self._versions:
            await self._fill(key, *first)  # learns the version, which the others ask for
            pieces = rest
        await _together([partial(self._fill, key, *piece) for piece in pieces])

    async def _fill(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill neighbours by one read."""
        if len(outs) == 1:
            await self._read(key, start, outs[0])
            return
        whole = memoryview(bytearray(sum(map(len, outs))))
        await self._read(key, start, whole)
        await in_thread(scatter, whole, outs)

    async def _exists(self, key: str) -> None:
        if await self._stat(key) is None:
            raise FileNotFoundError(f"{self!r} has no object {key!r}")

    async def _read(self, key: str, start: int, out: memoryview) -> None:
        """Fill a buffer by one ranged read."""
        description = f"reading bytes {start} to {start + len(out)} of {key!r}"
        try:
            nbytes, version = await self._request(
                "read", key, description, partial(self._read_once, key, start, out), len(out)
            )
        except ConditionError as error:
            self._versions.forget(key)
            raise StorageError(
                f"{self!r}: {key!r} was replaced while it was being read; nothing was mixed: read it again"
            ) from error
        self._versions.put(key, version)
        if nbytes < len(out):
            raise CorruptError(
                f"{self!r}: {key!r} is too short: wanted {len(out)} bytes from byte {start} and got {nbytes}; the "
                "object was cut, or is not the one that was saved"
            )

    async def _read_once(self, key: str, start: int, out: memoryview) -> tuple[int, Version]:
        """Read once; and once more beside it where the first read is slow and the policy says so."""
        read = partial(self.store.read, key, start, out, self._versions.get(key))
        hedge = self.retries.policy.hedge_seconds
        return await read() if hedge is None else await _first_of_two(read, hedge)

    # -- the rest -----------------------------------------------------------------------------

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List objects in key order."""
        if prefix:
            check_key(prefix.rstrip("/"))

        infos = await self._pages("list", prefix, f"listing {prefix!r}", partial(self.store.list, prefix))
        return sorted(infos, key=lambda info: info.key)

    async def folders(self, prefix: str = "") -> Sequence[str]:
        """List the folders directly below ``prefix``."""
        description = f"listing folders in {check_prefix(prefix)!r}"
        return sorted({*await self._pages("folders", prefix, description, partial(self.store.folders, prefix))})

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        for key in keys:
            self._versions.forget(check_key(key))
        count = self.store.most_keys
        await in_turns(partial(self._delete, keys[first : first + count]) for first in range(0, len(keys), count))

    async def _delete(self, keys: Sequence[str]) -> None:
        more = "" if len(keys) == 1 else f" and {len(keys) - 1} more"
        await self._request("delete", keys[0], f"deleting {keys[0]!r}{more}", partial(self.store.delete, keys))

    async def unfinished(self) -> Sequence[Unfinished]:
        """List the remains of unfinished uploads."""
        remnants = await self._pages("unfinished", "", "listing unfinished uploads", self.store.unfinished)
        return list(dict.fromkeys(remnants))

    async def discard(self, unfinished: Sequence[Unfinished]) -> None:
        """Remove some of it."""
        await in_turns(partial(self._discard, remnant) for remnant in unfinished)

    async def _discard(self, unfinished: Unfinished) -> None:
        description = f"removing an unfinished upload of {unfinished.key!r}"
        await self._request("discard", unfinished.key, description, partial(self.store.discard, unfinished))

    async def aclose(self) -> None:
        """Close connections."""
        await self.store.aclose()

    async def _stat(self, key: str) -> Stat | None:
        return await self._request("version", key, f"looking for {key!r}", partial(self.store.stat, key))

    async def _pages(
        self,
        operation: str,
        key: str,
        description: str,
        page: Callable[[str | None], Awaitable[tuple[Sequence[T], str | None]]],
    ) -> Sequence[T]:
        """Return the items of all pages of a list; each page is a request of its own."""
        items: list[T] = []
        after: str | None = None
        while True:
            some, after = await self._request(operation, key, description, partial(page, after))
            items += some
            if after is None:
                return items

    async def _request(
        self, operation: str, key: str, description: str, attempt: Callable[[], Awaitable[T]], nbytes: int = 0
    ) -> T:
        about = self.store.name, operation, key
        return await self.retries(f"{self!r}: {description}", attempt, nbytes, about, _ANSWERS.get(operation, ()))


class _Parts:
    """Takes the parts of one object: keeps a small object until it is whole, and uploads the parts of others."""

    def __init__(self, backend: ObjectBackend, key: str, nbytes: int | None) -> None:
        self._backend = backend
        self._store = backend.store
        self._key = key
        self._nbytes = nbytes
        self._tiling = Tiling(f"{backend!r}, writing {key!r}", nbytes)
        self._upload: Upload | None = None
        self._begins = anyio.Lock()
        self._grid: Grid | None = None
        self._is_straight: bool | None = None
        self._small: dict[int, bytes] | None = {}
        self._closed = False
        if nbytes is None or nbytes > min(AT_ONCE_BYTES, self._store.most_part):
            self._small = None
        self._least = self._store.least_part
        if nbytes is not None:
            self._least = max(self._least, -(-nbytes // self._store.most_parts))

    async def write_part(self, index: int, offset: int, data: Buffer) -> None:
        """Take one part."""
        view = flat_view(data)
        if self._closed:
            raise StorageError(f"{self._backend!r}, writing {self._key!r}: part {index} came after the end")
        if self._small is not None:
            self._small[index] = bytes(view)
        elif self._goes_straight(index, offset, len(view)):
            await self._store_part(index, offset, view)
        else:
            cell = UNKNOWN_BYTES if self._nbytes is None else AT_ONCE_BYTES
            self._grid = self._grid or Grid(max(self._least, cell))
            for number, whole in self._grid.add(offset, view):
                await self._store_part(number, number * self._grid.nbytes, memoryview(whole))
        self._tiling.add(index, offset, len(view))

    def _goes_straight(self, index: int, offset: int, nbytes: int) -> bool:
        """Return whether parts are stored as they come. The first one to come decides for all.

        The parts of an object of known size have one size. The last one may be smaller, and the first one has a header
        too. These two tell little of the others' size, so that they have to be much larger.
        """
        is_last = offset + nbytes == self._nbytes
        if self._is_straight is None:
            size = offset // index if is_last and index else nbytes
            sure = 1 if index and not is_last else 4
            alone = index == 0 and is_last
            self._is_straight = self._nbytes is not None and (alone or size >= sure * self._least)
        if self._is_straight and nbytes < self._least and not is_last:
            raise StorageError(
                f"{self._backend!r}, writing {self._key!r}: part {index} has {nbytes} bytes after a larger one, "
                f"and the store takes no part below {self._least}; choose larger parts (SaveOptions.part_bytes)"
            )
        return self._is_straight

    async def _store_part(self, index: int, offset: int, data: memoryview) -> None:
        upload = await self._begun()
        await self._request(
            "part",
            f"storing part {index}, from byte {offset} on,",
            partial(upload.part, index, offset, data),
            len(data),
        )

    async def _begun(self) -> Upload:
        async with self._begins:
            if self._upload is None:
                self._upload = await self._request(
                    "begin", "beginning to store", partial(self._store.begin, self._key, self._nbytes)
                )
            return self._upload

    async def finish(self) -> None:
        """Let the object appear."""
        self._closed = True
        nbytes = self._tiling.check()
        if self._small is not None or nbytes == 0:
            parts = self._small or {}
            whole = b"".join(parts[index] for index in sorted(parts))
            await self._request("put", "storing", partial(self._store.put, self._key, memoryview(whole)), len(whole))
            return
        if self._grid is not None and (rest := self._grid.rest()) is not None:
            number, cell = rest
            await self._store_part(number, number * self._grid.nbytes, memoryview(cell))
        await self._request("finish", "finishing", (await self._begun()).finish)

    async def abort(self) -> None:
        """Remove the stored parts; an error of this is only logged, because another one is on its way."""
        self._closed = True
        if self._upload is not None:
            try:
                await self._request("abort", "removing the parts of", self._upload.abort)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the next save removes them
                log.warning("parts of a failed write were not removed", object=self._key, error=repr(error))

    async def _request(
        self, operation: str, description: str, attempt: Callable[[], Awaitable[T]], nbytes: int = 0
    ) -> T:
        words = f"{description} {self._key!r}"
        return await self._backend._request(operation, self._key, words, attempt, nbytes)  # noqa: SLF001 -- one class in two


def _pieces(start: int, outs: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut the bytes that fill the buffers into reads; yield the first byte of each read, and its buffers."""
    run: list[memoryview] = []
    offset = begin = start
    for out in outs:
        if run and (len(out) >= STRAIGHT_BYTES or offset - begin >= RANGE_BYTES):
            yield begin, run
            run = []
        if len(out) >= STRAIGHT_BYTES:
            yield from (
                (offset + first, [out[first : first + RANGE_BYTES]]) for first in range(0, len(out), RANGE_BYTES)
            )
        elif len(out):
            begin = begin if run else offset
            run.append(out)
        offset += len(out)
    if run:
        yield begin, run


async def _together(calls: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Make calls at once; the first error is raised as it is."""
    if len(calls) == 1:
        await calls[0]()
        return
    try:
        async with anyio.create_task_group() as group:
            for call in calls:
                group.start_soon(call)
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__


async def _first_of_two(read: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Read; after some seconds also a second time. Both fill the same buffer with the same bytes; one is cancelled."""
    answers: list[T] = []
    errors: list[Exception] = []

    async def once(*, is_last: Callable[[], bool]) -> None:
        try:
            answers.append(await read())
        except Exception as error:  # noqa: BLE001 -- raised again where no read succeeds
            errors.append(error)
            if not is_last():
                return
        group.cancel_scope.cancel()

    async def later() -> None:
        await anyio.sleep(seconds)
        if not errors:
            await once(is_last=lambda: len(errors) == 2)  # noqa: PLR2004 -- two reads

    async with anyio.create_task_group() as group:
        group.start_soon(later)
        await once(is_last=lambda: True)
    if not answers:
        raise errors[0]
    return answers[0]
