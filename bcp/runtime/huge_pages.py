"""Files on a tmpfs in huge pages of the processor, 2 MiB on most machines.

A huge page comes in one piece: memory is there three times sooner than in pages of 4 KiB, and reads of it take two
thirds of the time. Kernels give a tmpfs small pages unless they are asked (``MADV_COLLAPSE``, Linux 6.1).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["fill_in_huge_pages", "map_shared"]

STEP_BYTES = 64 << 20
"""The kernel is asked for so much at once."""

SLOWEST = 100 << 20
"""Bytes a second. A kernel that has to move memory for huge pages may be slower, and small ones do as well then."""

_COLLAPSE = 25  # MADV_COLLAPSE; the mmap module does not know it
_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)


@cache
def huge_page_bytes() -> int:
    """Return the size of a huge page, in bytes; 0 if the kernel has none."""
    with suppress(OSError, ValueError):
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    return 0


def fill_in_huge_pages(fd: int, nbytes: int) -> int:
    """Give the first bytes of an empty file on a tmpfs their memory, as far as the kernel has huge pages for them.

    Args:
        fd: of the file, open for reads and writes.
        nbytes: which the file gets. All of them are zeros.

    Returns:
        The bytes at the start that have memory, at least.

    Raises:
        OSError: the file does not get that size, or cannot be mapped.

    """
    os.ftruncate(fd, nbytes)
    size, done = huge_page_bytes(), 0
    whole = nbytes // size * size if size else 0
    if not whole:
        return 0
    memory, start = map_shared(fd, nbytes)
    first = _address(memory) + start
    while done < whole:
        step, begin = min(max(STEP_BYTES // size, 1) * size, whole - done), time.monotonic()
        if not _touched(fd, range(done, done + step, size)) or _libc.madvise(first + done, step, _COLLAPSE):
            break
        done += step
        if time.monotonic() - begin > step / SLOWEST:
            break
    memory.close()
    return done


def map_shared(fd: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """Map the first bytes of a file for reads and writes, as huge pages need it.

    Returns:
        A map that is larger, and where the bytes begin in it.

    Raises:
        OSError: the file cannot be mapped.

    """
    size = huge_page_bytes()
    memory = mmap.mmap(-1, nbytes + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -_address(memory) % size if size else 0
    wanted = _address(memory) + start
    if _libc.mmap(wanted, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, fd, 0) != wanted:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return memory, start


def _touched(fd: int, starts: range) -> bool:
    """Write a zero into each huge page: the kernel makes none of holes alone. Return False if there is no room."""
    try:
        for start in starts:
            os.pwrite(fd, b"\0", start)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
