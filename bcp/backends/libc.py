"""The system calls that Python has no name for."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "address", "direct_alignment", "fallocate", "file_system_type", "in_page_cache"]

Bytes = npt.NDArray[np.uint8]

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_DIO_MEM_ALIGN = 0x98  # where it lies in struct statx; stx_dio_offset_align follows
_libc = ctypes.CDLL(None, use_errno=True)


def address(view: memoryview) -> int:
    """Return where the first byte of a buffer is in memory."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def fallocate(fd: int, nbytes: int) -> None:
    """Reserve the space of a file's first bytes; OSError where the file system cannot.

    Not ``os.posix_fallocate``: where the file system cannot, the C library writes a byte to every 4 KiB itself.
    """
    if _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def file_system_type(path: Path | int) -> int:
    """Return ``f_type`` of statfs(2), for a path or a descriptor; 0 if the file system does not say."""
    answer = (ctypes.c_long * 32)()  # struct statfs has 15
    failed = _libc.fstatfs(path, answer) if isinstance(path, int) else _libc.statfs(os.fsencode(path), answer)
    return 0 if failed else answer[0] & 0xFFFFFFFF


def direct_alignment(fd: int) -> tuple[int, int]:
    """Return the alignment that direct I/O needs: of addresses, and of offsets and lengths.

    Zeros where it is not known: Linux before 6.1, and file systems that do not say.
    """
    answer = ctypes.create_string_buffer(256)
    statx = getattr(_libc, "statx", None)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return 0, 0
    (mask,) = struct.unpack_from("=I", answer)
    if not mask & _STATX_DIOALIGN:
        return 0, 0
    memory, offset = struct.unpack_from("=II", answer, _STATX_DIO_MEM_ALIGN)
    return memory, offset


def in_page_cache(fd: int, start: int, nbytes: int, step: int) -> list[bool]:
    """Say for one page in every ``step`` bytes from ``start``, both multiples of a page, whether it is in memory.

    Reads nothing, and starts no read-ahead. True as well for files that are another user's and that this one may not
    write: Linux does not tell about those.

    Raises:
        OSError: the file cannot be mapped.
        ValueError: it ends before.

    """
    with mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=start) as mapped:
        first = address(memoryview(mapped))
        page = ctypes.c_ubyte()
        found = []
        for at in range(first, first + nbytes, step):
            failed = _libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(1), ctypes.byref(page))
            found.append(not failed and bool(page.value & 1))
    return found
