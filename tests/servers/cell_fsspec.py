"""A file system of fsspec whose calls get chosen answers, as ``benchmarks.commit_table`` takes it."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from servers.cell_names import without_ids

from bcp.backends import resolve
from bcp.backends.objects import ObjectBackend
from bcp.protocols import Backend
from benchmarks.commit_table.cells import Answer, Fault, Faults
from benchmarks.commit_table.trial import POLICY

_ERRORS: dict[str, Callable[[], Exception]] = {
    "lost": lambda: ConnectionResetError("chosen"),
    "refused": lambda: PermissionError(errno.EACCES, "chosen"),
    "absent": lambda: FileNotFoundError(errno.ENOENT, "chosen"),
    "taken": lambda: FileExistsError(errno.EEXIST, "chosen"),
    "failed": lambda: OSError(errno.EIO, "chosen"),
}
_READS = ("cat_file", "exists", "find", "info", "isdir")


class CellSystem(MemoryFileSystem):  # type: ignore[misc]
    """Objects in memory; calls of paths with a token of a wire get its answers."""

    protocol = "cells"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    wires: ClassVar[dict[str, CellWire]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("cells://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **how: Any) -> Any:
        return self._answered("pipe_file", path, partial(super().pipe_file, path, value, mode, **how))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **how: Any) -> Any:
        return self._answered("cat_file", path, partial(super().cat_file, path, start, end, **how))

    def info(self, path: str, **how: Any) -> Any:
        return self._answered("info", path, partial(super().info, path, **how))

    def exists(self, path: str, **how: Any) -> Any:
        return self._answered("exists", path, partial(super().exists, path, **how))

    def find(self, path: str, *args: Any, **how: Any) -> Any:
        return self._answered("find", path, partial(super().find, path, *args, **how))

    def mv(self, path1: str, path2: str, **how: Any) -> Any:
        return self._answered("mv", path2, partial(super().mv, path1, path2, **how))

    def rm_file(self, path: str) -> Any:
        return self._answered("rm_file", path, partial(super().rm_file, path))

    def _answered(self, call: str, path: str, request: Callable[[], Any]) -> Any:
        token, _, key = path.strip("/").partition("/")
        wire = self.wires.get(token)
        if wire is None or wire.busy:  # within another call
            return request()
        wire.busy = True
        try:
            return wire.answered(f"{call} {without_ids(key)}", request)
        finally:
            wire.busy = False


class CellWire:
    """One root of the file system."""

    def __init__(self) -> None:
        self.token = f"cell-{secrets.token_hex(6)}"
        self.busy = False
        self.faults = Faults()
        self.requests: list[str] = []
        self.calm = self.backend()
        CellSystem.wires[self.token] = self

    def backend(self) -> Backend:
        return resolve(f"cells://{self.token}", {}, POLICY)

    def arm(self, faults: Sequence[Fault]) -> None:
        self.requests.clear()
        self.faults.arm(faults)

    def disarm(self) -> tuple[list[str], list[int]]:
        return list(self.requests), self.faults.disarm()

    def answered(self, kind: str, request: Callable[[], Any]) -> Any:
        self.requests.append(kind)
        fault = self.faults.take(kind)
        if fault is None:
            return request()
        if fault.answer.acted:
            answer = request()
            if fault.answer.name == "twice":
                return request() or answer
        error = _ERRORS[fault.answer.name]
        raise error()

    async def names(self) -> Sequence[str]:
        assert isinstance(self.calm, ObjectBackend)
        unfinished = await self.calm.unfinished()
        return [*(info.key for info in await self.calm.list()), *(one.name for one in unfinished)]


class Fsspec:
    """A file system of fsspec that bcp knows nothing of."""

    name = "fsspec"
    at_once = 1

    def __init__(self) -> None:
        fsspec.register_implementation("cells", CellSystem, clobber=True)

    def wire(self) -> CellWire:
        return CellWire()

    def answers(self, request: str) -> Sequence[Answer]:
        acted = (False,) if request.startswith(_READS) else (False, True)
        return [Answer(name, acted=done) for name in _ERRORS for done in acted]

    def doubts(self) -> Sequence[Fault]:
        answers = [Answer(name, acted=True) for name in ("lost", "absent", "taken")]
        return [Fault("mv metadata.arrow", answer) for answer in answers]

    async def aclose(self) -> None:
        return
