"""Host memory between live tensors and storage: page-aligned buffers that are kept and used again.

The first save allocates; the second finds every buffer it needs (paper sec. 4.2: pinned memory pool, ping-pong).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from threading import Lock

import numpy as np
import torch

__all__ = ["Lease", "StagingPool", "shared_pool"]

PAGE = 4096
SLACK = 2  # a free buffer of up to twice the wanted size will do
PATIENCE = 3  # saves that may end without a use of a buffer; an actor and a critic that take turns need 2
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module does not know it


@dataclass(slots=True, eq=False)
class _Free:
    """A buffer that nobody uses, and how many saves have ended since somebody did."""

    buffer: torch.Tensor
    idle: int = 0


class StagingPool:
    """Buffers that outlive one save. Thread-safe: synchronous and asynchronous saves share it.

    Between saves it holds what the last few needed, and nothing more.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        """Start empty; ``pinned`` buffers are page-locked, for copies from and to CUDA devices."""
        self.pinned = pinned
        self._free: list[_Free] = []
        self._lock = Lock()

    def __repr__(self) -> str:
        """Show what the pool holds."""
        with self._lock:
            free, nbytes = len(self._free), sum(one.buffer.numel() for one in self._free)
        return f"<StagingPool {'pinned' if self.pinned else 'pageable'}: {free} free buffers, {nbytes} bytes>"

    @property
    def free_nbytes(self) -> int:
        """Bytes that wait for the next save."""
        with self._lock:
            return sum(one.buffer.numel() for one in self._free)

    @contextmanager
    def lease(self, *, keep: bool = True) -> Iterator[Lease]:
        """Borrow buffers for one operation; whatever it has not given back returns to the pool at the end.

        ``keep=False``, for loads: what it had to allocate goes back to the operating system instead.
        """
        lease = Lease(self)
        try:
            yield lease
        finally:
            self._end(lease, keep=keep)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make sure that buffers of these sizes are free and in physical memory, for one operation to come. Blocks.

        Fresh memory is written for the first time at 1 to 4 GB/s, a copy to memory that is there runs at twice that.
        """
        with self.lease() as lease:
            for nbytes in sizes:
                lease.take(nbytes)

    def _take(self, nbytes: int) -> torch.Tensor | None:
        """Return a free buffer that fits well, if there is one."""
        with self._lock:
            fits = [one for one in self._free if nbytes <= one.buffer.numel() <= SLACK * max(nbytes, PAGE)]
            if not fits:
                return None
            best = min(fits, key=lambda one: one.buffer.numel())
            self._free.remove(best)
            return best.buffer

    def _give(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free.append(_Free(buffer))

    def _end(self, lease: Lease, *, keep: bool) -> None:
        """Take back what is out, and let go of what has been idle for long."""
        with self._lock:
            self._free.extend(map(_Free, lease.out.values()))
            lease.out.clear()
            for one in self._free:
                one.idle = 0 if id(one.buffer) in lease.used else one.idle + keep
            drop = set() if keep else lease.fresh
            self._free = [one for one in self._free if one.idle < PATIENCE and id(one.buffer) not in drop]

    def clear(self) -> None:
        """Give all free buffers back to the operating system."""
        with self._lock:
            self._free.clear()


class Lease:
    """The buffers of one operation. Thread-safe.

    Attributes:
        out: borrowed buffers, by id.
        used: ids of all buffers that it has ever borrowed.
        fresh: ids of those that had to be allocated.
    """

    def __init__(self, pool: StagingPool) -> None:
        """Begin with nothing borrowed."""
        self._pool = pool
        self.out: dict[int, torch.Tensor] = {}
        self.used: set[int] = set()
        self.fresh: set[int] = set()

    def take(self, nbytes: int) -> torch.Tensor:
        """Borrow uint8[m] with m >= nbytes, 4 KiB-aligned, contents undefined.

        Where it has to be allocated this takes as long as writing to it: call it in a thread.
        """
        buffer = self._pool._take(nbytes)  # noqa: SLF001 -- a lease is the pool's other half
        if buffer is None:
            buffer = _allocate(max(nbytes, 1), pinned=self._pool.pinned)
            self.fresh.add(id(buffer))
        self.out[id(buffer)] = buffer
        self.used.add(id(buffer))
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Give a buffer back early, so that the same operation can use it again. No thread may still use it."""
        if self.out.pop(id(buffer), None) is not None:
            self._pool._give(buffer)  # noqa: SLF001 -- as above


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return fresh uint8 memory of at least ``nbytes``, rounded up to whole pages and page-aligned."""
    rounded = -(-nbytes // PAGE) * PAGE
    if pinned:
        return torch.empty(rounded, dtype=torch.uint8, pin_memory=True)  # CUDA hands out whole pages
    memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # advice: where the kernel does not take it, the first copy pays for the page faults
        memory.madvise(mmap.MADV_DONTFORK)  # else dataloader workers would share it, and every write copy a page
        memory.madvise(mmap.MADV_HUGEPAGE)  # 3.4 to 4 GB/s for the first touch instead of 1.2 to 2
        memory.madvise(_POPULATE_WRITE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8))


@cache
def shared_pool(*, pinned: bool) -> StagingPool:
    """Return this process's pool of that kind of memory."""
    return StagingPool(pinned=pinned)


os.register_at_fork(after_in_child=shared_pool.cache_clear)
