"""Requests to one HDFS: hdfs-native for data and names, our own protocol for the rest."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio import to_thread

from bcp.backends.hdfs.cluster import Cluster, FileState, NameNodes, ServiceAbsentError, user_name
from bcp.backends.hdfs.faults import HdfsError, hdfs_errors
from bcp.backends.hdfs.native import hdfs_native, native_client, transfer_loop, wait_after_fork
from bcp.backends.hdfs.wire import Call
from bcp.backends.keys import scatter
from bcp.backends.objects.session import PerLoop
from bcp.errors import InputError
from bcp.protocols import flat_view
from bcp.runtime.threads import on_loop

__all__ = [
    "BLOCK_BYTES",
    "CLEAN_UP_SECONDS",
    "COPY_BYTES",
    "SECONDS",
    "Entry",
    "Hdfs",
    "OpenFile",
    "Settings",
    "Stream",
    "in_parallel",
]

T = TypeVar("T")
MIB = 1 << 20
BLOCK_BYTES = 128 * MIB
WRITE_BYTES = MIB
"""Bytes of one call to hdfs-native: copied to ``bytes`` first, for of a memoryview it takes each byte by itself."""

SMALL_BYTES = MIB // 4
"""Most bytes of a read on the caller's own event loop."""

READ_BYTES = MIB
"""Bytes of one ranged read. hdfs-native returns new ``bytes``, and 8 MiB took twice the CPU time of 1 MiB."""

READS = 8
WRITES = 64
"""Calls at once, in threads, which mostly wait. Abandoned calls do not count."""

AT_ONCE = 16
COPY_BYTES = 8 * MIB
SECONDS = 120.0
CLEAN_UP_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How files are written.

    Attributes:
        block_bytes: size of a block; also the size of the sub-files of large files that are written at once.
        replication: copies of each block; None for the cluster's default.
        concat: whether sub-files are put together by the NameNode; False for servers that cannot, as some that only
            speak HDFS's protocol.
        seconds: that one request to hdfs-native may take, which has no deadline of its own.
    """

    block_bytes: int = BLOCK_BYTES
    replication: int | None = None
    concat: bool = True
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        if self.block_bytes < MIB or self.block_bytes % MIB:
            raise InputError(f"block_bytes={self.block_bytes} has to be a multiple of 1 MiB")
        if self.replication is not None and self.replication < 1:
            raise InputError(f"replication={self.replication} has to be positive")
        if not self.seconds > 0:
            raise InputError(f"seconds={self.seconds} has to be positive")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory: its whole path, whether it is a directory, its bytes, and when it was changed in ms."""

    path: str
    is_directory: bool
    nbytes: int
    modified: int


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file as it was when it was opened: later ones of the same name have other blocks."""

    path: str
    reader: Any
    state: FileState


@dataclass(slots=True)
class _Session:
    """Connections of one event loop and process.

    Attributes:
        client: for coroutines.
        writing: for blocking calls of writers, in threads.
        names: the NameNodes.
        reads: how many ranges of files are read at once.
        writes: how many threads write at once.
    """

    client: Any
    writing: Any
    names: NameNodes
    reads: anyio.CapacityLimiter
    writes: anyio.CapacityLimiter
    has_states: bool = True
    open_files: dict[str, OpenFile] = field(default_factory=dict)


def _nothing() -> None:
    """Close nothing."""


class Stream:
    """A file that is being written from its beginning to its end.

    Its blocking calls run in threads. A coroutine of hdfs-native 0.14 that writes can freeze the whole process: it
    waits for a lock with the GIL held, while the thread that has the lock waits for the GIL to wake the coroutine. It
    happened as DataNodes died. A thread whose call takes too long is abandoned. The call may go on for long.

    A writer of hdfs-native closes its file when it is collected, on whatever thread that happens. On the event loop
    this held up everything for minutes, so a writer that was dropped closes nothing.
    """

    def __init__(self, hdfs: Hdfs, path: str, writer: Any, threads: anyio.CapacityLimiter) -> None:
        self._hdfs = hdfs
        self._path = path
        self._writer = writer
        self._end = writer.close
        self._threads = threads
        vars(writer)["close"] = _nothing

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes, a copy of them. The buffer is not used any more when this returns or raises."""
        view = flat_view(data)
        for first in range(0, len(view), WRITE_BYTES):
            chunk = bytes(view[first : first + WRITE_BYTES])
            await self._call(f"writing {self._path}", self._writer.write, chunk)

    async def close(self) -> None:
        """Wait until the DataNodes have all bytes, and end the file."""
        await self._call(f"closing {self._path}", self._end)

    async def _call(self, description: str, function: Callable[..., object], *args: bytes) -> None:
        async with self._hdfs.request(description):
            await to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=self._threads)


