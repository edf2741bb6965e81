"""Host memory between live tensors and storage: page-aligned buffers that are kept and used again.

The first save allocates; the second finds every buffer it needs (paper sec. 4.2: pinned memory pool, ping-pong).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

import torch

__all__ = ["Lease", "StagingPool", "shared_pool"]

PAGE = 4096
SLACK = 2  # a free buffer of up to twice the wanted size will do


class StagingPool:
    """Buffers that outlive one save. Thread-safe: synchronous and asynchronous saves share it.

    Between saves it holds what the last one needed, and nothing more.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        """Start empty; ``pinned`` buffers are page-locked, for copies from and to CUDA devices."""
        self.pinned = pinned
        self._free: list[torch.Tensor] = []
        self._lock = Lock()
        self._leases = 0
        self._used: set[int] = set()

    def __repr__(self) -> str:
        """Show what the pool holds."""
        with self._lock:
            free, nbytes = len(self._free), sum(b.numel() for b in self._free)
        return f"<StagingPool {'pinned' if self.pinned else 'pageable'}: {free} free buffers, {nbytes} bytes>"

    @property
    def free_nbytes(self) -> int:
        """Bytes that wait for the next save."""
        with self._lock:
            return sum(b.numel() for b in self._free)

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Borrow buffers for one operation; whatever it has not given back returns to the pool at the end."""
        with self._lock:
            self._leases += 1
        lease = Lease(self)
        try:
            yield lease
        finally:
            self._end(lease)

    def _take(self, nbytes: int) -> torch.Tensor:
        """Return a free buffer that fits well, or a new one."""
        with self._lock:
            fits = [b for b in self._free if nbytes <= b.numel() <= SLACK * nbytes]
            if fits:
                best = min(fits, key=torch.Tensor.numel)
                self._free = [b for b in self._free if b is not best]
                return best
        return _allocate(nbytes, pinned=self.pinned)

    def _give(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buffer)

    def _end(self, lease: Lease) -> None:
        with self._lock:
            self._free.extend(lease.out.values())
            lease.out.clear()
            self._leases -= 1
            self._used |= lease.used
            if self._leases == 0:
                self._free = [b for b in self._free if id(b) in self._used]
                self._used.clear()

    def clear(self) -> None:
        """Give all free buffers back to the operating system."""
        with self._lock:
            self._free.clear()


class Lease:
    """The buffers of one operation."""

    def __init__(self, pool: StagingPool) -> None:
        """Begin with nothing borrowed."""
        self._pool = pool
        self.out: dict[int, torch.Tensor] = {}
        self.used: set[int] = set()

    def take(self, nbytes: int) -> torch.Tensor:
        """Borrow uint8[m] with m >= nbytes, 4 KiB-aligned, contents undefined."""
        buffer = self._pool._take(max(nbytes, 1))  # noqa: SLF001 -- a lease is the pool's other half
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
    raw = torch.empty(rounded + PAGE, dtype=torch.uint8, pin_memory=pinned)
    skip = -raw.data_ptr() % PAGE
    return raw[skip : skip + rounded]


@cache
def shared_pool(*, pinned: bool) -> StagingPool:
    """Return this process's pool of that kind of memory."""
    return StagingPool(pinned=pinned)


os.register_at_fork(after_in_child=shared_pool.cache_clear)
