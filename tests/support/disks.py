"""What the tests of local files share: memory that is or is not aligned, and disks with a will of their own."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from bcp.backends.files import address, in_page_cache

PAGE = 4096
ODD = 48  # where the bytes of a large bytes object begin in their page


def memory(data: bytes, *, shift: int = 0) -> memoryview:
    """Return a copy of the bytes that begins ``shift`` bytes behind the start of a page."""
    room = np.empty(len(data) + 2 * PAGE, np.uint8)
    skip = -address(room.data) % PAGE + shift
    view = room.data[skip : skip + len(data)]
    view[:] = data
    return view


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def cached(path: Path) -> list[bool]:
    """Say for every page of a file whether it is in memory."""
    with path.open("rb") as file:
        return in_page_cache(file.fileno(), 0, path.stat().st_size, mmap.PAGESIZE)


def drop(path: Path) -> None:
    """Take a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def can_drop(folder: Path) -> bool:
    """Say whether the file system keeps files anywhere but in the page cache; tmpfs does not."""
    path = folder / "probe"
    path.write_bytes(bytes(PAGE))
    drop(path)
    return cached(path) == [False]


class StrictDisk:
    """Takes direct I/O on every file system, refuses it as strictly as a disk can, and notes what went which way.

    Attributes:
        direct: (offset, bytes) of every direct read or write.
        buffered: the same of all others.
        block: what direct offsets, lengths and addresses have to be multiples of.
        after: how many direct reads and writes succeed; all others are refused.
        no_open: the errno with which opening a file for direct I/O fails, or 0.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of the calls in ``os``."""
        self.direct: list[tuple[int, int]] = []
        self.buffered: list[tuple[int, int]] = []
        self.block = PAGE
        self.after = 1 << 30
        self.no_open = 0
        self._fds: set[int] = set()
        for name, call in (
            ("open", self.open),
            ("close", self.close),
            ("pwrite", self.pwrite),
            ("preadv", self.preadv),
        ):
            setattr(self, f"_{name}", getattr(os, name))
            patch.setattr(os, name, call)

    def open(self, path: str | Path, flags: int, mode: int = 0o777) -> int:
        if not flags & os.O_DIRECT:
            return self._open(path, flags, mode)
        if self.no_open:
            raise OSError(self.no_open, "no direct I/O here")
        fd = self._open(path, flags & ~os.O_DIRECT, mode)
        self._fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._fds.discard(fd)
        self._close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return self._note(fd, offset, [data], lambda: self._pwrite(fd, data, offset))

    def preadv(self, fd: int, outs: Sequence[memoryview], offset: int) -> int:
        return self._note(fd, offset, outs, lambda: self._preadv(fd, outs, offset))

    def _note(self, fd: int, offset: int, views: Sequence[memoryview], move: Callable[[], int]) -> int:
        if fd not in self._fds:
            count = move()
            self.buffered.append((offset, count))
            return count
        numbers = [offset, *map(len, views), *(address(view) for view in views)]
        if len(self.direct) >= self.after or any(number % self.block for number in numbers):
            raise OSError(errno.EINVAL, "not like this")
        count = move()
        self.direct.append((offset, count))
        return count