class Hdfs:
    """One HDFS, for any event loop and for forked children.

    Attributes:
        cluster: its NameNodes.
        settings: how files are written.
    """

    def __init__(self, cluster: Cluster, settings: Settings | None = None, config_dir: str | None = None) -> None:
        self.cluster = cluster
        self.settings = settings or Settings()
        self._config_dir = config_dir
        self._user = user_name()
        self._sessions: PerLoop[_Session] = PerLoop(self._open_session, _close_session)

    def __repr__(self) -> str:
        return f"Hdfs({self.cluster.url})"

    @asynccontextmanager
    async def request(self, description: str) -> AsyncIterator[None]:
        """Make a request of hdfs-native within its deadline, and translate its errors."""
        with hdfs_errors(description), anyio.fail_after(self.settings.seconds):
            yield

    # -- files --------------------------------------------------------------------------------

    async def create(self, path: str, *, create_parent: bool) -> Stream:
        """Begin a file; one of that name is replaced. ``create_parent``: make the directories that it needs."""
        session = await self._sessions.here()
        options = hdfs_native().WriteOptions(
            block_size=self.settings.block_bytes,
            replication=self.settings.replication,
            overwrite=True,
            create_parent=create_parent,
        )
        async with self.request(f"creating {path}"):
            create = partial(session.writing.create, path, options)
            writer = await to_thread.run_sync(create, abandon_on_cancel=True, limiter=session.writes)
        return Stream(self, path, writer, session.writes)

    async def write(self, path: str, data: memoryview, *, create_parent: bool) -> None:
        """Write a whole file. After an error or cancellation it is removed, unless that fails too."""
        try:
            stream = await self.create(path, create_parent=create_parent)
            await stream.write(data)
            await stream.close()
        except BaseException:
            await self.remove_quietly([path])
            raise

    async def open(self, path: str, version: str | None = None) -> OpenFile:
        """Open a file for reads of one version, or return it from the last time.

        Args:
            path: the file.
            version: if the file is still open in this version, nobody is asked.

        Raises:
            FileNotFoundError: there is no such file.

        """
        session = await self._sessions.here()
        known = session.open_files.get(path)
        if known is not None and known.state.version == version:
            return known
        before = await self._file_state(path)
        if known is not None and known.state.version == before.version:
            return known
        async with self.request(f"opening {path}"):
            reader = await session.client.read(path)
        if await self._file_state(path) != before:
            raise HdfsError(errno.EAGAIN, f"{path} was replaced while it was being opened", transient=True)
        if len(session.open_files) >= 256:  # noqa: PLR2004 -- block lists of as many files
            session.open_files.pop(next(iter(session.open_files)))
        opened = session.open_files[path] = OpenFile(path, reader, before)
        return opened

    async def read_into(self, opened: OpenFile, start: int, out: memoryview) -> int:
        """Fill a buffer from byte ``start`` on by ranged reads at once; return how many bytes there were."""
        nbytes = min(len(out), opened.state.nbytes - start)  # hdfs-native panics beyond the end
        if nbytes <= 0:
            return 0
        session = await self._sessions.here()
        await wait_after_fork()

        async def read(first: int) -> None:
            count = min(READ_BYTES, nbytes - first)
            async with self.request(f"reading {count} bytes from byte {start + first} of {opened.path}"):
                data = await opened.reader.read_range(start + first, count)
            scatter(memoryview(data), [out[first : first + count]])

        async def read_all() -> None:
            await in_parallel(read, range(0, nbytes, READ_BYTES), session.reads)

        try:
            if nbytes <= SMALL_BYTES:
                await read(0)
            else:
                await on_loop(transfer_loop(), read_all)
        except BaseException:
            session.open_files.pop(opened.path, None)  # its blocks may have moved
            raise
        return nbytes

    async def _file_state(self, path: str) -> FileState:
        state = await self.state(path)
        if state is None or state.is_directory:
            raise FileNotFoundError(errno.ENOENT, f"{self.cluster.url}{path} is no file")
        return state

    # -- names --------------------------------------------------------------------------------

    async def state(self, path: str) -> FileState | None:
        """Return the state of a file or directory; None if there is none."""
        session = await self._sessions.here()
        if session.has_states:
            try:
                return await session.names.state(path)
            except ServiceAbsentError:
                session.has_states = False
        try:
            async with self.request(f"looking for {path}"):
                status = await session.client.get_file_info(path)
        except FileNotFoundError:
            return None
        return FileState(status.length, status.isdir, status.modification_time, 0)

    async def entries(self, path: str) -> list[Entry]:
        """List a directory. FileNotFoundError if there is none."""
        client = (await self._sessions.here()).client
        async with self.request(f"listing {path}"):
            return [
                Entry(status.path, status.isdir, status.length, status.modification_time)
                async for status in client.list_status(path)
                if status.path != path  # of a file: itself
            ]

    async def make_directory(self, path: str, *, parents: bool = True) -> None:
        """Make a directory; one that is there is no error."""
        client = (await self._sessions.here()).client
        async with self.request(f"making {path}"):
            await client.mkdirs(path, create_parent=parents)

    async def rename(self, old: str, new: str, *, overwrite: bool) -> None:
        """Rename a file or directory in one step. ``overwrite``: a file of that name is replaced.

        Raises:
            FileExistsError: there is something of that name.
            FileNotFoundError: there is no ``old``; after a lost answer also because it was renamed.

        """
        client = (await self._sessions.here()).client
        async with self.request(f"renaming {old} to {new}"):
            await client.rename(old, new, overwrite)

    async def place(self, temp: str, state: FileState, final: str, *, overwrite: bool) -> None:
        """Rename a temporary file of that state, unless that was done by a request whose answer was lost."""
        try:
            await self.rename(temp, final, overwrite=overwrite)
        except (FileNotFoundError, FileExistsError):
            now = await self.state(final)
            if now is None or now.version != state.version:
                raise

    async def remove(self, path: str, *, recursive: bool = False) -> bool:
        """Remove a file or an empty directory; return False if there was none."""
        client = (await self._sessions.here()).client
        async with self.request(f"removing {path}"):
            return bool(await client.delete(path, recursive))

    async def remove_quietly(self, paths: Sequence[str]) -> None:
        """Remove files after an error, also if this task is cancelled; some may stay if the NameNode is away."""
        with anyio.move_on_after(CLEAN_UP_SECONDS, shield=True):
            for path in paths:
                try:
                    await self.remove(path)
                except OSError:
                    return

    async def new_call(self) -> Call:
        """Return the number of a new request, by which it can be made again on the same event loop."""
        return (await self._sessions.here()).names.new_call()

    async def concat(self, target: str, sources: Sequence[str], call: Call) -> None:
        """Append files to another one in the same directory; see :meth:`NameNodes.concat`."""
        if not self.settings.concat:
            raise ServiceAbsentError("concat is switched off")
        await (await self._sessions.here()).names.concat(target, sources, call)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._sessions.aclose()

    async def _open_session(self) -> _Session:
        native = hdfs_native()
        client, writing = (
            native_client(kind, self.cluster.url, self.cluster.settings, self._config_dir)
            for kind in (native.AsyncClient, native.Client)
        )
        names = NameNodes(self.cluster, self._user)
        return _Session(client, writing, names, anyio.CapacityLimiter(READS), anyio.CapacityLimiter(WRITES))


async def _close_session(session: _Session) -> None:
    session.names.close()
    session.open_files.clear()


async def in_parallel(
    work: Callable[[T], Awaitable[object]], items: Iterable[T], limit: anyio.CapacityLimiter | None = None
) -> None:
    """Do the same with many things at once; the first error is raised as it is, when all others have ended."""
    limit = limit or anyio.CapacityLimiter(AT_ONCE)

    async def one(item: T) -> None:
        async with limit:
            await work(item)

    try:
        async with anyio.create_task_group() as group:
            for item in items:
                group.start_soon(one, item)
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
