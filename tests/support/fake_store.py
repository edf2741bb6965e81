"""A store in memory that fails as it is told to: for tests of what is the same for all object stores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import anyio
import anyio.lowlevel

from bcp.backends.objects import ConditionError, If, RequestError, Stat
from bcp.protocols import ObjectInfo, Unfinished, Version

LEAST = 5 << 20


class FakeStore:
    """A :class:`~bcp.backends.objects.Store`; ``fail(what)`` is called before and ``lose(what)`` after each request."""

    least_part = LEAST
    most_part = 64 << 20
    most_keys = 7
    at_once = 4
    page = 11

    def __init__(self, objects: dict[str, tuple[bytes, Version]] | None = None) -> None:
        self.name = "fake://bucket/root"
        self.most_parts = 10_000
        self.objects = {} if objects is None else objects
        self.uploads: dict[str, FakeUpload] = {}
        self.requests: list[str] = []
        self.numbers = itertools.count(len(self.objects) + 1)
        self.fail: Callable[[str], None] = lambda _: None
        self.lose: Callable[[str], None] = lambda _: None
        self.under_way = self.most_under_way = 0

    async def request(self, what: str) -> None:
        self.requests.append(what)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await anyio.lowlevel.checkpoint()
            self.fail(what)
        finally:
            self.under_way -= 1

    def store(self, key: str, data: bytes) -> Version:
        version = f"v{next(self.numbers)}"
        self.objects[key] = data, version
        return version

    async def put(self, key: str, data: memoryview, condition: If | None = None) -> Version:
        await self.request("put")
        if condition is not None and self.objects.get(key, (b"", None))[1] != condition.version:
            raise ConditionError
        version = self.store(key, bytes(data))
        self.lose("put")
        return version

    async def stat(self, key: str) -> Stat | None:
        await self.request("stat")
        found = self.objects.get(key)
        return None if found is None else Stat(len(found[0]), found[1])

    async def get(self, key: str) -> tuple[bytes, Version]:
        await self.request("get")
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key]

    async def read(self, key: str, start: int, out: memoryview, version: Version | None) -> tuple[int, Version]:
        await self.request("read")
        if key not in self.objects:
            raise FileNotFoundError(key)
        data, found = self.objects[key]
        if version not in (None, found):
            raise ConditionError
        piece = data[start : start + len(out)]
        out[: len(piece)] = piece
        self.lose("read")
        return len(piece), found

    async def list(self, prefix: str, after: str | None) -> tuple[Sequence[ObjectInfo], str | None]:
        await self.request("list")
        keys = sorted(key for key in self.objects if key.startswith(prefix) and (after is None or key > after))
        page = keys[: self.page]
        return [ObjectInfo(key, len(self.objects[key][0])) for key in page], page[-1] if page != keys else None

    async def folders(self, prefix: str, after: str | None) -> tuple[Sequence[str], str | None]:
        await self.request("folders")
        below = [key[len(prefix) :].partition("/") for key in self.objects if key.startswith(prefix)]
        names = sorted({name for name, slash, _ in below if slash and (after is None or name > after)})
        page = names[: self.page]
        return page, page[-1] if page != names else None

    async def delete(self, keys: Sequence[str]) -> None:
        assert len(keys) <= self.most_keys
        await self.request("delete")
        for key in keys:
            self.objects.pop(key, None)

    async def begin(self, key: str, nbytes: int | None) -> FakeUpload:  # noqa: ARG002 -- the protocol's
        await self.request("begin")
        upload = self.uploads[f"u{next(self.numbers)}"] = FakeUpload(self, key)
        return upload

    async def unfinished(self, after: str | None) -> tuple[Sequence[Unfinished], str | None]:
        assert after is None
        await self.request("unfinished")
        return [Unfinished(upload.key, name) for name, upload in self.uploads.items()], None

    async def discard(self, unfinished: Unfinished) -> None:
        await self.request("discard")
        self.uploads.pop(unfinished.name, None)

    async def aclose(self) -> None:
        return


class FakeUpload:
    def __init__(self, store: FakeStore, key: str) -> None:
        self.store, self.key = store, key
        self.parts: dict[int, tuple[int, bytes]] = {}

    @property
    def name(self) -> str | None:
        return next((name for name, upload in self.store.uploads.items() if upload is self), None)

    async def part(self, index: int, offset: int, data: memoryview) -> None:
        await self.store.request("part")
        self.parts[index] = offset, bytes(data)
        self.store.lose("part")

    async def finish(self) -> None:
        await self.store.request("finish")
        if self.name is None:
            if self.key in self.store.objects:
                return  # an earlier attempt has done it
            raise RequestError("no such upload")
        parts = [self.parts[index] for index in sorted(self.parts)]
        small = [len(data) for _, data in parts[:-1] if len(data) < LEAST]
        if small:
            raise RequestError(f"EntityTooSmall: {small}")
        assert [offset for offset, _ in parts] == [0, *itertools.accumulate(len(data) for _, data in parts)][:-1]
        self.store.store(self.key, b"".join(data for _, data in parts))
        del self.store.uploads[self.name]
        self.store.lose("finish")

    async def abort(self) -> None:
        await self.store.request("abort")
        if self.name is not None:
            del self.store.uploads[self.name]
