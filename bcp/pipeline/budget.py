"""The byte budget: how much memory the items inside a pipeline may hold together."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import anyio

from bcp.errors import InputError

__all__ = ["Budget"]


@dataclass(slots=True, eq=False)
class _Waiter:
    """Somebody who wants bytes and does not have them yet."""

    nbytes: int
    granted: anyio.Event = field(default_factory=anyio.Event)


class Budget:
    """So many bytes, lent first come first served.

    A request above the whole capacity is granted when nothing else is lent, so an item that is too large runs alone
    instead of never. Hence ``in_use`` never exceeds ``max(capacity, largest single request)``.

    One budget may be shared by several pipelines; all of them have to run on one event loop.
    """

    __slots__ = ("_capacity", "_in_use", "_peak", "_waited_seconds", "_waiters")

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise InputError(f"a budget of {nbytes} bytes cannot be; pass zero or more")
        self._capacity = nbytes
        self._in_use = 0
        self._peak = 0
        self._waited_seconds = 0.0
        self._waiters: deque[_Waiter] = deque()

    @property
    def capacity(self) -> int:
        """Bytes that may be lent in total."""
        return self._capacity

    @property
    def in_use(self) -> int:
        """Bytes that are lent now."""
        return self._in_use

    @property
    def peak(self) -> int:
        """The most bytes that were ever lent at once."""
        return self._peak

    @property
    def waited_seconds(self) -> float:
        """Seconds that requests have waited, all of them together. High: the budget slows the pipeline down."""
        return self._waited_seconds

    async def acquire(self, nbytes: int) -> None:
        """Borrow ``nbytes`` bytes; wait until they are free and everybody who came before has been served."""
        if nbytes < 0:
            raise InputError(f"cannot borrow {nbytes} bytes")
        if not self._waiters and self._fits(nbytes):
            self._lend(nbytes)
            return
        waiter = _Waiter(nbytes)
        self._waiters.append(waiter)
        started = time.monotonic()
        try:
            await waiter.granted.wait()
        except BaseException:
            self._withdraw(waiter)
            raise
        finally:
            self._waited_seconds += time.monotonic() - started

    def release(self, nbytes: int) -> None:
        """Give ``nbytes`` bytes back. Raises ValueError for more than is lent."""
        if not 0 <= nbytes <= self._in_use:
            raise ValueError(f"cannot give back {nbytes} bytes; {self._in_use} are lent")
        self._in_use -= nbytes
        self._serve()

    def __repr__(self) -> str:
        return (
            f"<Budget {self._in_use}/{self._capacity} bytes in use, peak {self._peak}, "
            f"{len(self._waiters)} waiting, {self._waited_seconds:.3f} s waited>"
        )

    def _fits(self, nbytes: int) -> bool:
        return self._in_use == 0 or self._in_use + nbytes <= self._capacity

    def _lend(self, nbytes: int) -> None:
        self._in_use += nbytes
        self._peak = max(self._peak, self._in_use)

    def _serve(self) -> None:
        """Lend to those who wait, in order, until one does not fit."""
        while self._waiters and self._fits(self._waiters[0].nbytes):
            waiter = self._waiters.popleft()
            self._lend(waiter.nbytes)
            waiter.granted.set()

    def _withdraw(self, waiter: _Waiter) -> None:
        """Leave nothing behind of a cancelled request: neither its place in the queue nor bytes granted just now."""
        if waiter.granted.is_set():
            self.release(waiter.nbytes)
        else:
            self._waiters.remove(waiter)
            self._serve()
