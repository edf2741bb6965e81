"""HDFS for fsspec: asynchronous, over hdfs-native, with bcp's sub-files for large files.

:func:`bcp.backends.hdfs.register` makes it fsspec's file system of ``hdfs://`` URLs. An instance serves any event loop
and forked children, so fsspec's cache of instances does no harm.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import anyio
from fsspec.asyn import AsyncFileSystem, sync, sync_wrapper
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractBufferedFile

from bcp.backends.hdfs.client import BLOCK_BYTES, COPY_BYTES, SECONDS, Hdfs, Settings, Stream, in_parallel
from bcp.backends.hdfs.cluster import find_cluster
from bcp.backends.hdfs.store import as_root
from bcp.backends.hdfs.subfiles import SubFiles, temp_name
from bcp.protocols import flat_view
from bcp.runtime.threads import in_thread

__all__ = ["HdfsFile", "HdfsFileSystem"]

WRITERS = 8
"""Sub-files of one file that are written at once."""


class HdfsFileSystem(AsyncFileSystem):  # type: ignore[misc]  # fsspec has no types
    """An fsspec file system over one HDFS.

    A file appears whole when it is closed or when its call returns: it is written under a temporary name, in sub-files
    of one block each if it is large, and renamed. A rename replaces files in one step.

    Example::

        fs = HdfsFileSystem(host="namenode", port=8020)
        fs.pipe_file("/runs/7/notes", b"...")

    """

    protocol = "hdfs"
    root_marker = "/"

    def __init__(
        self,
        host: str = "",
        port: int | str | None = None,
        *,
        config: Mapping[str, str] | None = None,
        config_dir: str | None = None,
        block_bytes: int = BLOCK_BYTES,
        replication: int | None = None,
        concat: bool = True,
        seconds: float = SECONDS,
        **kwargs: Any,
    ) -> None:
        """Take the cluster's address; connects with the first request.

        Args:
            host: of the NameNode, or a name service; "" for ``fs.defaultFS``.
            port: of the NameNode; None for 8020, and for a name service.
            config: Hadoop settings by their names, before those of files.
            config_dir: folder of ``core-site.xml`` and ``hdfs-site.xml``, in place of ``$HADOOP_CONF_DIR``.
            block_bytes: see :class:`~bcp.backends.hdfs.client.Settings`, as for the three that follow.
            replication: copies of each block.
            concat: whether the NameNode puts sub-files together.
            seconds: that one request may take.
            kwargs: fsspec's own.

        """
        super().__init__(**kwargs)
        cluster = find_cluster(f"{host}:{port}" if port else host, dict(config or {}), config_dir)
        settings = Settings(block_bytes=block_bytes, replication=replication, concat=concat, seconds=seconds)
        self.hdfs = Hdfs(cluster, settings, config_dir)

    @classmethod
    def _strip_protocol(cls, path: str | list[str]) -> Any:
        """Return the absolute path within the cluster."""
        if isinstance(path, list):
            return [cls._strip_protocol(url) for url in path]
        text = os.fspath(path)
        if text.startswith("hdfs://"):
            text = text.removeprefix("hdfs://").partition("/")[2]
        return as_root(text) or "/"

    @staticmethod
    def _get_kwargs_from_urls(url: str) -> dict[str, Any]:
        """Return host and port of a URL."""
        host, _, port = url.partition("://")[2].partition("/")[0].partition(":")
        return {name: value for name, value in (("host", host), ("port", port)) if value}

    # -- names --------------------------------------------------------------------------------

    async def _info(self, path: str, **_kwargs: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        state = await self.hdfs.state(name)
        if state is None:
            raise FileNotFoundError(2, "no such file or directory", name)
        return {**_entry(name, state.is_directory, state.nbytes, state.modified), "version": state.version}

    async def _ls(self, path: str, detail: bool = True, **_kwargs: Any) -> list[Any]:  # noqa: FBT001, FBT002 -- fsspec's
        name = self._strip_protocol(path)
        entries = await self.hdfs.entries(name)
        infos = [_entry(entry.path, entry.is_directory, entry.nbytes, entry.modified) for entry in entries]
        if not infos and (info := await self._info(name))["type"] != "directory":
            infos = [info]
        return infos if detail else [info["name"] for info in infos]

    async def _mkdir(self, path: str, create_parents: bool = True, **_kwargs: Any) -> None:  # noqa: FBT001, FBT002
        await self.hdfs.make_directory(self._strip_protocol(path), parents=create_parents)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002
        name = self._strip_protocol(path)
        if not exist_ok and await self.hdfs.state(name) is not None:
            raise FileExistsError(17, "there is such a file or directory", name)
        await self.hdfs.make_directory(name)

    async def _rm_file(self, path: str, **_kwargs: Any) -> None:
        if not await self.hdfs.remove(self._strip_protocol(path)):
            raise FileNotFoundError(2, "no such file", path)

    async def _rm(self, path: str | list[str], recursive: bool = False, **_kwargs: Any) -> None:  # noqa: FBT001, FBT002
        async def remove(name: str) -> None:
            if not await self.hdfs.remove(name, recursive=recursive):
                raise FileNotFoundError(2, "no such file or directory", name)

        names = self._strip_protocol([path] if isinstance(path, str) else path)
        if any("*" in name or "?" in name or "[" in name for name in names):
            names = sorted(await self._expand_path(names), key=len, reverse=True)
        await in_parallel(remove, names)

    async def _rmdir(self, path: str) -> None:
        await self.hdfs.remove(self._strip_protocol(path))

    async def _mv_file(self, path1: str, path2: str, **_kwargs: Any) -> None:
        await self.hdfs.rename(self._strip_protocol(path1), self._strip_protocol(path2), overwrite=True)

    async def _mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        await self._mv_file(path1, path2, **kwargs)

    mv = sync_wrapper(_mv)
    rmdir = sync_wrapper(_rmdir)

    # -- contents -----------------------------------------------------------------------------

    async def _pipe_file(
        self, path: str, value: Any, mode: Literal["overwrite", "create"] = "overwrite", **_kwargs: Any
    ) -> None:
        await self._write(self._strip_protocol(path), flat_view(value), overwrite=mode != "create")

    async def _write(
        self, name: str, data: memoryview, *, overwrite: bool, progress: Callable[[int], object] | None = None
    ) -> None:
        """Write a file as sub-files of one block each."""
        files, block = SubFiles(self.hdfs, name), self.hdfs.settings.block_bytes

        async def write(first: int) -> None:
            piece = data[first : first + block]
            await files.write(first // block, first, piece)
            if progress is not None:
                progress(len(piece))

        try:
            await in_parallel(write, range(0, len(data), block), anyio.CapacityLimiter(WRITERS))
            await files.join(overwrite=overwrite)
        except BaseException:
            await files.remove_quietly()
            raise

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_kwargs: Any) -> bytes:
        opened = await self.hdfs.open(self._strip_protocol(path))
        first, last, _ = slice(start, end).indices(opened.state.nbytes)
        out = bytearray(max(last - first, 0))
        await self.hdfs.read_into(opened, first, memoryview(out))
        return bytes(out)

    async def _put_file(
        self, lpath: str, rpath: str, mode: str = "overwrite", callback: Any = DEFAULT_CALLBACK, **_kwargs: Any
    ) -> None:
        source, name = Path(lpath), self._strip_protocol(rpath)
        if await in_thread(source.is_dir):
            await self.hdfs.make_directory(name)
            return
        nbytes = (await in_thread(source.stat)).st_size
        callback.set_size(nbytes)
        if not nbytes:  # which cannot be mapped
            await self._write(name, memoryview(b""), overwrite=mode != "create")
            return
        with (
            source.open("rb") as file,  # noqa: ASYNC230 -- as fsspec's others do
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
        ):
            view = memoryview(whole)
            try:
                await self._write(name, view, overwrite=mode != "create", progress=callback.relative_update)
            finally:
                view.release()

    async def _get_file(self, rpath: str, lpath: str, callback: Any = DEFAULT_CALLBACK, **_kwargs: Any) -> None:
        name, target = self._strip_protocol(rpath), Path(lpath)
        state = await self.hdfs.state(name)
        if state is not None and state.is_directory:
            await in_thread(lambda: target.mkdir(parents=True, exist_ok=True))
            return
        opened = await self.hdfs.open(name)
        callback.set_size(opened.state.nbytes)
        await in_thread(lambda: target.parent.mkdir(parents=True, exist_ok=True))
        with target.open("wb") as file:  # noqa: ASYNC230 -- as above
            for first in range(0, opened.state.nbytes, 8 * COPY_BYTES):
                piece = memoryview(bytearray(min(8 * COPY_BYTES, opened.state.nbytes - first)))
                await self.hdfs.read_into(opened, first, piece)
                await in_thread(file.write, piece)
                callback.relative_update(len(piece))

    async def _cp_file(self, path1: str, path2: str, **_kwargs: Any) -> None:
        source, final = self._strip_protocol(path1), self._strip_protocol(path2)
        state = await self.hdfs.state(source)
        if state is not None and state.is_directory:
            await self.hdfs.make_directory(final)
            return
        opened = await self.hdfs.open(source)
        temp = temp_name(final)
        try:
            stream = await self.hdfs.create(temp, create_parent=True)
            for first in range(0, opened.state.nbytes, 8 * COPY_BYTES):
                piece = memoryview(bytearray(min(8 * COPY_BYTES, opened.state.nbytes - first)))
                await self.hdfs.read_into(opened, first, piece)
                await stream.write(piece)
            await self._end(stream, temp, final, overwrite=True)
        except BaseException:
            await self.hdfs.remove_quietly([temp])
            raise

    async def _end(self, stream: Stream, temp: str, final: str, *, overwrite: bool) -> None:
        """Close a temporary file and rename it."""
        await stream.close()
        state = await self.hdfs.state(temp)
        if state is None:
            raise FileNotFoundError(2, "another process has removed it", temp)
        await self.hdfs.place(temp, state, final, overwrite=overwrite)

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self.hdfs.aclose()

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> HdfsFile:
        return HdfsFile(self, path, mode, block_size or "default", **kwargs)

    def created(self, path: str) -> Any:
        """Raise NotImplementedError: HDFS does not say when a file was made."""
        raise NotImplementedError(f"HDFS does not say when {path} was made")


class HdfsFile(AbstractBufferedFile):  # type: ignore[misc]  # as above
    """A file that is read in ranges, or written as one stream; for code that is not asynchronous.

    A reader sees the file as it was when it was opened. A new file appears when it is closed.
    """

    DEFAULT_BLOCK_SIZE = COPY_BYTES

    def _sync(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return sync(self.fs.loop, function, *args, **kwargs)

    def _fetch_range(self, start: int, end: int) -> bytes:
        hdfs: Hdfs = self.fs.hdfs
        version = self.details.get("version")
        opened = self._sync(hdfs.open, self.path, version)
        if version is not None and opened.state.version != version:
            raise OSError(116, "the file was replaced while it was being read", self.path)
        out = bytearray(end - start)
        count: int = self._sync(hdfs.read_into, opened, start, memoryview(out))
        return bytes(out[:count])

    def _initiate_upload(self) -> None:
        if self.mode == "ab":
            raise NotImplementedError("a file that bcp writes to HDFS cannot be appended to")
        self._temp = temp_name(self.path)
        self._stream: Stream | None = self._sync(self.fs.hdfs.create, self._temp, create_parent=True)

    def _upload_chunk(self, final: bool = False) -> bool:  # noqa: FBT001, FBT002 -- fsspec's
        assert self._stream is not None  # noqa: S101 -- fsspec has called _initiate_upload
        self._sync(self._stream.write, self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        """Let the file appear."""
        if self._stream is not None:
            self._sync(self.fs._end, self._stream, self._temp, self.path, overwrite=self.mode != "xb")  # noqa: SLF001
            self._stream = None

    def discard(self) -> None:
        """Drop the written bytes."""
        self._stream = None
        with suppress(OSError):
            self._sync(self.fs.hdfs.remove, self._temp)


def _entry(name: str, is_directory: bool, nbytes: int, modified: int) -> dict[str, Any]:  # noqa: FBT001 -- of one use
    kind = "directory" if is_directory else "file"
    return {"name": name, "size": 0 if is_directory else nbytes, "type": kind, "mtime": modified / 1000}
