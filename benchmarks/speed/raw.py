"""What the machine can do with as many bytes: the limits that saves and loads are compared with.

A process of its own keeps them in memory and writes, reads and copies them when it is told to. There is no one best
way to write a file: O_DIRECT is steady, early write-back may be twice as fast or not, plain buffered writing is
a lottery. So all are measured, and the best is the limit.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.speed import disk

__all__ = ["COPY", "READS_COLD", "READ_WARM", "WRITES", "Raw"]

PAGE = 4096
MIB = 1 << 20
EARLY = 2  # SYNC_FILE_RANGE_WRITE: start to write these pages back, wait for nothing

WRITES = ("O_DIRECT", "buffered, fsync", "buffered, sync_file_range, fsync")
READS_COLD = ("O_DIRECT, cold", "buffered, cold")
READ_WARM = "buffered, warm"
COPY = "memcpy, 2 threads"


class Raw:
    """So many bytes of memory, and the ways to write, read and copy them; each returns seconds."""

    def __init__(self, nbytes: int, path: Path) -> None:
        self.path = path
        self.nbytes = -(-nbytes // (2 * PAGE)) * 2 * PAGE  # O_DIRECT takes whole pages, a copy two halves
        self._memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._array = np.frombuffer(self._memory, np.uint8)
        random = np.random.default_rng(0)
        for start in range(0, self.nbytes, 64 * MIB):
            piece = self._array[start : start + 64 * MIB]
            piece[:] = np.frombuffer(random.bytes(len(piece)), np.uint8)
        self.ways: dict[str, Callable[[], float]] = {
            WRITES[0]: lambda: self._write(os.O_DIRECT, threads=2, step=32 * MIB),
            WRITES[1]: lambda: self._write(0, threads=1, step=8 * MIB),
            WRITES[2]: lambda: self._write(0, threads=2, step=8 * MIB, early=True),
            READS_COLD[0]: lambda: self._read(os.O_DIRECT, threads=4, step=32 * MIB, cold=True),
            READS_COLD[1]: lambda: self._read(0, threads=2, step=8 * MIB, cold=True),
            READ_WARM: lambda: self._read(0, threads=2, step=8 * MIB, cold=False),
            COPY: self._copy,
        }

    def _write(self, flags: int, *, threads: int, step: int, early: bool = False) -> float:
        """Write all bytes into a new file, durably; ``early``: start write-back as it goes."""
        disk.remove(self.path)
        memory, libc = memoryview(self._memory), ctypes.CDLL(None)
        begin = perf_counter()
        with _opened(self.path, os.O_WRONLY | os.O_CREAT | flags) as descriptor:
            os.posix_fallocate(descriptor, 0, self.nbytes)

            def write(start: int, stop: int) -> None:
                _whole(os.pwrite(descriptor, memory[start:stop], start), stop - start)
                if early:
                    libc.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(stop - start), EARLY)

            _in_threads(threads, self.nbytes, step, write)
            os.fsync(descriptor)
        return perf_counter() - begin

    def _read(self, flags: int, *, threads: int, step: int, cold: bool) -> float:
        """Read the file that was written last back into the memory it came from."""
        disk.cool(self.path)
        if not cold:
            disk.warm_up(self.path)
        memory = memoryview(self._memory)
        begin = perf_counter()
        with _opened(self.path, os.O_RDONLY | flags) as descriptor:

            def read(start: int, stop: int) -> None:
                _whole(os.preadv(descriptor, [memory[start:stop]], start), stop - start)

            _in_threads(threads, self.nbytes, step, read)
        return perf_counter() - begin

    def _copy(self) -> float:
        """Copy one half over the other, which is what the first half of a copy of all of it takes."""
        half = self.nbytes // 2

        def copy(start: int, stop: int) -> None:
            np.copyto(self._array[half + start : half + stop], self._array[start:stop])

        begin = perf_counter()
        _in_threads(2, half, 64 * MIB, copy)
        return 2 * (perf_counter() - begin)


def _in_threads(count: int, nbytes: int, step: int, work: Callable[[int, int], None]) -> None:
    """Call ``work`` for every piece, in so many threads; raise the first error."""
    pieces, lock = iter(range(0, nbytes, step)), threading.Lock()
    errors: list[OSError] = []

    def run() -> None:
        try:
            while not errors:
                with lock:
                    start = next(pieces, None)
                if start is None:
                    return
                work(start, min(start + step, nbytes))
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _whole(done: int, wanted: int) -> None:
    if done != wanted:
        raise OSError(f"{done} of {wanted} bytes at once")


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Open by descriptor."""
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
