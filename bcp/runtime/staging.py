"""Host memory between live tensors and storage: page-aligned buffers that are kept and used again.

The first save allocates; the second finds every buffer it needs (paper sec. 4.2: pinned memory pool, ping-pong).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from bcp._log import log
from bcp.runtime.accelerator import lock_pages, locks_pages, unlock_pages
from bcp.runtime.huge_pages import map_shared
from bcp.runtime.process import in_forked_child, process_lock
from bcp.runtime.threads import in_thread_even_if_cancelled

__all__ = ["Lease", "StagingPool", "map_file", "pool_for", "shared_pool"]

PAGE = 4096
SLACK = 2  # a free buffer of up to twice the wanted size will do
PATIENCE = 3  # saves that may end without a use of a buffer; an actor and a critic that take turns need 2
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module does not know it


@dataclass(slots=True, eq=False)
class _Free:
    """An unused buffer, and the number of saves that have ended since its last use."""

    buffer: torch.Tensor
    idle: int = 0


class StagingPool:
    """Buffers that outlive one save. Thread-safe: synchronous and asynchronous saves share it.

    Between saves it holds the memory that the last few needed, and nothing more.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.pinned = pinned
        self._free: list[_Free] = []
        self._nbytes = 0
        self._refused = False
        self._lock = process_lock()

    def __repr__(self) -> str:
        kind = "pinned" if self.pinned else "pageable"
        with self._lock:
            return f"<StagingPool {kind}: {len(self._free)} free buffers, {self._free_nbytes()} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, borrowed ones included."""
        with self._lock:
            return self._nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes that wait for the next save."""
        with self._lock:
            return self._free_nbytes()

    def _free_nbytes(self) -> int:
        return sum(entry.buffer.numel() for entry in self._free)

    @contextmanager
    def lease(self, *, keep: bool = True, most: int = sys.maxsize) -> Iterator[Lease]:
        """Borrow buffers for one operation; whatever it has not given back returns to the pool at the end.

        Args:
            keep: False, for loads: newly allocated memory goes back to the operating system instead.
            most: bytes that this pool may have in all, if its buffers are pinned; further ones are not.

        """
        lease = Lease(self, most)
        try:
            yield lease
        finally:
            self._end(lease, keep=keep)

    @asynccontextmanager
    async def borrowed(self, *, keep: bool = True, most: int = sys.maxsize) -> AsyncIterator[Lease]:
        """Do the same in a coroutine: memory goes back in a worker thread, because to unlock pages takes time."""
        lease = Lease(self, most)
        try:
            yield lease
        finally:
            await in_thread_even_if_cancelled(partial(self._end, lease, keep=keep))

    def reserve(self, sizes: Sequence[int], *, most: int = sys.maxsize) -> None:
        """Make sure that buffers of these sizes are free and in physical memory, for one operation to come. Blocks.

        Fresh memory is written for the first time at 1 to 4 GB/s, a copy to memory that is there runs at twice that.
        """
        with self.lease(most=most) as lease:
            for nbytes in sizes:
                lease.take(nbytes)

    def _take(self, nbytes: int) -> torch.Tensor | None:
        """Return a free buffer that fits well, if there is one."""
        with self._lock:
            fits = [entry for entry in self._free if nbytes <= entry.buffer.numel() <= SLACK * max(nbytes, PAGE)]
            if not fits:
                return None
            best = min(fits, key=lambda entry: entry.buffer.numel())
            self._free.remove(best)
            return best.buffer

    def _made(self, nbytes: int, most: int) -> torch.Tensor | None:
        """Return a new buffer; None where pinned memory cannot be had, or no more of it."""
        rounded = -(-nbytes // PAGE) * PAGE
        if self._refused or not self._has_room(rounded, most if self.pinned else sys.maxsize):
            return None
        try:
            return _allocate(rounded, pinned=self.pinned)
        except BaseException as error:
            with self._lock:
                self._nbytes -= rounded
            if not self.pinned or not isinstance(error, OSError):
                raise
            self._refused = True
            log.warning("host memory cannot be page-locked: copies from and to devices are slower", cause=str(error))
            return None

    def _has_room(self, nbytes: int, most: int) -> bool:
        """Count so many bytes more if there may be so many; free buffers, which did not fit, go first."""
        with self._lock:
            while self._free and self._nbytes + nbytes > most:
                self._nbytes -= self._free.pop(0).buffer.numel()
            enough = self._nbytes + nbytes <= most
            self._nbytes += nbytes if enough else 0
            return enough

    def _give(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free.append(_Free(buffer))

    def _end(self, lease: Lease, *, keep: bool) -> None:
        """Take back the lent buffers, and free those that have been idle for long."""
        for pool in lease.pools:
            pool._ended(lease, keep=keep)  # noqa: SLF001 -- the same class

    def _ended(self, lease: Lease, *, keep: bool) -> None:
        dropped = []
        with self._lock:
            self._free.extend(_Free(buffer) for number, buffer in lease.out.items() if lease.pool_of[number] is self)
            drop = set() if keep else lease.fresh
            for entry in list(self._free):
                entry.idle = 0 if id(entry.buffer) in lease.used else entry.idle + keep
                if entry.idle >= PATIENCE or id(entry.buffer) in drop:
                    self._free.remove(entry)
                    self._nbytes -= entry.buffer.numel()
                    dropped.append(entry)  # they go when this returns, without the lock

    def clear(self) -> None:
        """Give all free buffers back to the operating system."""
        with self._lock:
            free, self._free = self._free, []
            self._nbytes -= sum(entry.buffer.numel() for entry in free)


class Lease:
    """The buffers of one operation. Thread-safe.

    Attributes:
        pools: where they come from, best first: a pool of pinned ones is followed by that of the others.
        out: borrowed buffers, by id.
        pool_of: for each of these ids, the pool that the buffer came from.
        used: ids of all buffers that it has ever borrowed.
        fresh: ids of those that had to be allocated.
        pinned_nbytes: the most bytes of pinned memory that there were in this process when it borrowed.
    """

    def __init__(self, pool: StagingPool, most: int = sys.maxsize) -> None:
        self.pools = (pool, shared_pool(pinned=False)) if pool.pinned else (pool,)
        self.out: dict[int, torch.Tensor] = {}
        self.pool_of: dict[int, StagingPool] = {}
        self.used: set[int] = set()
        self.fresh: set[int] = set()
        self.pinned_nbytes = 0
        self._most = most

    def take(self, nbytes: int) -> torch.Tensor:
        """Borrow uint8[m] with m >= nbytes, 4 KiB-aligned, contents undefined.

        An allocation takes as long as writing to it: call it in a thread.
        """
        buffer, pool = self._found(max(nbytes, 1))
        self.pool_of[id(buffer)] = pool
        self.out[id(buffer)] = buffer
        self.used.add(id(buffer))
        if self.pools[0].pinned:
            self.pinned_nbytes = max(self.pinned_nbytes, self.pools[0].nbytes)
        return buffer

    def _found(self, nbytes: int) -> tuple[torch.Tensor, StagingPool]:
        """Return a free buffer of the best pool that has or can make one, and the pool."""
        for pool in self.pools:
            if (buffer := pool._take(nbytes)) is not None:  # noqa: SLF001 -- a lease is the pool's other half
                return buffer, pool
            if (buffer := pool._made(nbytes, self._most)) is not None:  # noqa: SLF001 -- as above
                self.fresh.add(id(buffer))
                return buffer, pool
        raise AssertionError("the last pool makes a buffer, or raises")

    def give(self, buffer: torch.Tensor) -> None:
        """Give a buffer back early, so that the same operation can use it again. No thread may still use it."""
        if self.out.pop(id(buffer), None) is not None:
            self.pool_of[id(buffer)]._give(buffer)  # noqa: SLF001 -- as above


# -- memory --------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None)
"""Its calls release the GIL. ``mmap.madvise`` keeps it: training stood still for 40 ms at a time while memory came."""
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_mapped: dict[int, weakref.ref[np.ndarray]] = {}
_inherited: list[np.ndarray | None] = []


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return fresh uint8 memory of so many bytes, whole pages.

    Raises:
        OSError: it was to be page-locked, which the driver refused.

    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # advice: where the kernel does not take it, the first copy pays for the page faults
        memory.madvise(mmap.MADV_HUGEPAGE)  # 3.4 to 4 GB/s for the first touch instead of 1.2 to 2
    return _touched(memory, nbytes, pinned=pinned)


def map_file(fd: int, nbytes: int) -> torch.Tensor:
    """Return the bytes of a file, which has so many and keeps them, as uint8[nbytes]. Writes go to the file.

    Raises:
        OSError: the file cannot be mapped.

    """
    memory, start = map_shared(fd, nbytes)
    return _touched(memory, nbytes, start, pinned=False)


def _touched(memory: mmap.mmap, nbytes: int, start: int = 0, *, pinned: bool) -> torch.Tensor:
    """Bring the pages of a map into memory, and lock them; return them as a tensor that unlocks them at its end."""
    with suppress(OSError):  # advice, as above
        memory.madvise(mmap.MADV_DONTFORK)  # else dataloader workers would share it, and every write copy a page
    array = np.frombuffer(memory, np.uint8, nbytes, start)
    address = array.ctypes.data
    _libc.madvise(address, nbytes, _POPULATE_WRITE)  # advice again, so its error does not count
    if pinned and not lock_pages(address, nbytes):
        raise OSError(f"the driver does not lock {nbytes} bytes; is `ulimit -l` or the container's memory too small?")
    _mapped[address] = weakref.ref(array)
    weakref.finalize(array, _going, address, os.getpid(), pinned=pinned).atexit = False
    return torch.from_numpy(array)


def _going(address: int, pid: int, *, pinned: bool) -> None:
    """Unlock memory that is about to go; the array's end comes before that of the map it shows."""
    if os.getpid() == pid and not sys.is_finalizing() and _mapped.pop(address, None) is not None and pinned:
        unlock_pages(address)


@cache
def shared_pool(*, pinned: bool) -> StagingPool:
    """Return this process's pool of that kind of memory."""
    return StagingPool(pinned=pinned)


def pool_for(devices: Sequence[int]) -> StagingPool:
    """Return the pool for copies from and to these devices."""
    return shared_pool(pinned=bool(devices) and locks_pages())


def _keep_in_child() -> None:
    """Begin anew in a forked child, and keep the inherited memory.

    The memory is not mapped there: to unmap it would unmap whatever has come to lie in its place. To unlock it is the
    parent's business, and CUDA's to refuse.
    """
    _inherited.extend(reference() for reference in list(_mapped.values()))
    _mapped.clear()
    shared_pool.cache_clear()


in_forked_child(_keep_in_child)
