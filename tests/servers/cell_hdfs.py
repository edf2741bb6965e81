"""HDFS through a client whose requests get chosen answers, as ``benchmarks.commit_table`` takes it."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from servers.cell_names import without_ids
from servers.hdfs_clients import names as hdfs_names

from bcp.backends.hdfs import open_hdfs
from bcp.backends.hdfs.client import Entry, Hdfs, Settings, Stream
from bcp.backends.hdfs.cluster import FileState
from bcp.backends.hdfs.faults import HdfsError
from bcp.backends.hdfs.store import HdfsStore, as_root
from bcp.backends.hdfs.wire import Call
from bcp.backends.objects import ObjectBackend
from bcp.protocols import Backend
from benchmarks.commit_table.cells import Answer, Fault, Faults
from benchmarks.commit_table.trial import POLICY


class FaultyHdfs(Hdfs):
    """A client whose requests get chosen answers."""

    faults = Faults()
    requests: list[str]
    root: str
    seen: dict[str, Any]

    async def create(self, path: str, *, create_parent: bool) -> Stream:
        return await self._answered("create", path, partial(super().create, path, create_parent=create_parent))

    async def state(self, path: str) -> FileState | None:
        return await self._answered("state", path, partial(super().state, path))

    async def entries(self, path: str) -> list[Entry]:
        return await self._answered("list", path, partial(super().entries, path))

    async def rename(self, old: str, new: str, *, overwrite: bool) -> None:
        await self._answered("rename", new, partial(super().rename, old, new, overwrite=overwrite))

    async def remove(self, path: str, *, recursive: bool = False) -> bool:
        return await self._answered("remove", path, partial(super().remove, path, recursive=recursive))

    async def concat(self, target: str, sources: Sequence[str], call: Call) -> None:
        await self._answered("concat", target, partial(super().concat, target, sources, call))

    async def _answered(self, call: str, path: str, request: Callable[[], Awaitable[Any]]) -> Any:
        kind = f"{call} {without_ids(path.removeprefix(self.root).removeprefix('/'))}"
        self.requests.append(kind)
        fault = self.faults.take(kind)
        if fault is None:
            return await request()
        if fault.answer.acted:
            answer = await request()
            if fault.answer.name == "twice":
                return await request()
            if isinstance(answer, Stream):
                await answer.close()
        if fault.answer.name == "stale":
            return None if call == "state" else []
        raise _HDFS_ERRORS[fault.answer.name]


_HDFS_ERRORS: dict[str, Exception] = {
    "lost": ConnectionResetError("chosen"),
    "late": TimeoutError("chosen"),
    "refused": PermissionError(errno.EACCES, "AccessControlException: chosen"),
    "absent": FileNotFoundError(errno.ENOENT, "FileNotFoundException: chosen"),
    "taken": FileExistsError(errno.EEXIST, "FileAlreadyExistsException: chosen"),
    "busy": HdfsError(errno.EAGAIN, "SafeModeException: chosen", java="SafeModeException", transient=True),
    "failed": HdfsError(errno.EIO, "IOException: chosen", java=""),
}


class HdfsWire:
    """One directory of HDFS."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.calm = open_hdfs(url, {}, POLICY)
        self._hdfs: FaultyHdfs | None = None

    def backend(self) -> Backend:
        calm = self.calm.store
        assert isinstance(calm, HdfsStore)
        root = as_root(self._url.partition("://")[2].partition("/")[2])
        hdfs = FaultyHdfs(calm.hdfs.cluster, Settings(seconds=20.0))
        hdfs.root, hdfs.requests, hdfs.faults = root, [], Faults()
        self._hdfs = hdfs
        return ObjectBackend(HdfsStore(hdfs, root), POLICY)

    def arm(self, faults: Sequence[Fault]) -> None:
        assert self._hdfs is not None
        self._hdfs.faults.arm(faults)

    def disarm(self) -> tuple[list[str], list[int]]:
        assert self._hdfs is not None
        return list(self._hdfs.requests), self._hdfs.faults.disarm()

    async def names(self) -> Sequence[str]:
        names = await hdfs_names(self.calm)
        await self.calm.aclose()
        return names


class HdfsServers:
    """Real servers of HDFS, with a client that gets other answers."""

    name = "HDFS"
    at_once = 3

    def __init__(self, url: str) -> None:
        self._url = url

    def wire(self) -> HdfsWire:
        return HdfsWire(f"{self._url}/cells/{secrets.token_hex(6)}")

    def answers(self, request: str) -> Sequence[Answer]:
        call = request.partition(" ")[0]
        acted = (False,) if call in ("state", "list") else (False, True)
        answers = [Answer(name, acted=done) for name in _HDFS_ERRORS for done in acted]
        return [*answers, Answer("stale") if len(acted) == 1 else Answer("twice", acted=True)]

    def doubts(self) -> Sequence[Fault]:
        answers = [Answer(name, acted=True) for name in ("lost", "absent", "taken")] + [Answer("taken")]
        return [Fault("rename metadata.arrow", answer) for answer in answers]

    async def aclose(self) -> None:
        return
