"""Every system call of a save fails in turn: nothing leaks, an older checkpoint stays whole, the error says why."""

from __future__ import annotations

import errno
import gc
import io
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiofiles.os
import aiofiles.threadpool
import pytest
import torch

import bcp
from bcp.backends import LocalBackend
from bcp.backends import file_io as writing
from bcp.runtime import staging

CALLS = ["open", "pwrite", "fsync", "fstat", "rename", "symlink", "unlink", "mkdir", "scandir", "stat", "rmdir"]
OTHERS = ["fallocate", "fopen"]
MOST = 60


class Faults:
    """Lets one call of one function on files below a directory fail, or all calls from that one on."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.name, self.nth, self.lasting, self.hit = "", 0, False, False
        self._root = os.fsdecode(root)
        self._count = 0
        self._link = os.readlink
        self._lock = threading.Lock()
        for name in CALLS:
            patch.setattr(os, name, self._failing(name, getattr(os, name)))
        patch.setattr(writing, "fallocate", self._failing("fallocate", writing.fallocate))
        opened = self._failing("fopen", io.open)
        patch.setattr(io, "open", opened)  # as pathlib does
        patch.setattr(aiofiles.threadpool, "sync_open", opened)
        patch.setattr(aiofiles.os, "rename", self._arename)  # aiofiles keeps the function of before

    def arm(self, name: str, nth: int, *, lasting: bool) -> None:
        self.name, self.nth, self.lasting, self.hit, self._count = name, nth, lasting, False, 0

    @staticmethod
    async def _arename(old: Path, new: Path) -> None:
        os.rename(old, new)  # noqa: PTH104 -- the one that fails

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **how: Any) -> Any:
            if self.name == name and self._is_ours(args[name == "symlink"]):
                with self._lock:
                    self._count += 1
                    now = self._count == self.nth or (self.lasting and self._count > self.nth)
                if now:
                    self.hit = True
                    raise OSError(errno.EIO, f"injected into {name}")
            return call(*args, **how)

        return failing

    def _is_ours(self, file: Any) -> bool:
        if isinstance(file, int):
            file = self._link(f"/proc/self/fd/{file}")
        return os.fsdecode(file).startswith((self._root, "/proc/self/fd/"))


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(tmp_path, monkeypatch)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.Tensor]]:
    """Keep track of staging memory."""
    found: list[weakref.ref[torch.Tensor]] = []
    allocate = staging._allocate

    def noting(nbytes: int, *, pinned: bool) -> torch.Tensor:
        buffer = allocate(nbytes, pinned=pinned)
        found.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(staging, "_allocate", noting)
    return found


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def state(value: int) -> dict[str, Any]:
    return {"model": {f"w{n}": torch.full((5000 + n,), float(value)) for n in range(3)}}


def save(backend: LocalBackend, new: dict[str, Any]) -> bool:
    """Save in the background; say whether it failed, as it should."""
    try:
        bcp.save(backend, new, overwrite=True, async_checkpoint=True).wait()
    except bcp.StorageError as error:
        if "injected" not in str(error):
            raise
        return True
    return False


def what_is_there(path: Path) -> float:
    target = state(0)
    bcp.load(path, target)
    (value,) = {value for tensor in target["model"].values() for value in tensor.tolist()}
    return value


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("name", "lasting"),
    [*((name, False) for name in [*CALLS, *OTHERS]), ("fsync", True), ("unlink", True), ("scandir", True)],
)
def test_every_call_fails_in_turn(
    tmp_path: Path,
    faults: Faults,
    allocated: list[weakref.ref[torch.Tensor]],
    name: str,
    lasting: bool,  # noqa: FBT001 -- a parameter
) -> None:
    path = tmp_path / "ckpt"
    backend = LocalBackend(path, writes="direct")
    bcp.save(backend, state(1))
    bcp.load(path, state(0))
    before, there, earlier = descriptors(), 1.0, list[weakref.ref[torch.Tensor]]()
    for nth in range(1, MOST, 3 if lasting else 1):
        new = state(nth + 1)
        alive = [weakref.ref(tensor) for tensor in new["model"].values()]
        faults.arm(name, nth, lasting=lasting)
        failed = save(backend, new)
        hit = faults.hit
        faults.arm("", 0, lasting=False)
        del new
        assert descriptors() == before
        free = {id(one.buffer) for one in staging.shared_pool(pinned=False)._free}
        assert all(id(buffer()) in free for buffer in allocated if buffer() is not None)
        assert not any(tensor() is not None for tensor in earlier), "an earlier failed save keeps its tensors"
        now = what_is_there(path)
        assert now in ((there, nth + 1) if failed else (nth + 1,))
        there, earlier = now, alive
        if not hit:
            break
    else:
        raise AssertionError(f"{name} is called more than {MOST} times")
