"""Small pieces of foreign files. Memory is taken after a look at the real size of the file."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from bcp.backends.small import check_small
from bcp.errors import CorruptError
from bcp.format.foreign_files import is_inside
from bcp.pipeline import Budget, Pipeline, Stage, unwrap_stage_errors
from bcp.protocols import Backend, at_once_of

__all__ = ["Item", "Opened", "at_once", "from_json"]

R = TypeVar("R")
JSON_BYTES = 100 << 20
GAP_BYTES = 4 << 10
"""The widest gap between two ranges of one read."""

WINDOW_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Opened:
    """A folder in the moment of its opening.

    Attributes:
        backend: storage under the folder.
        path: its name in messages.
        sizes: bytes of each file, as storage lists them: no link, and nothing outside.
        is_file: whether the caller has passed one file of the folder.
        windows: bytes of earlier reads, by file and first byte.
        starts: the first bytes of the windows of each file, ascending.
    """

    backend: Backend
    path: str
    sizes: dict[str, int]
    is_file: bool = False
    windows: Mapping[tuple[str, int], bytes] = field(default_factory=dict)
    starts: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def size(self, key: str, whence: str) -> int:
        """Return the size of a file, by its name in another file.

        Raises:
            CorruptError: the name leaves the folder, or the folder has no such file.

        """
        if not is_inside(key):
            raise CorruptError(
                f"{self.path}: {whence} names the file {key!r}, which leaves the folder; nothing is read from there"
            )
        if key not in self.sizes:
            raise CorruptError(
                f"{self.path}: {whence} names {key}, which is missing or a link; get the file again, or replace links "
                "by the files"
            )
        return self.sizes[key]

    async def read(self, key: str, start: int, nbytes: int) -> bytes:
        """Read bytes of a file. Raises CorruptError if the file is too short for them."""
        self._check(key, start, nbytes)
        starts = self.starts.get(key, ())
        if row := bisect_right(starts, start):
            first = starts[row - 1]
            known = self.windows[key, first][start - first : start - first + nbytes]
            if len(known) == nbytes:
                return known
        out = bytearray(nbytes)
        if nbytes:
            await self.backend.read_into(key, start, memoryview(out))
        return bytes(out)

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill a buffer with bytes of a file, past those that are known already. Raises as :meth:`read`."""
        self._check(key, start, len(out))
        if len(out):
            await self.backend.read_into(key, start, out)

    def _check(self, key: str, start: int, nbytes: int) -> None:
        if start < 0 or nbytes < 0 or start + nbytes > self.sizes[key]:
            raise CorruptError(
                f"{self.path}/{key} is truncated or damaged: bytes {start} to {start + nbytes} are wanted of "
                f"{self.sizes[key]}; get the file again"
            )

    async def looked_ahead(self, ranges: Iterable[tuple[str, int, int]]) -> Opened:
        """Return the same folder with these ranges (file, first byte, last byte + 1) read; neighbours are one read."""
        spans: list[tuple[str, int, int]] = []
        for key, start, stop in sorted(ranges):
            last = spans[-1] if spans else ("", 0, 0)
            if last[0] == key and start <= last[2] + GAP_BYTES and stop - last[1] <= WINDOW_BYTES:
                spans[-1] = key, last[1], max(stop, last[2])
            else:
                spans.append((key, start, stop))
        named = {f"{key} from byte {start}": (key, start, stop) for key, start, stop in spans}

        async def look(name: str) -> bytes:
            key, start, stop = named[name]
            return await self.read(key, start, stop - start)

        data = await at_once(self.backend, named, look)
        starts: dict[str, list[int]] = {}
        for key, start, _ in spans:
            starts.setdefault(key, []).append(start)
        windows = {(key, start): part for (key, start, _), part in zip(spans, data, strict=True)}
        return replace(self, windows=windows, starts=starts)

    async def read_json(self, key: str) -> Any:
        """Read a file of JSON whole."""
        check_small(f"{self.path}/{key}", self.sizes[key], JSON_BYTES)
        return from_json(await self.read(key, 0, self.sizes[key]), f"{self.path}/{key}")


@dataclass(frozen=True, slots=True)
class Item:
    """A file to look into, as an item of a graph."""

    name: str
    nbytes: int = 1


async def at_once(
    backend: Backend, names: Iterable[str], look: Callable[[str], Awaitable[R]], *, workers: int = 0
) -> list[R]:
    """Look into files, several at once; return the results in the order of the names.

    Args:
        backend: says how many, unless ``workers`` does.
        names: of the files.
        look: looks into a file.
        workers: how many at once; 0 for as many as the backend likes.

    """
    items = [Item(name) for name in names]
    found: dict[str, R] = {}

    async def run(item: Item) -> None:
        found[item.name] = await look(item.name)

    start: Pipeline[Item, Item] = Pipeline()
    graph = start.then(Stage("look", run, workers=workers or max(at_once_of(backend), 1)))
    with unwrap_stage_errors():
        await graph.run(items, budget=Budget(max(len(items), 1)))
    return [found[item.name] for item in items]


def from_json(data: bytes, where: str) -> Any:
    """Decode JSON. A key may stand once in an object.

    Raises:
        CorruptError: the bytes are something else; names ``where``.

    """
    try:
        return json.loads(data.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CorruptError(f"{where} is damaged: {str(error)[:200]}; get the file again") from error


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # None
        raise ValueError(f"it has {twice!r} twice")
    return found
