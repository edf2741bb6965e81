"""Objects below one directory of HDFS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from bcp.backends.files import TEMP_SUFFIX, final_name
from bcp.backends.hdfs import conditional
from bcp.backends.hdfs.client import Entry, Hdfs, in_parallel
from bcp.backends.hdfs.faults import HdfsError, request_errors
from bcp.backends.hdfs.subfiles import SubFiles, temp_name
from bcp.backends.keys import check_key
from bcp.backends.objects.store import ConditionError, If, Stat
from bcp.backends.small import check_small
from bcp.errors import InputError
from bcp.protocols import ObjectInfo, Unfinished, Version

__all__ = ["HdfsStore", "HdfsUpload", "as_root"]

MIB = 1 << 20


class HdfsStore:
    """A :class:`~bcp.backends.objects.Store`: an object is a file below a directory.

    A file is written under a temporary name in its own directory, and renamed over the final one. The NameNode makes
    the directory in the same request. A large file is put together from sub-files. Files whose names end in
    ``.bcp-tmp`` are not finished: no list has them, and ``unfinished`` does.

    Attributes:
        name: URL of the directory.
        least_part: smaller parts are put together first: each one becomes a block, of which the NameNode has only so
            many.
        most_part: of any size.
        most_parts: so many blocks a file may have, by Hadoop's own setting.
    """

    least_part = 8 * MIB
    most_part = 1 << 40
    most_parts = 10_000
    most_keys = 1000
    at_once = 4

    def __init__(self, hdfs: Hdfs, root: str) -> None:
        self.hdfs = hdfs
        self._root = root
        self.name = f"{hdfs.cluster.url}{root}"

    def __repr__(self) -> str:
        return f"HdfsStore({self.name})"

    # -- objects ------------------------------------------------------------------------------

    async def put(self, key: str, data: memoryview, condition: If | None = None) -> Version:
        """Store an object by a temporary file and a rename."""
        final = self._path(key)
        with request_errors(absent=False):
            if condition is not None:
                return await conditional.put_if(self.hdfs, final, data, condition.version)
            temp = temp_name(final)
            try:
                state = await conditional.write_checked(self.hdfs, temp, data, create_parent=True)
                await self.hdfs.place(temp, state, final, overwrite=True)
            except BaseException:
                await self.hdfs.remove_quietly([temp])
                raise
            return state.version

    async def stat(self, key: str) -> Stat | None:
        """Return size and version of an object."""
        with request_errors(absent=True):
            state = await self.hdfs.state(self._path(key))
        return None if state is None or state.is_directory else Stat(state.nbytes, state.version)

    async def get(self, key: str) -> tuple[bytes, Version]:
        """Read an object whole."""
        with request_errors(absent=True):
            opened = await self.hdfs.open(self._path(key))
            check_small(f"{self!r}: {key!r}", opened.state.nbytes)
            out = bytearray(opened.state.nbytes)
            await self.hdfs.read_into(opened, 0, memoryview(out))
        return bytes(out), opened.state.version

    async def read(self, key: str, start: int, out: memoryview, version: Version | None) -> tuple[int, Version]:
        """Fill ``out`` from byte ``start`` on. Blocks of another version are never read."""
        with request_errors(absent=True):
            opened = await self.hdfs.open(self._path(key), version)
            if version not in (None, opened.state.version):
                raise ConditionError
            return await self.hdfs.read_into(opened, start, out), opened.state.version

    async def list(self, prefix: str, after: str | None) -> tuple[Sequence[ObjectInfo], str | None]:  # noqa: ARG002
        """List objects, directory by directory; all are one page."""
        with request_errors(absent=False):
            entries = [(self._key(entry.path), entry) async for entry in self._files(prefix.rpartition("/")[0])]
        objects = [(key, entry) for key, entry in entries if key.startswith(prefix) and not key.endswith(TEMP_SUFFIX)]
        return [ObjectInfo(key, entry.nbytes, entry.modified / 1000) for key, entry in objects], None

    async def folders(self, prefix: str, after: str | None) -> tuple[Sequence[str], str | None]:  # noqa: ARG002
        """List the directories in one directory; all are one page."""
        with request_errors(absent=False):
            try:
                entries = await self.hdfs.entries(f"{self._root}/{prefix}".rstrip("/") or "/")
            except FileNotFoundError:
                return [], None
        return [entry.path.rpartition("/")[2] for entry in entries if entry.is_directory], None

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, and the directories that became empty."""
        with request_errors(absent=False):
            await self._remove([self._path(key) for key in keys])

    # -- large objects ------------------------------------------------------------------------

    async def begin(self, key: str, nbytes: int | None) -> HdfsUpload:  # noqa: ARG002 -- the protocol's
        """Begin to upload an object; makes no request."""
        return HdfsUpload(self, SubFiles(self.hdfs, self._path(key)))

    async def unfinished(self, after: str | None) -> tuple[Sequence[Unfinished], str | None]:  # noqa: ARG002
        """List temporary files and claims; all are one page."""
        with request_errors(absent=False):
            keys = [self._key(entry.path) async for entry in self._files("") if entry.path.endswith(TEMP_SUFFIX)]
        return [Unfinished(_final_key(key), key) for key in keys], None

    async def discard(self, unfinished: Unfinished) -> None:
        """Remove one of them, and the directories that became empty."""
        if unfinished.name.endswith(TEMP_SUFFIX):
            with request_errors(absent=False):
                await self._remove([f"{self._root}/{check_key(unfinished.name)}"])

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self.hdfs.aclose()

    # -- names --------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        if key.endswith(TEMP_SUFFIX):
            raise InputError(f"key {key!r} ends in {TEMP_SUFFIX!r}, as unfinished files do; use another one")
        return f"{self._root}/{key}"

    def _key(self, path: str) -> str:
        return path[len(self._root) + 1 :]

    async def _files(self, above: str) -> AsyncIterator[Entry]:
        """List the files below a directory of the root; directories that vanish meanwhile are left out."""
        folders = [f"{self._root}/{above}".rstrip("/") or "/"]
        while folders:
            folder = folders.pop()
            try:
                entries = await self.hdfs.entries(folder)
            except FileNotFoundError:
                continue
            for entry in entries:
                if entry.is_directory:
                    folders.append(entry.path)
                else:
                    yield entry

    async def _remove(self, paths: Sequence[str]) -> None:
        async def remove(path: str) -> None:
            try:
                await self.hdfs.remove(path)
            except HdfsError as error:
                if error.java != "PathIsNotEmptyDirectoryException":  # no object, but the directory of some
                    raise

        await in_parallel(remove, paths)
        await self.prune({path.rpartition("/")[0] for path in paths})

    async def prune(self, folders: set[str]) -> None:
        """Remove directories and those above them, below the root, as far as they are empty."""
        while folders:
            removed = set()
            for folder in sorted(folders, key=len, reverse=True):
                if not folder.startswith(f"{self._root}/"):
                    continue
                try:
                    await self.hdfs.remove(folder)
                except HdfsError as error:
                    if error.transient:
                        raise
                    continue  # it is not empty
                removed.add(folder.rpartition("/")[0])
            folders = removed


