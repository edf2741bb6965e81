"""Files on a tmpfs in huge pages. Where the kernel has none, all works with small ones."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bcp.backends.files import fallocate
from bcp.runtime import huge_pages
from bcp.runtime.huge_pages import fill_in_huge_pages, map_shared
from bcp.runtime.staging import map_file

HUGE = huge_pages.huge_page_bytes()
MIB = 1 << 20


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Mount one with room for three huge pages."""
    root = tmp_path / "memory"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={3 * HUGE}", "bcp-test", root], check=True)  # noqa: S603, S607 -- a test
    yield root
    subprocess.run(["umount", "-l", root], check=True)  # noqa: S603, S607 -- as above


@pytest.fixture
def fd(tmpfs: Path) -> Iterator[int]:
    fd = os.open(tmpfs / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def is_collapsible(root: Path) -> bool:
    """Whether this kernel makes a huge page of a file on a tmpfs, by a call of our own."""
    fd = os.open(root / "trial", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, HUGE)
    with mmap.mmap(fd, HUGE) as memory, mmap.mmap(-1, 2 * HUGE) as room:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        there = ctypes.addressof(ctypes.c_char.from_buffer(room))
        where = libc.mmap(ctypes.c_void_p(there + -there % HUGE), ctypes.c_size_t(HUGE), 3, 0x11, fd, ctypes.c_int64(0))
        taken = not libc.madvise(ctypes.c_void_p(where), ctypes.c_size_t(HUGE), 25)
        assert bytes(memory[:8]) == bytes(8)
    os.close(fd)
    (root / "trial").unlink()
    return taken


def huge_bytes(address: int) -> int:
    """Return how much of the map at an address the kernel has in huge pages."""
    smaps = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in smaps:
        if line.startswith(f"{address:x}-"):
            return 1024 * next(int(each.split()[1]) for each in smaps if each.startswith("ShmemPmdMapped:"))
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_memory_comes_in_huge_pages(tmpfs: Path, fd: int) -> None:
    whole = 2 * HUGE if is_collapsible(tmpfs) else 0
    assert fill_in_huge_pages(fd, 2 * HUGE + 5) == whole
    assert os.fstat(fd).st_size == 2 * HUGE + 5
    fallocate(fd, 2 * HUGE + 5)
    assert os.fstat(fd).st_blocks * 512 == 2 * HUGE + mmap.PAGESIZE
    assert os.pread(fd, 3 * HUGE, 0) == bytes(2 * HUGE + 5)
    tensor = map_file(fd, 2 * HUGE + 5)
    assert huge_bytes(tensor.data_ptr()) == whole


def test_a_file_system_without_room_is_told_by_the_next_call(fd: int) -> None:
    assert fill_in_huge_pages(fd, 4 * HUGE) <= 3 * HUGE
    with pytest.raises(OSError, match="No space") as caught:
        fallocate(fd, 4 * HUGE)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("nbytes", [1, HUGE - 1])
def test_small_files_are_left_alone(fd: int, nbytes: int) -> None:
    assert fill_in_huge_pages(fd, nbytes) == 0
    assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks) == (nbytes, 0)


def test_any_file_system_will_do(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        assert fill_in_huge_pages(file.fileno(), 2 * HUGE) in (0, 2 * HUGE), "the second one where it is a tmpfs"
        fallocate(file.fileno(), 2 * HUGE)
        assert file.read() == bytes(2 * HUGE)


def test_a_kernel_without_huge_pages(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 0)
    assert fill_in_huge_pages(fd, HUGE) == 0
    fallocate(fd, HUGE)
    tensor = map_file(fd, HUGE)
    tensor[-1] = 7
    assert os.pread(fd, 2, HUGE - 1) == b"\7"


def test_a_slow_kernel_is_asked_no_more(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "STEP_BYTES", HUGE)
    monkeypatch.setattr(huge_pages, "SLOWEST", float("inf"))
    assert fill_in_huge_pages(fd, 3 * HUGE) <= HUGE


@pytest.mark.parametrize("nbytes", [1, 4096, MIB, HUGE + 1])
def test_a_map_is_aligned_and_writes_go_to_the_file(fd: int, nbytes: int) -> None:
    fallocate(fd, nbytes)
    memory, start = map_shared(fd, nbytes)
    bytes_ = np.frombuffer(memory, np.uint8, nbytes, start)
    assert HUGE == 0 or bytes_.ctypes.data % HUGE == 0
    bytes_[:] = values = np.arange(nbytes, dtype=np.int64).astype(np.uint8)
    assert os.pread(fd, nbytes + 1, 0) == values.tobytes()


def test_a_file_that_may_not_be_written_cannot_be_mapped(tmpfs: Path, fd: int) -> None:
    fallocate(fd, 1)
    read_only = os.open(tmpfs / "file", os.O_RDONLY)
    with pytest.raises(PermissionError):
        map_shared(read_only, 1)
    os.close(read_only)
