"""Large files as sub-files that are written at once, concatenated and renamed (paper sec. 4.3).

A file of HDFS is written from its beginning to its end by one client. So each part is a file of its own,
``/dir/.NAME.ID-00003-1.bcp-tmp``, in the directory of the file that it will be a piece of. The NameNode puts them
together without a copy; then the first one, which has all bytes now, is renamed over the final name.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
from contextlib import suppress
from itertools import accumulate

import anyio

from bcp._log import log
from bcp.backends.files import TEMP_SUFFIX
from bcp.backends.hdfs.client import CLEAN_UP_SECONDS, COPY_BYTES, Hdfs, in_parallel
from bcp.backends.hdfs.cluster import FileState, ServiceAbsentError
from bcp.backends.hdfs.faults import HdfsError
from bcp.backends.hdfs.wire import Call
from bcp.errors import CorruptError

__all__ = ["SubFiles", "temp_name"]

AT_ONCE = 500
"""Sub-files of one concat; the NameNode answers nobody else meanwhile, for 0.07 ms a sub-file."""


def temp_name(final: str, suffix: str = "") -> str:
    """Return an unused name next to a file."""
    folder, _, name = final.rpartition("/")
    return f"{folder}/.{name}.{secrets.token_hex(12)}{suffix}{TEMP_SUFFIX}"


class SubFiles:
    """The sub-files of one file. They may be written at once and in any order, each again after an error.

    Attributes:
        final: the name that the file will have.
    """

    def __init__(self, hdfs: Hdfs, final: str) -> None:
        self.final = final
        self._hdfs = hdfs
        self._stem = temp_name(final).removesuffix(TEMP_SUFFIX)
        self._created: list[str] = []
        self._parts: dict[int, tuple[int, str, int]] = {}  # index: offset, name, bytes
        self._calls: dict[int, Call] = {}
        self._whole: FileState | None = None
        self._merge: asyncio.Task[str] | None = None

    def __repr__(self) -> str:
        return f"<SubFiles of {self.final}: {len(self._parts)}>"

    async def write(self, index: int, offset: int, data: memoryview) -> None:
        """Write one sub-file, whose first byte is byte ``offset`` of the file. Each attempt has a name of its own.

        A request of an attempt that was given up may still reach the NameNode, and must not hit a later attempt's file.
        """
        name = f"{self._stem}-{index:05d}-{len(self._created)}{TEMP_SUFFIX}"
        self._created.append(name)
        await self._hdfs.write(name, data, create_parent=True)
        self._parts[index] = offset, name, len(data)

    async def join(self, *, overwrite: bool = True) -> None:
        """Let the file appear. May be called again after an error, and carries on then.

        Raises:
            FileNotFoundError: a sub-file is gone.
            CorruptError: the NameNode has another number of bytes than were written.
            FileExistsError: there is a file, and ``overwrite`` is False.
            OSError: a request failed.

        """
        if not self._parts:
            await self.write(0, 0, memoryview(b""))
        parts = sorted(self._parts.values())
        parts = [part for part in parts if part[2]] or parts[:1]  # concat refuses empty files
        names, sizes = [name for _, name, _ in parts], [nbytes for _, _, nbytes in parts]
        name = await self._joined(names, sizes)
        state = await self._hdfs.state(name) or self._whole
        if state is None:
            raise _gone(name)
        if state.nbytes != sum(sizes):
            raise CorruptError(f"{self.final}: HDFS has {state.nbytes} bytes and not {sum(sizes)}; save again")
        self._whole = state
        await self._hdfs.place(name, state, self.final, overwrite=overwrite)
        gone = {name} if self._merge is not None else set(names)
        if rest := [temp for temp in self._created if temp not in gone]:  # of attempts that failed, or copied
            await self._hdfs.remove_quietly(rest)

    async def _joined(self, names: list[str], sizes: list[int]) -> str:
        """Put the sub-files together; return the name of the file that has all bytes."""
        if self._whole is not None or len(names) == 1:
            return self._merge.result() if self._merge is not None else names[0]
        if self._merge is None:
            try:
                await self._concat(names, sizes)
            except (ServiceAbsentError, HdfsError) as error:
                if isinstance(error, HdfsError) and error.transient:
                    raise
                log.info("HDFS refuses to concatenate; one stream copies", file=self.final, said=str(error))
                self._merge = asyncio.create_task(self._copied(names), name="merge of sub-files")
            else:
                return names[0]
        try:
            return await asyncio.shield(self._merge)
        except OSError:
            self._merge = None
            raise

    async def _concat(self, names: list[str], sizes: list[int]) -> None:
        """Let the NameNode append all sub-files to the first one, some hundred at a time."""
        ends = list(accumulate(sizes))
        done = 1
        if self._calls:  # an earlier attempt failed; it may have done some of it
            state = await self._hdfs.state(names[0])
            if state is None:
                raise _gone(names[0])
            if state.nbytes not in ends:
                raise CorruptError(f"{self.final}: sub-files of {sizes} bytes became one of {state.nbytes}; save again")
            done = ends.index(state.nbytes) + 1
        while done < len(names):
            if done not in self._calls:
                self._calls[done] = await self._hdfs.new_call()
            await self._hdfs.concat(names[0], names[done : done + AT_ONCE], self._calls[done])
            done = min(done + AT_ONCE, len(names))

    async def _copied(self, names: list[str]) -> str:
        """Copy all sub-files into one file, by one stream; return its name."""
        whole = f"{self._stem}-whole-{len(self._created)}{TEMP_SUFFIX}"
        self._created.append(whole)
        try:
            stream = await self._hdfs.create(whole, create_parent=False)
            for name in names:
                opened = await self._hdfs.open(name)
                for first in range(0, opened.state.nbytes, COPY_BYTES):
                    piece = memoryview(bytearray(min(COPY_BYTES, opened.state.nbytes - first)))
                    await self._hdfs.read_into(opened, first, piece)
                    await stream.write(piece)
            await stream.close()
        except BaseException:
            await self._hdfs.remove_quietly([whole])
            raise
        return whole

    async def remove(self) -> None:
        """Remove all sub-files that are still there; the file itself is left alone."""
        if self._merge is not None:
            self._merge.cancel()
            await asyncio.wait([self._merge])
            if not self._merge.cancelled():
                self._merge.exception()  # was raised already
        await in_parallel(self._hdfs.remove, self._created)

    async def remove_quietly(self) -> None:
        """Remove them after an error, also if this task is cancelled; some may stay if the NameNode is away."""
        with anyio.move_on_after(CLEAN_UP_SECONDS, shield=True), suppress(OSError):
            await self.remove()


def _gone(name: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, f"{name} is gone: another process has removed it")
