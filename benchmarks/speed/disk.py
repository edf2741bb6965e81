"""Files on a disk: make them durable, make them cold or warm, remove them; the same for everybody."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

__all__ = ["cached_share", "cool", "files_of", "make_durable", "nbytes_of", "remove", "warm_up"]

CHUNK = 8 << 20


def files_of(path: Path) -> list[Path]:
    """List the files of a checkpoint, which may be one file."""
    return [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())


def nbytes_of(path: Path) -> int:
    """Return how large a checkpoint is on disk."""
    return sum(one.stat().st_size for one in files_of(path))


def make_durable(path: Path) -> None:
    """Sync every file and every directory of a checkpoint, and the directory it is in.

    This is counted as a part of every save, whoever made it. What a library has synced already is clean, and costs
    next to nothing here.
    """
    inside = [] if path.is_file() else [path, *(one for one in path.rglob("*") if one.is_dir())]
    for one in (*files_of(path), *inside, path.parent):
        with _opened(one) as descriptor:
            os.fsync(descriptor)


def remove(path: Path) -> None:
    """Remove a checkpoint and wait for the disk, so that the next writer does not pay for anybody's dirty pages."""
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
    os.sync()


def cool(path: Path) -> None:
    """Drop a checkpoint's files from the page cache."""
    for one in files_of(path):
        with _opened(one) as descriptor:
            os.fsync(descriptor)  # dirty pages are not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def warm_up(path: Path) -> None:
    """Read a checkpoint's files into the page cache."""
    buffer = bytearray(CHUNK)
    for one in files_of(path):
        with _opened(one) as descriptor:
            while os.readv(descriptor, [buffer]):
                pass


def cached_share(path: Path) -> float:
    """Return which share of a checkpoint's pages is in the page cache, from 0 to 1."""
    counts = [_cached(one) for one in files_of(path) if one.stat().st_size]
    return sum(cached for cached, _ in counts) / max(sum(pages for _, pages in counts), 1)


def _cached(path: Path) -> tuple[int, int]:
    """Return how many pages of a file are cached, and how many it has."""
    with _opened(path) as descriptor, mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        state = np.empty(-(-len(view) // mmap.PAGESIZE), np.uint8)
        arguments = (ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), ctypes.c_void_p(state.ctypes.data))
        failed = ctypes.CDLL(None, use_errno=True).mincore(*arguments)
        del view
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
        return int((state & 1).sum()), len(state)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open for reading, by descriptor."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
