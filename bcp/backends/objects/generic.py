"""Any file system that fsspec knows, with fewer promises than the stores that bcp speaks to by itself.

fsspec has no conditional writes and no uploads of parts in any order. So a commit looks before it writes, and does not
notice a second job that commits at the very same moment. A large object is written by one stream.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import numpy as np

from bcp._text import hidden
from bcp.backends import shown
from bcp.backends.keys import content_version
from bcp.backends.objects.backend import ObjectBackend
from bcp.backends.objects.store import ConditionError, If, RequestError, Stat, Upload
from bcp.backends.small import check_small
from bcp.errors import BcpError, InputError, MissingExtraError
from bcp.protocols import Backend, ObjectInfo, RetryPolicy, Unfinished, Version
from bcp.runtime.imports import importing
from bcp.runtime.process import process_lock
from bcp.runtime.threads import in_pool

__all__ = ["FsspecStore", "open_generic"]

T = TypeVar("T")
MIB = 1 << 20
TEMP_SUFFIX = ".bcp-tmp"
_SMALL = 64 * MIB
_MANY = 16
_TRIES = 8
_NO_VERSION = "unknown"
_TRANSIENT = frozenset(
    {errno.EAGAIN, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.EINTR}
    | {errno.ENETUNREACH, errno.EPIPE, errno.ESTALE, errno.ETIMEDOUT}
)
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_MANY_THREADS = frozenset({"file", "local", "memory"})
"""Synchronous file systems of fsspec that several threads may call at once. Others may not be thread-safe."""
_REFUSING = frozenset({"file", "ftp", "local", "memory", "sftp", "smb", "ssh"})
"""File systems of fsspec whose ``rmdir`` keeps a directory that is not empty. Others may remove its files."""


def open_generic(url: str, options: Mapping[str, Any], policy: RetryPolicy | None) -> Backend:
    """Return the backend of a URL whose scheme fsspec knows.

    Args:
        url: as fsspec takes it.
        options: of the file system, as ``storage_options`` elsewhere; fsspec's configuration files add to them.
        policy: how requests are made again.

    Raises:
        MissingExtraError: the file system's package is not installed.
        InputError: it does not take the URL or the options.

    """
    scheme = url.partition("://")[0]
    try:
        with importing:
            import fsspec  # noqa: PLC0415 -- here it takes 0.1 s that local paths need not pay

            kind = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise MissingExtraError(f"{scheme}:// needs a package that is not installed: {error}") from error
    opened = partial(_open, kind, url, options)
    root = kind._strip_protocol(url)  # noqa: SLF001 -- what fsspec's own functions call
    return ObjectBackend(FsspecStore(kind, opened, root, shown(url).partition("?")[0].rstrip("/"), options), policy)


def _open(kind: Any, url: str, options: Mapping[str, Any]) -> Any:
    """Make the file system, which may connect to a server."""
    url_options = kind._get_kwargs_from_urls(url)  # noqa: SLF001 -- as above
    try:
        return kind(**{**url_options, **options, "skip_instance_cache": True})
    except (ValueError, TypeError) as error:
        scheme = url.partition("://")[0]
        raise InputError(f"{scheme}:// does not take these options or this URL: {_said(error, options)}") from error


class FsspecStore:
    """A :class:`~bcp.backends.objects.store.Store` over a synchronous instance of a file system of fsspec.

    Its asynchronous file systems run on fsspec's own event loop, all others in threads: one, where it is not known that
    several may call.
    """

    least_part = 0
    most_part = 1 << 40
    most_parts = 1 << 20
    most_keys = 1
    at_once = 4

    def __init__(self, kind: Any, opened: Callable[[], Any], root: str, name: str, options: Mapping[str, Any]) -> None:
        """Prepare; nothing is opened yet.

        Args:
            kind: class of the file system.
            opened: makes it; called in a thread, once in each process.
            root: path of the root in it.
            name: of file system and root, for messages.
            options: their values appear in no message.

        """
        self.name = name
        self._root = root.rstrip("/")
        self._options = options
        self._opened = opened
        protocols = {kind.protocol} if isinstance(kind.protocol, str) else set(kind.protocol)
        self._prunes = bool(protocols & _REFUSING)
        self._most_threads = _MANY if kind.async_impl or protocols & _MANY_THREADS else 1
        self._begin()

    def _begin(self) -> None:
        """Begin with no file system, in a forked child too: of fsspec's own no other process may use one."""
        self._pid = os.getpid()
        self._found: Any = None
        self._opening = process_lock()
        self._threads = ThreadPoolExecutor(self._most_threads, "bcp-fsspec")

    def __repr__(self) -> str:
        return f"<FsspecStore of {self.name}>"

    @property
    def _system(self) -> Any:
        """The file system; whoever asks first opens it. Blocks."""
        with self._opening:
            if self._found is None:
                self._found = self._opened()
            return self._found

    async def put(self, key: str, data: memoryview, condition: If | None = None) -> Version:
        """Write beside the object and rename, after a look at the condition, which a second job may not have seen."""
        await self._call(self._put, key, bytes(data), condition)
        return content_version(data)

    def _put(self, key: str, data: bytes, condition: If | None) -> None:
        path = self._path(key)
        if condition is not None and not self._has_version(path, condition.version):
            raise ConditionError(key)
        temp = self._temp(path)
        try:
            if condition is None:
                self._in_folder(temp, partial(self._system.pipe_file, temp, data))
            else:
                self._system.pipe_file(temp, data)
            self._rename(temp, path)
        except BaseException:
            self._remove(temp)
            raise

    def _rename(self, temp: str, path: str) -> None:
        """Give a file its name. If the file system does not replace a file, the old one goes aside until that is done.

        Some raise then, and some, as fsspec's client of WebHDFS, do nothing and report success.
        """
        with suppress(FileExistsError):
            self._system.mv(temp, path, recursive=False)
        if not self._is_there(temp):
            return
        old = self._temp(path)
        with suppress(*_ABSENT):
            self._system.mv(path, old, recursive=False)
        try:
            self._system.mv(temp, path, recursive=False)
        finally:
            is_placed = not self._is_there(temp)
            if not is_placed:
                self._put_back(old, path)
        if not is_placed:
            raise RequestError(f"{temp} keeps its name: the file system does not rename it to {path}")
        self._remove(old)

    def _put_back(self, old: str, path: str) -> None:
        """Give a file that went aside its name again; write it anew if the file system does not rename it."""
        with suppress(*_ABSENT):
            try:
                self._system.mv(old, path, recursive=False)
            except OSError:
                self._system.pipe_file(path, self._system.cat_file(old))

    def _is_there(self, path: str) -> bool:
        self._system.invalidate_cache()
        return bool(self._system.exists(path))

    async def stat(self, key: str) -> Stat | None:
        """Return the size, and as the version a digest of a small object's contents."""
        return await self._call(self._stat, self._path(key))

    def _stat(self, path: str) -> Stat | None:
        try:
            info = self._system.info(path)
        except _ABSENT:
            return None
        if info["type"] != "file":
            return None
        version = self._version(path) if info["size"] <= _SMALL else _NO_VERSION
        return None if version is None else Stat(int(info["size"]), version)

    def _version(self, path: str) -> Version | None:
        try:
            return content_version(self._system.cat_file(path))
        except _ABSENT:
            return None

    def _has_version(self, path: str, version: Version | None) -> bool:
        if version != _NO_VERSION:
            return self._version(path) == version
        stat = self._stat(path)  # it was too large for a digest
        return stat is not None and stat.version == version

    async def get(self, key: str) -> tuple[bytes, Version]:
        """Read an object whole."""
        data = await self._call(self._get, self._path(key))
        return data, content_version(data)

    def _get(self, path: str) -> bytes:
        info = self._system.info(path)
        if info["type"] == "directory":
            raise FileNotFoundError(path)
        check_small(path, int(info["size"] or 0))
        data: bytes = self._system.cat_file(path)
        return data

    async def read(self, key: str, start: int, out: memoryview, version: Version | None) -> tuple[int, Version]:  # noqa: ARG002 -- there are none
        """Read a range, and copy it. There are no versions to compare."""
        data = await self._call(self._range, self._path(key), start, start + len(out))
        if data:
            np.copyto(np.frombuffer(out[: len(data)], np.uint8), np.frombuffer(data, np.uint8))
        return len(data), _NO_VERSION

    def _range(self, path: str, start: int, stop: int) -> bytes:
        info = self._system.info(path)
        if info["type"] != "file":
            raise FileNotFoundError(path)
        nbytes = int(info["size"])
        if start >= nbytes:
            return b""
        data: bytes = self._system.cat_file(path, start=start, end=min(stop, nbytes))
        return data

    async def list(self, prefix: str, after: str | None) -> tuple[Sequence[ObjectInfo], str | None]:  # noqa: ARG002
        """List objects with the prefix, without files that are being written; all are one page."""
        entries = await self._call(self._find)
        return [each for each in entries if each.key.startswith(prefix) and not each.key.endswith(TEMP_SUFFIX)], None

    def _find(self) -> Sequence[ObjectInfo]:
        self._system.invalidate_cache()
        try:
            infos = self._system.find(self._root, detail=True)
        except _ABSENT:
            return []
        start = len(self._root) + 1 if self._root else 0
        return [
            ObjectInfo(path[start:], int(info["size"]), _modified(info)) for path, info in infos.items() if path[start:]
        ]

    async def folders(self, prefix: str, after: str | None) -> tuple[Sequence[str], str | None]:  # noqa: ARG002
        """List the directories in one directory; all are one page."""
        return await self._call(self._folders, self._path(prefix).rstrip("/")), None

    def _folders(self, top: str) -> Sequence[str]:
        self._system.invalidate_cache()
        try:
            infos = self._system.ls(top, detail=True)
        except _ABSENT:
            return []
        paths = [str(info["name"]).rstrip("/") for info in infos if info["type"] == "directory"]
        return [path.rpartition("/")[2] for path in paths if path not in (top, "")]

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete one after the other, and the directories that became empty if the file system has such."""
        await self._call(self._remove_all, keys)

    def _remove_all(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._remove(self._path(key))
            if self._prunes:
                self._prune(key)

    def _prune(self, key: str) -> None:
        """Remove the directories above a key, below the root, as far as they are empty."""
        with suppress(Exception):  # not empty, or gone; fsspec's memory also fails while others write
            while key := key.rpartition("/")[0]:
                self._system.rmdir(self._path(key))

    def _remove(self, path: str) -> None:
        with suppress(*_ABSENT):
            self._system.rm_file(path)

    async def begin(self, key: str, nbytes: int | None) -> Upload:  # noqa: ARG002 -- the protocol's
        """Open a file beside the object."""
        path = self._path(key)
        temp = self._temp(path)
        file = await self._call(self._open, temp)
        return _Stream(self, path, temp, file)

    def _open(self, temp: str) -> Any:
        return self._in_folder(temp, partial(self._system.open, temp, "wb"))

    def _in_folder(self, path: str, call: Callable[[], T]) -> T:
        """Make the directory of a file, and call; again if a deletion beside has removed the empty directory since."""
        for _ in range(_TRIES):
            with suppress(FileExistsError):
                self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            with suppress(FileNotFoundError):
                return call()
        return call()

    async def unfinished(self, after: str | None) -> tuple[Sequence[Unfinished], str | None]:  # noqa: ARG002
        """List files that are being written, or were; all are one page."""
        keys = [info.key for info in await self._call(self._find) if info.key.endswith(TEMP_SUFFIX)]
        return [Unfinished(_final(key), key) for key in keys], None

    async def discard(self, unfinished: Unfinished) -> None:
        """Remove one of these."""
        if unfinished.name.endswith(TEMP_SUFFIX):
            await self.delete([unfinished.name])

    async def aclose(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if self._root else key

    def _temp(self, path: str) -> str:
        folder, slash, name = path.rpartition("/")
        return f"{folder}{slash}.{name}.{secrets.token_hex(8)}{TEMP_SUFFIX}"

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        """Call the file system in a thread; its errors become those of a store."""
        if self._pid != os.getpid():
            self._begin()
        with self.errors():
            return await in_pool(self._threads, partial(function, *args))

    @contextmanager
    def errors(self) -> Any:
        """Turn a file system's errors, of any class, into those of a store."""
        try:
            yield
        except _ABSENT as error:
            raise FileNotFoundError(hidden(str(error))) from _without_secrets(error)
        except (BcpError, ConditionError, RequestError):
            raise
        except Exception as error:  # noqa: BLE001 -- raised again as another one
            transient = isinstance(error, (ConnectionError, TimeoutError))
            transient = transient or (isinstance(error, OSError) and error.errno in _TRANSIENT)
            unreachable = isinstance(error, ConnectionRefusedError)
            cause = _without_secrets(error)
            raise RequestError(_said(error, self._options), transient=transient, unreachable=unreachable) from cause


