"""A checkpoint of a run whose data files may lie in a cold place: files that are missing here are read from there."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bcp._log import log
from bcp.backends import resolve
from bcp.backends.cold import STEP_FOLDER, ColdPlaces, OpenPlace, cold_name, hot_name
from bcp.backends.local import LocalBackend
from bcp.backends.passing import PassingBackend
from bcp.backends.prefixed import child
from bcp.backends.scattered import read_scattered
from bcp.format.metadata import owner_of
from bcp.protocols import (
    Backend,
    Buffer,
    ObjectInfo,
    RetryPolicy,
    retries_of,
)
from bcp.runtime.threads import in_thread

__all__ = ["CooledBackend", "above", "cooled", "cooled_child", "hot_of", "is_data_file"]

Side = tuple[ColdPlaces, str]
"""The cold places of a run, and the name of one of its folders."""


def is_data_file(key: str) -> bool:
    """Whether a key is that of a data file of a checkpoint, which may be moved. Receipts never are."""
    return owner_of(key) is not None and not key.startswith("receipts/")


def hot_of(backend: Backend) -> Backend:
    """Return the storage under the path itself."""
    return backend.hot if isinstance(backend, CooledBackend) else backend


def above(path: str | os.PathLike[str], backend: Backend) -> tuple[str, str]:
    """Return the folder above a path and the path's name there; ("", "") for the root of a store. Blocks.

    Other spellings of a path lead to the same folder, as ``run/step-1/.`` and ``run/step-1/model/..``. Links are
    followed.
    """
    if isinstance(backend, LocalBackend):
        real = Path(os.path.realpath(backend.root))
        return (str(real.parent), real.name) if real.name else ("", "")
    scheme, _, rest = os.fsdecode(path).partition("://")
    parts = [part for part in rest.split("/") if part]
    slash = "/" if rest.startswith("/") else ""
    return (f"{scheme}://{slash}{'/'.join(parts[:-1])}", parts[-1]) if len(parts) > 1 else ("", "")


def cooled(
    backend: Backend,
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    retries: RetryPolicy | None = None,
    *,
    given: str | None = None,
) -> CooledBackend:
    """Return the view of a checkpoint's path that also has the files in a cold place.

    Args:
        backend: over the path. The view closes it.
        path: as the caller has said it.
        storage_options: for the file system of a URL.
        retries: of failed requests.
        given: the cold place of the run, if the caller has named it; else the run's record names it.

    """

    def side() -> Side | None:
        run, name = above(path, backend)
        if not run:
            return None
        return ColdPlaces(
            partial(resolve, run, storage_options, retries), run, storage_options, retries, given=given
        ), name

    return CooledBackend(backend, side, closes=True)


class CooledBackend(PassingBackend):
    """A view of a checkpoint's folder. It reads and lists both sides, deletes on both, and writes to the folder alone.

    The cold side is asked for files that are missing here, so a checkpoint without such files costs no request more.
    """

    def __init__(self, hot: Backend, side: Side | Callable[[], Side | None], *, closes: bool = False) -> None:
        """Take the folder.

        Args:
            hot: storage under the path.
            side: the cold side, or a function that finds it; it may block.
            closes: whether :meth:`aclose` closes the folder and the cold places.

        """
        super().__init__(hot)
        self._find, self._closes = side, closes
        self._found: dict[str, tuple[OpenPlace, Backend]] = {}

    @property
    def hot(self) -> Backend:
        """Storage under the path."""
        return self.whole

    @property
    def retry_count(self) -> int:
        """How many requests both sides have made again."""
        places = {id(place.backend): place.backend for place, _ in self._found.values()}
        return retries_of(self.hot) + sum(map(retries_of, places.values()))

    # -- both sides --------------------------------------------------------------------------------

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from the file, wherever it is."""
        await self._read(key, lambda backend, name: backend.read_into(name, start, out))

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill the buffers from the file, wherever it is."""
        await self._read(key, lambda backend, name: read_scattered(backend, name, start, outs))

    async def get(self, key: str) -> Buffer:
        """Read a small object whole."""
        data: list[Buffer] = []

        async def read(backend: Backend, name: str) -> None:
            data.append(await backend.get(name))

        await self._read(key, read)
        return data[0]

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List the files of both sides, each once. A file that a promotion moves meanwhile is not missed."""
        infos = {info.key: info for info in await self.hot.list(prefix)}
        cold = [info for info in await self.cold_files() if info.key.startswith(prefix)]
        if any(info.key not in infos for info in cold):
            infos = {info.key: info for info in (*cold, *infos.values(), *await self.hot.list(prefix))}
        return [infos[key] for key in sorted(infos)]

    async def cold_files(self, *, again: bool = True) -> Sequence[ObjectInfo]:
        """List the data files in cold places, by their keys here.

        Args:
            again: read a record of cold places that was read before anew.

        Raises:
            CorruptError: the record of cold places is damaged.
            StorageError: storage failed, or a cold place is not there.

        """
        infos: dict[str, ObjectInfo] = {}
        for place, folder in await self._cold(again=again):
            await place.check()
            for info in await folder.list():
                key = hot_name(info.key)
                if is_data_file(key):
                    infos.setdefault(key, ObjectInfo(key, info.nbytes, info.modified))
        return list(infos.values())

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete files on both sides. The cold ones go first: a folder that is still there says that work is left.

        Copies in the cold place of another run stay: the folder here is a copy of that run's.
        """
        chosen = [cold_name(key) for key in keys if is_data_file(key)]
        for place, folder in await self._cold() if chosen else ():
            if await self._is_own(place):
                await folder.delete(chosen)
            else:
                log.warning(
                    "copies in a cold place stay, for the place is noted for another run. If that run was moved here, "
                    "correct cold-of.json, and call bcp.cool",
                    checkpoint=repr(self.hot),
                    place=place.url,
                    run=place.owner,
                )
        await self.hot.delete(keys)

    async def aclose(self) -> None:
        """Let go of both sides, if they are the view's own."""
        if self._closes:
            await self.hot.aclose()
            if isinstance(self._find, tuple):
                await self._find[0].aclose()

    async def side(self) -> Side | None:
        """Return the cold places of the run, and the name of the folder in it; None without a folder above."""
        if not isinstance(self._find, tuple):
            side = await in_thread(self._find)
            if side is not None and not isinstance(self._find, tuple):  # else another reader was quicker
                self._find = side
        return self._find if isinstance(self._find, tuple) else None

    # -- details -----------------------------------------------------------------------------------

    async def _read(self, key: str, read: Callable[[Backend, str], Awaitable[None]]) -> None:
        """Read a file where it was found before, then in the folder, then in the cold places."""
        if (known := self._found.get(key)) is not None:
            try:
                return await read(known[1], cold_name(key))
            except FileNotFoundError:
                self._found.pop(key, None)
        try:
            return await read(self.hot, key)
        except FileNotFoundError:
            if not is_data_file(key):
                raise
            await self._read_cold(key, read)

    async def _read_cold(self, key: str, read: Callable[[Backend, str], Awaitable[None]]) -> None:
        places = await self._cold()
        for place, folder in places:
            try:
                await read(folder, cold_name(key))
            except FileNotFoundError:
                continue
            self._found[key] = place, folder
            return
        for place, _ in places:
            await place.check()  # a place that is not mounted has lost no file
        raise FileNotFoundError(f"{self!r} has no {key}")

    async def _cold(self, *, again: bool = True) -> Sequence[tuple[OpenPlace, Backend]]:
        """Return the cold places, and the storage of this checkpoint's copies in each."""
        side = await self.side()
        if side is None or not STEP_FOLDER.fullmatch(side[1]):
            return ()
        places, name = side
        return [(place, place.folder(name)) for place in await places.of(name, again=again)]

    async def _is_own(self, place: OpenPlace) -> bool:
        return isinstance(self._find, tuple) and await self._find[0].owns(place)


def cooled_child(run: Backend, name: str, places: ColdPlaces) -> CooledBackend:
    """Return the view of a folder of an open run."""
    return CooledBackend(child(run, name), (places, name))
