"""Files below one directory: local disks and mounted file systems."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import aiofiles
import aiofiles.os
import anyio

from bcp._log import log
from bcp.backends import files, swap
from bcp.backends.file_io import ReadWay, TempFile, WriteWay, fill, fill_pieces
from bcp.backends.keys import Tiling, check_key, check_prefix
from bcp.backends.links import names_behind
from bcp.backends.probe import quickest
from bcp.errors import CorruptError, InputError, StorageError
from bcp.events import RequestEvent, Status, emit, told
from bcp.protocols import Buffer, ObjectInfo, Unfinished, Version, flat_view
from bcp.runtime.threads import in_thread

__all__ = ["LocalBackend", "absolute"]

_IN_THE_WAY = "a file is where a directory has to be: save to another path, or move the file away"
_NO_ANSWER = "the file server does not answer: see that it is up, and that the file system is mounted"
_REFUSED = "check the permissions of the directory; a file server may take root for nobody (root_squash)"
_HINTS = {
    errno.ENOSPC: "free some space, or save elsewhere",
    errno.EDQUOT: "free some space, or ask for a larger quota",
    errno.ENOENT: "the file or its directory was deleted or moved away meanwhile",
    errno.EIO: "the disk or the file server failed, and bytes may be lost: see the kernel's log",
    errno.ESTALE: "the file server no longer knows the file: another host deleted it, or the server was restored",
    errno.EACCES: _REFUSED,
    errno.EPERM: _REFUSED,
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: _IN_THE_WAY,
    errno.EEXIST: _IN_THE_WAY,
    errno.EISDIR: "a directory is where a file has to be: move the directory away",
    errno.ELOOP: "a symbolic link leads to itself: remove it, and put the file back",
    errno.ETIMEDOUT: _NO_ANSWER,
    errno.EHOSTDOWN: _NO_ANSWER,
    errno.EHOSTUNREACH: _NO_ANSWER,
    errno.ENOTCONN: _NO_ANSWER,
    errno.ECONNABORTED: _NO_ANSWER,
}
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_VERBS = {"open_write": "begin", "commit": "finish"}
"""Verbs of requests in events, where they are not those of error messages."""

_SLOW_SECONDS = 60.0
_WRITES = ("auto", *get_args(WriteWay))
_READS = get_args(ReadWay)


class LocalBackend:
    """A :class:`~bcp.protocols.Backend` over a directory, which is created by the first write.

    An object is a file. It is written under a temporary name in its own directory, fsynced, renamed, and the
    directory is fsynced: after a crash there is the old object or the new one. A process that is killed
    leaves files that end in ``.bcp-tmp``: ``unfinished`` lists them, ``discard`` removes them. Symbolic links that lead
    out of the root are refused.

    Large objects bypass the page cache where the file system lets them, and leave it as it was. Memory that starts at a
    page is then not copied on its way, if its offset in the object is a multiple of 4096. Shared file systems (NFS,
    SMB, FUSE) are read and written through the page cache, unless ``writes`` and ``reads`` say otherwise.

    A call that a hung file server does not answer blocks one thread, never the event loop. It is logged after a minute.
    A cancellation waits for it.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, writes: Literal["auto"] | WriteWay = "auto", reads: ReadWay = "auto"
    ) -> None:
        """Take the directory.

        Args:
            root: the directory; a relative one is fixed to the current directory now.
            writes: how parts go to disk. ``"direct"``: past the page cache, and as ``"early"`` where that is refused;
                ``"early"``: through the page cache, written out and dropped as soon as may be; ``"buffered"``: when the
                kernel likes, and at the latest at the end. ``"auto"``: ``"direct"``, unless ``"early"`` is clearly
                quicker, which is measured before a process writes its first file of 256 MiB or more to a file system;
                objects below 1 MiB are buffered. On a shared file system ``"auto"`` is ``"early"``.
            reads: ``"direct"``: past the page cache where the file system allows it; ``"buffered"``: through it;
                ``"auto"``: cached pages come from the page cache, other pages past it. On a shared file system
                ``"auto"`` is ``"buffered"``.

        """
        self._root = absolute(os.fsdecode(root))
        if writes not in _WRITES or reads not in _READS:
            raise InputError(f"writes={writes!r} has to be one of {_WRITES}, and reads={reads!r} one of {_READS}")
        self._choose = quickest if writes == "auto" else lambda _final, _nbytes: writes
        self._reads = reads

    def __repr__(self) -> str:
        return f"LocalBackend({str(self._root)!r})"

    @property
    def root(self) -> Path:
        """Return the directory."""
        return self._root

    async def put(self, key: str, data: Buffer) -> None:
        """Store a small object durably: all of it or none."""
        path = await in_thread(self._path, key)
        view = flat_view(data)
        with self._errors("put", key, (0, len(view))), anyio.CancelScope(shield=True):
            # shielded: aiofiles leaves its thread behind when cancelled, and the thread reads ``data``
            temp = files.temp_path(path)
            try:
                await in_thread(files.create_empty, temp)
                async with aiofiles.open(temp, "wb") as file:
                    await file.write(view)
                    await file.flush()
                    written = await in_thread(files.synced, file.fileno())
                await in_thread(files.rename_written, temp, path, written)
            except BaseException:
                await in_thread(files.remove, temp)
                raise
            await in_thread(files.sync_directory, path.parent)

    async def version(self, key: str) -> Version | None:
        """Return the digest of the file's contents."""
        path = await in_thread(self._path, key)
        with self._errors("version", key):
            return await in_thread(swap.version_of, path)

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        """Store a small object if it is still the one that was found; see :mod:`bcp.backends.swap`."""
        path = await in_thread(self._path, key)
        view = flat_view(data)
        with self._errors("put_if", key, (0, len(view))):
            return await in_thread(swap.put_if, path, view, expected)

    @asynccontextmanager
    async def open_write(self, key: str, nbytes: int | None = None) -> AsyncIterator[_Parts]:
        """Write a large object in parts, each by one call in a thread."""
        path = await in_thread(self._path, key)
        file = TempFile(path, self._choose)
        parts = _Parts(self, key, file, nbytes)
        try:
            with self._errors("open_write", key):
                await in_thread(file.create, nbytes)
            yield parts
            with self._errors("commit", key, (0, parts.tiling.check())):
                await in_thread(file.commit)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await _discard(file, error)
                await in_thread(files.prune, self._root, path.parent)
            raise

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` by one call in a thread."""
        await self.read_scattered(key, start, [flat_view(out)])

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill the buffers by one call in a thread."""
        await self._read(key, start, sum(map(len, outs)), partial(self._fill, key, start, outs))

    async def read_pieces(
        self, key: str, start: int, pieces: Sequence[Sequence[memoryview]], arrived: Callable[[int], None]
    ) -> None:
        """Fill buffers piece by piece, in a thread, where ``arrived`` is called with the number of each full piece."""
        wanted = sum(len(out) for piece in pieces for out in piece)
        await self._read(key, start, wanted, lambda: fill_pieces(self._path(key), start, pieces, arrived))

    async def _read(self, key: str, start: int, wanted: int, fill_all: Callable[[], int]) -> None:
        with self._errors("read", key, (start, start + wanted)):
            nbytes = await in_thread(fill_all)
        if nbytes < wanted:
            raise CorruptError(
                f"{self!r}: {key!r} is too short: wanted {wanted} bytes from byte {start} and got {nbytes}; "
                "the file was truncated or is not the one that was saved"
            )

    async def get(self, key: str) -> Buffer:
        """Read a small object whole."""
        path = await in_thread(self._path, key)
        with self._errors("get", key):
            return await in_thread(files.certain, path, partial(files.read_file, path))

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List objects in key order; symbolic links to files are left out."""
        if prefix:
            await in_thread(self._path, prefix.rstrip("/"))
        with self._errors("list", prefix):
            entries = await in_thread(files.list_files, self._root, prefix)
        return [ObjectInfo(*entry) for entry in entries]

    async def folders(self, prefix: str = "") -> Sequence[str]:
        """List the directories directly below ``prefix``; symbolic links are left out."""
        top = self._root / prefix
        if check_prefix(prefix):
            top = await in_thread(self._path, prefix[:-1])
        with self._errors("folders", prefix):
            return await in_thread(files.list_folders, top)

    async def links(self) -> Sequence[str]:
        """List the symbolic links directly below the root."""
        with self._errors("links", ""):
            return await in_thread(files.list_links, self._root)

    async def behind(self, name: str) -> Sequence[str]:
        """List the names directly below the root through which a symbolic link leads."""
        with self._errors("behind", name):
            return await in_thread(names_behind, self._root, _name(name))

    async def unlink(self, name: str) -> None:
        """Remove a symbolic link directly below the root; its target stays."""
        path = self._root / _name(name)
        with self._errors("unlink", name):
            await in_thread(files.unlink_link, path)

    def beyond(self, name: str) -> LocalBackend:
        """Return a backend over a directory below the root, to which a link may lead."""
        return LocalBackend(self._root / _name(name))

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects and the directories that became empty, but not the root."""
        with self._errors("delete", ", ".join(keys[:3])):
            await in_thread(self._delete, keys)

    async def unfinished(self) -> Sequence[Unfinished]:
        """List temporary files."""
        with self._errors("unfinished", ""):
            return [Unfinished(key, name) for key, name in await in_thread(files.unfinished, self._root)]

    async def discard(self, unfinished: Sequence[Unfinished]) -> None:
        """Remove temporary files and the directories that became empty."""
        with self._errors("discard", ", ".join(remnant.name for remnant in unfinished[:3])):
            await in_thread(self._discard, [remnant.name for remnant in unfinished])

    async def is_sealed(self, key: str) -> bool:
        """Whether the modes of a file, or of a directory above it, let nobody write, not even their owner.

        An administrator can write all the same. What is absent is not sealed.
        """
        path = await in_thread(self._path, key)
        return await in_thread(files.is_sealed, self._root, path)

    async def aclose(self) -> None:
        """Do nothing: no file stays open."""

    def _fill(self, key: str, start: int, outs: Sequence[memoryview]) -> int:
        return fill(self._path(key), start, outs, self._reads)

    def _delete(self, keys: Sequence[str]) -> None:
        files.unlink_all(self._root, [self._path(key) for key in keys])

    def _discard(self, names: Sequence[str]) -> None:
        """Remove temporary files; of a symbolic link the link itself, not its target. Blocks."""
        paths = [self._root / check_key(name) for name in names if name.endswith(files.TEMP_SUFFIX)]
        for folder in {path.parent for path in paths}:
            self._check_inside(folder)
        files.unlink_all(self._root, paths)

    def _path(self, key: str) -> Path:
        """Return the file of a key, or raise :class:`~bcp.errors.InputError` where it lies outside of the root.

        Blocks: it looks at every directory on the way, which may be far away.
        """
        if check_key(key).endswith(files.TEMP_SUFFIX):
            raise InputError(f"key {key!r} ends in {files.TEMP_SUFFIX!r}, as unfinished files do; use another one")
        if files.is_left_over(key.rpartition("/")[2]):
            raise InputError(f"key {key!r} looks like a deleted file of a file server; use another one")
        path = self._root / key
        self._check_inside(path)
        return path

    def _check_inside(self, path: Path) -> None:
        """Refuse a path that a symbolic link leads out of the root. Blocks."""
        real = os.path.realpath(path)
        if not Path(real).is_relative_to(os.path.realpath(self._root)):
            key = path.relative_to(self._root).as_posix()
            raise InputError(f"{self!r}: a symbolic link leads {key!r} out of the root to {real}")

    @contextmanager
    def _errors(self, operation: str, key: str, span: tuple[int, int] | None = None) -> Iterator[None]:
        """Turn the operating system's errors into those of :class:`~bcp.protocols.Backend`, and log a call that hangs.

        ``span`` is the range of bytes that the operation moves.
        """
        late = asyncio.get_running_loop().call_later(_SLOW_SECONDS, self._say_late, operation, key)
        tell = partial(self._tell, operation, key, span, time.monotonic())
        try:
            yield
        except (CorruptError, StorageError) as error:
            tell("failed", told(error))
            raise
        except OSError as error:
            if operation in ("get", "read") and isinstance(error, _ABSENT):
                tell("ok", told(error))
                raise FileNotFoundError(errno.ENOENT, f"{self!r} has no such object", key) from error
            tell("failed", told(error))
            hint = _HINTS.get(error.errno or 0, "see the system's log")
            where = "" if span is None else f" (bytes {span[0]} to {span[1]})"
            translated = StorageError(f"{self!r}: {operation} {key!r} failed: {error}{where}; {hint}")
            translated.errno = error.errno
            raise translated from error
        else:
            tell("ok", "")
        finally:
            late.cancel()

    def _tell(
        self, operation: str, key: str, span: tuple[int, int] | None, started: float, status: Status, text: str
    ) -> None:
        """Tell the observer of one call."""
        verb = "part" if operation.startswith("write part") else _VERBS.get(operation, operation)
        nbytes = 0 if span is None else span[1] - span[0]
        emit(RequestEvent(str(self._root), verb, key, nbytes, started, time.monotonic(), 1, status, text))

    def _say_late(self, operation: str, key: str) -> None:
        log.warning("a file system does not answer", root=str(self._root), operation=operation, key=key)


def _name(name: str) -> str:
    """Return a name directly below a root; raise InputError for any other key."""
    if "/" in check_key(name):
        raise InputError(f"{name!r} has to be a name without a slash")
    return name


def fixed(place: str) -> str:
    """Return a URL as it is, and a path as an absolute one without ``~``: the process may change its directory.

    Links stay as they are. Raises InputError as :func:`absolute`.

    Example:
        >>> fixed("s3://bucket/run-7")
        's3://bucket/run-7'

    """
    return place if "://" in place else os.path.abspath(absolute(place))  # noqa: PTH100 -- it follows no link


def absolute(root: str) -> Path:
    """Return a directory by its absolute path, with the home in the place of ``~``.

    Raises InputError for a name that no directory can have, and for the home of an unknown user.
    """
    if not root:
        raise InputError("the path is empty; '.' is the current directory")
    if "\0" in root:
        raise InputError(f"the path {root!r} has a NUL in it, which no file's name may have")
    try:
        os.fsencode(root)
    except UnicodeEncodeError as error:
        raise InputError(f"the path {root!r} is no file's name: {error}; correct it") from error
    try:
        return Path(root).expanduser().absolute()
    except RuntimeError as error:  # nobody of that name
        raise InputError(f"the path {root!r}: {error} Give it in full") from error


class _Parts:
    """Writes the parts of one object where they belong."""

    def __init__(self, backend: LocalBackend, key: str, file: TempFile, nbytes: int | None) -> None:
        self._backend = backend
        self._key = key
        self._file = file
        self.tiling = Tiling(f"{backend!r}, writing {key!r}", nbytes)

    @property
    def uses_cpu(self) -> bool:
        """Whether bytes go through the page cache. Direct I/O moves them without a core."""
        return self._file.way != "direct"

    async def write_part(self, index: int, offset: int, data: Buffer) -> None:
        """Write one part by one call in a thread."""
        view = flat_view(data)
        span = (offset, offset + len(view))
        with self._backend._errors(f"write part {index} of", self._key, span):  # noqa: SLF001 -- one class in two
            await in_thread(self._file.write, offset, view)
        self.tiling.add(index, offset, len(view))


async def _discard(file: TempFile, error: BaseException) -> None:
    """Remove the temporary file. If that fails too, a note on ``error`` tells it: the first error matters."""
    try:
        await in_thread(file.discard)
    except OSError as second:
        error.add_note(f"removing the unfinished file failed as well: {second}")
