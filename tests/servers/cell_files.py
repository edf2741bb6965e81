"""Files of a server of files whose calls fail as chosen, as ``benchmarks.commit_table`` takes them."""

from __future__ import annotations

import errno
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servers.cell_names import without_ids
from servers.nfs import Mount

from bcp.backends import LocalBackend
from bcp.protocols import Backend
from benchmarks.commit_table.cells import Answer, Fault


class FileWire:
    """One directory of a mounted file system, which fails as its server is told to."""

    def __init__(self, mount: Mount, folder: Path) -> None:
        self._mount, self._folder = mount, folder
        self._faults: Sequence[Fault] = ()
        self.calm = LocalBackend(folder)

    def backend(self) -> Backend:
        return LocalBackend(self._folder)

    def arm(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._mount.calls()
        for fault in faults:
            call, _, name = fault.request.partition(" ")
            how: dict[str, Any] = {"repeat": True} if fault.answer.name == "twice" else {"acted": fault.answer.acted}
            pattern = re.escape(name.replace("<cell>", self._folder.name)).replace(r"\*", ".+")
            code = getattr(errno, fault.answer.name, 0)
            self._mount.fault(call, code, name=f"^{pattern}$", skip=fault.skip, times=fault.times, **how)

    def disarm(self) -> tuple[list[str], list[int]]:
        hits = self._mount.release()
        calls = [(call, name) for call, name in self._mount.calls() if name != "/"]  # others look at the root, too
        kinds = [f"{call} {without_ids(name.replace(self._folder.name, '<cell>'))}" for call, name in calls]
        return kinds, [hits] * len(self._faults)

    async def names(self) -> Sequence[str]:
        files = [path for path in self._folder.rglob("*") if not path.is_dir() or path.is_symlink()]
        return [path.relative_to(self._folder).as_posix() for path in files]


class Files:
    """A file system with the semantics of NFS."""

    name = "shared files"
    at_once = 1

    def __init__(self, mount: Mount) -> None:
        self._mount = mount
        self._folder: Path | None = None

    def wire(self) -> FileWire:
        """Remove the last cell's files, which the server keeps open; begin a new cell."""
        if self._folder is not None and self._folder.exists():
            shutil.rmtree(self._folder)
        self._folder = self._mount.path / f"cell-{secrets.token_hex(6)}"
        return FileWire(self._mount, self._folder)

    def answers(self, request: str) -> Sequence[Answer]:
        call = request.partition(" ")[0]
        if call == "statfs":  # once in a process
            return ()
        acted = (False, True) if call in _CHANGING else (False,)
        answers = [Answer(name, acted=done) for name in _ERRORS for done in acted]
        return [*answers, Answer("twice", acted=True)] if call in _CHANGING - {"fsync", "create"} else answers

    def doubts(self) -> Sequence[Fault]:
        return ()

    async def aclose(self) -> None:
        return


_CHANGING = {"create", "fsync", "link", "mkdir", "rename", "rmdir", "symlink", "unlink"}
_ERRORS = ("ESTALE", "EIO", "ENOENT", "ENOSPC", "EEXIST")