class HdfsUpload:
    """An :class:`~bcp.backends.objects.Upload`: each part is a sub-file."""

    def __init__(self, store: HdfsStore, files: SubFiles) -> None:
        self._store = store
        self._files = files

    def __repr__(self) -> str:
        return f"HdfsUpload({self._files!r})"

    async def part(self, index: int, offset: int, data: memoryview) -> None:
        """Write a sub-file. The DataNodes compare a checksum of every 512 bytes."""
        with request_errors(absent=False):
            await self._files.write(index, offset, data)

    async def finish(self) -> None:
        """Put the sub-files together and rename them."""
        with request_errors(absent=False):
            await self._files.join()

    async def abort(self) -> None:
        """Remove the sub-files, and directories that were made for them."""
        with request_errors(absent=False):
            await self._files.remove()
            await self._store.prune({self._files.final.rpartition("/")[0]})


def _final_key(temp: str) -> str:
    """Return the key of the object that a temporary file belongs to."""
    folder, slash, name = temp.rpartition("/")
    return f"{folder}{slash}{final_name(name)}"


def as_root(path: str) -> str:
    """Return the path of a URL as a directory: absolute, without a slash at its end; "" for the whole HDFS."""
    segments = [segment for segment in path.split("/") if segment]
    if "." in segments or ".." in segments or "\0" in path:
        raise InputError(f"the path {path!r} has '.', '..' or NUL in it; write it in full")
    return "".join(f"/{segment}" for segment in segments)
