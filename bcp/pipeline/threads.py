"""Blocking calls in worker threads, which are never left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TypeVar, TypeVarTuple

import anyio
from anyio.lowlevel import RunVar

__all__ = ["in_thread"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Outcome = tuple[T, None] | tuple[None, BaseException]

MAX_THREADS = 128
"""Only a safety net: how many calls run at once is decided by the stages' ``workers``."""

_pool: RunVar[ThreadPoolExecutor] = RunVar("bcp thread pool")


async def in_thread(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run a blocking call in a worker thread and return what it returns; it sees the caller's context variables.

    When cancelled it waits for the thread, then lets the cancellation pass; a call that no thread has begun is never
    begun. So when this is over, in whatever way, nothing reads or writes the caller's buffers any more.

    ``asyncio.to_thread`` leaves the thread running. ``anyio.to_thread`` waits for it, except when the task is cancelled
    by asyncio itself: ``asyncio.timeout``, ``wait_for``, ``Task.cancel``, Ctrl-C under ``asyncio.run``.
    """
    # Not the job's own result: asyncio ties job and awaitable into a cycle, which would keep large results alive.
    box: list[Outcome[T]] = []
    await _ended(_submit(partial(copy_context().run, _call, partial(function, *args), box)))
    result, error = box.pop()
    if error is None:
        return result  # type: ignore[return-value]  # the first of the two forms of an outcome
    try:
        raise error
    finally:
        del error  # it would hold this frame and the frame it: a cycle that keeps the caller's buffers alive


def _threads() -> ThreadPoolExecutor:
    """Return the thread pool of the running event loop. Its threads end when the loop is gone."""
    pool = _pool.get(None)
    if pool is None:
        pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="bcp-worker")
        _pool.set(pool)
    return pool


def _call(function: Callable[[], T], box: list[Outcome[T]]) -> None:
    """Call the function and put what comes of it into the box.

    An error too: a future hangs on StopIteration (Python 3.11), and takes a CancelledError for its own cancellation.
    """
    try:
        box.append((function(), None))
    except BaseException as error:  # noqa: BLE001 -- raised again by in_thread
        box.append((None, error))


def _submit(call: Callable[[], None]) -> Future[None]:
    """Give the call to a thread. If none can be had, it is never made: the pool itself would keep it for later."""
    job = Future[None]()

    def run() -> None:
        if job.set_running_or_notify_cancel():
            call()
            job.set_result(None)

    try:
        _threads().submit(run)
    except RuntimeError:
        if job.cancel():
            raise
    return job


async def _ended(job: Future[None]) -> None:
    """Wait until the job has ended, also when cancelled."""
    try:
        await asyncio.wrap_future(job)
    except asyncio.CancelledError:
        if not job.cancel():
            with anyio.CancelScope(shield=True):
                while not job.done():
                    with suppress(asyncio.CancelledError):  # a second cancellation must not cut the waiting short
                        await asyncio.wait([asyncio.wrap_future(job)])
        raise
