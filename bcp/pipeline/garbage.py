"""Spares calls that make many objects, and soon let go of them, Python's garbage collection."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Lock
from typing import TypeVar, TypeVarTuple

from bcp.pipeline.threads import in_thread

__all__ = ["failures_collected", "planning", "uncollected"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_OFF = 0  # as the first threshold: no collection begins by itself

_lock = Lock()
_inside = 0
_usual = gc.get_threshold()


async def planning(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Do as :func:`~bcp.pipeline.threads.in_thread`, with garbage collection put off.

    What planning makes for 20,000 tensors would set off full collections, which look at every object of the process:
    0.2 s where torch is imported, and all threads stand still meanwhile.
    """
    return await in_thread(uncollected()(function), *args)


@contextmanager
def uncollected() -> Iterator[None]:
    """Put off garbage collection as long as any thread is in here; leave it off where it was, or is switched off."""
    global _inside, _usual  # noqa: PLW0603 -- as the switch itself, for the whole process
    with _lock:
        if not _inside:
            _usual = gc.get_threshold()
            gc.set_threshold(_OFF, *_usual[1:])
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _as_usual()


_failed = False


@asynccontextmanager
async def failures_collected() -> AsyncIterator[None]:
    """Collect garbage before an operation if the one before it failed.

    An error and the frames of its traceback can form cycles, in the standard library and anyio too, and the frames lead
    to the state's tensors. Few large objects set off no collection by themselves: 336 failed saves in a row doubled the
    process's memory. Costs as much as one full collection, 0.2 s, after a failure.
    """
    global _failed  # noqa: PLW0603 -- as the garbage, for the whole process
    if _failed:
        _failed = False
        await in_thread(gc.collect)
    try:
        yield
    except BaseException:
        _failed = True
        raise


def _as_usual() -> None:
    """Set the thresholds as they were, unless somebody else has set others meanwhile."""
    if gc.get_threshold()[0] == _OFF:
        gc.set_threshold(*_usual)


def _begin_anew_in_child() -> None:
    """Let a forked child collect again, as a dataloader's worker is: no thread is in here there."""
    global _lock, _inside
    if _inside:
        _as_usual()
    _lock, _inside = Lock(), 0


os.register_at_fork(after_in_child=_begin_anew_in_child)