class _Stream:
    """Writes an object by one stream: a part that comes before its turn is kept until then."""

    def __init__(self, store: FsspecStore, path: str, temp: str, file: Any) -> None:
        self._store = store
        self._path = path
        self._temp = temp
        self._file = file
        self._end = 0
        self._early: dict[int, bytes] = {}
        self._turn = asyncio.Lock()
        self._moved = False

    async def part(self, index: int, offset: int, data: memoryview) -> None:  # noqa: ARG002 -- the offset says it
        """Write the part, and those that waited for it. It is not repeated, because the written bytes are unknown."""
        async with self._turn:
            if offset != self._end:
                self._early[offset] = bytes(data)
                return
            await self._write(data)
            while (late := self._early.pop(self._end, None)) is not None:
                await self._write(memoryview(late))

    async def _write(self, data: memoryview) -> None:
        try:
            await self._store._call(self._file.write, data)  # noqa: SLF001 -- one class in two
        except RequestError as error:
            raise RequestError(error.said) from error
        self._end += len(data)

    async def finish(self) -> None:
        """Close the file, and give it its name."""
        await self._store._call(self._finish)  # noqa: SLF001 -- one class in two

    def _finish(self) -> None:
        system = self._store._system  # noqa: SLF001 -- one class in two
        if not self._moved:
            self._file.close()
            nbytes = int(system.info(self._temp)["size"])
            if nbytes != self._end:
                raise RequestError(f"{self._temp} has {nbytes} bytes where {self._end} were written")
            self._store._rename(self._temp, self._path)  # noqa: SLF001 -- one class in two
            self._moved = True

    async def abort(self) -> None:
        """Close and remove the file."""
        await self._store._call(self._abort)  # noqa: SLF001 -- one class in two

    def _abort(self) -> None:
        self._early.clear()
        with suppress(Exception):  # it may be broken, which is why it goes
            self._file.close()
        self._store._remove(self._temp)  # noqa: SLF001 -- one class in two


def _modified(info: Mapping[str, Any]) -> float | None:
    """Return when a file was written, in Unix seconds; None where the file system does not tell it in a known form."""
    value = next((info[name] for name in ("mtime", "LastModified", "updated") if name in info), None)
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _final(temp: str) -> str:
    """Return the key of the object that a temporary one was to become."""
    folder, slash, name = temp.rpartition("/")
    return f"{folder}{slash}{name[1:].removesuffix(TEMP_SUFFIX).rpartition('.')[0]}"


def _said(error: Exception, options: Mapping[str, Any]) -> str:
    """Return the error's words without the values of options, which may be secret."""
    text = hidden(f"{type(error).__name__}: {error}")
    for value in options.values():
        if isinstance(value, str) and value:
            text = text.replace(value, "***")
    return text


def _without_secrets(error: Exception) -> Exception | None:
    """Return an error for the chain of another one; None if a text in its own chain shows a secret of a URL."""
    links: list[BaseException | None] = [error]
    for link in links:  # it grows
        if link is not None:
            if hidden(str(link)) != str(link):
                return None
            links += [other for other in (link.__cause__, link.__context__) if other not in links]
    return error
