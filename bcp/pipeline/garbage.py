"""Spares calls that make many objects, and soon let go of them, Python's garbage collection."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar, TypeVarTuple

from bcp.pipeline.threads import in_thread

__all__ = ["planning", "uncollected"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_lock = Lock()
_inside = 0
_put_off = False


async def planning(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Do as :func:`~bcp.pipeline.threads.in_thread`, with garbage collection put off.

    What planning makes for 20,000 tensors would set off full collections, which look at every object of the process:
    0.2 s where torch is imported, and all threads stand still meanwhile.
    """
    return await in_thread(uncollected()(function), *args)


@contextmanager
def uncollected() -> Iterator[None]:
    """Put off garbage collection as long as any thread is in here; leave it off where it was."""
    global _inside, _put_off  # noqa: PLW0603 -- as the switch itself, for the whole process
    with _lock:
        if not _inside:
            _put_off = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _put_off:
                gc.enable()


def _begin_anew_in_child() -> None:
    """Switch collection on again in a forked child, as a dataloader's worker is: no thread is in here there."""
    global _lock, _inside
    if _inside and _put_off:
        gc.enable()
    _lock, _inside = Lock(), 0


os.register_at_fork(after_in_child=_begin_anew_in_child)
