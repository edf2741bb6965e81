"""Calls in worker threads, which are always waited for and may have low priority; pauses of garbage collection."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import platform
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar, TypeVarTuple

import anyio
from anyio.lowlevel import RunVar

from bcp.runtime.process import in_forked_child, process_lock

__all__ = [
    "collect_failure_garbage",
    "gc_paused",
    "in_pool",
    "in_thread",
    "in_thread_even_if_cancelled",
    "in_thread_gc_paused",
    "in_thread_of_few",
    "low_priority_threads",
    "on_loop",
    "thread_count",
    "with_thread_setup",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Outcome = tuple[T, None] | tuple[None, BaseException]

MAX_THREADS = 128
"""Only a safety net: how many calls run at once is decided by the stages' ``workers``."""

Priority = tuple[int, int]
"""``nice`` of a thread, and Linux' I/O priority as ``ioprio_set`` takes it: class and level, 0 for none."""

_AS_THE_PROCESS: Priority = (0, 0)
_CLASSES = {"best-effort": 2 << 13, "idle": 3 << 13}
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}

_pools: RunVar[dict[tuple[Priority, int], ThreadPoolExecutor]] = RunVar("bcp thread pools")
_priority: ContextVar[Priority] = ContextVar("bcp thread priority", default=_AS_THE_PROCESS)


def _nothing() -> None:
    """Do nothing."""


_first: ContextVar[Callable[[], None]] = ContextVar("bcp thread beginning", default=_nothing)


@contextmanager
def low_priority_threads(*, nice: int = 0, io: str | None = None) -> Iterator[None]:
    """Let calls of :func:`in_thread` inside of the block run in threads that let other work go first.

    ``nice``, 0 to 19, is added to the process's niceness. ``io`` is ``"best-effort"`` (its lowest level), ``"idle"``,
    or None for the priority of the process. It has an effect only on local disks whose scheduler knows priorities: bfq
    and mq-deadline.
    """
    token = _priority.set((nice, 0 if io is None else _CLASSES[io] | (7 if io == "best-effort" else 0)))
    try:
        yield
    finally:
        _priority.reset(token)


@contextmanager
def with_thread_setup(first: Callable[[], None]) -> Iterator[None]:
    """Let every call of :func:`in_thread` inside of the block begin with this one, in the same thread.

    It sets the state of a thread, not of a task: a library's current device, for instance.
    """
    token = _first.set(first)
    try:
        yield
    finally:
        _first.reset(token)


async def in_thread(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run a blocking call in a worker thread and return its result; it sees the caller's context variables.

    When cancelled it waits for the thread, then lets the cancellation pass; a call that no thread has begun is never
    begun. So when this is over, in whatever way, nothing reads or writes the caller's buffers any more.

    ``asyncio.to_thread`` leaves the thread running. ``anyio.to_thread`` waits for it, except when the task is cancelled
    by asyncio itself: ``asyncio.timeout``, ``wait_for``, ``Task.cancel``, Ctrl-C under ``asyncio.run``.
    """
    return await in_pool(_threads(), function, *args)


async def in_thread_of_few(count: int, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run a blocking call as :func:`in_thread` does, in one of at most ``count`` threads that run nothing else.

    Calls of CUDA are quicker in a thread that has just made some: those of one part took 0.26 instead of 0.4 to 0.5 ms
    (H200, 16 cores). The threads of :func:`in_thread` take turns, and were 70 to 84 there.
    """
    return await in_pool(_threads(count), function, *args)


async def in_thread_even_if_cancelled(function: Callable[[*Ts], object], *args: *Ts) -> None:
    """Run a blocking call in a worker thread, also when cancelled: for clean-up at the end of a block.

    If no thread has begun it, because a cancellation comes first or no thread can be had, the call is made here.
    """
    begun: list[bool] = []

    def run() -> None:
        begun.append(True)
        function(*args)

    try:
        with anyio.CancelScope(shield=True):
            await in_thread(run)
    except BaseException as error:
        if begun:
            raise
        function(*args)
        if not isinstance(error, Exception):
            raise


async def in_pool(
    pool: ThreadPoolExecutor, function: Callable[[*Ts], T], *args: *Ts, interrupt: Callable[[], object] = lambda: None
) -> T:
    """Do the same in a thread of that pool: for calls that may block for long, and would keep others from a thread.

    ``interrupt`` is called if a cancellation comes while the call runs, and lets it end.
    """
    # Not the job's own result: asyncio ties job and awaitable into a cycle, which would keep large results alive.
    box: list[Outcome[T]] = []
    await _ended(_submit(pool, partial(copy_context().run, _call, partial(function, *args), box)), interrupt)
    return _taken(box)


async def on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Await a coroutine function on the event loop of another thread; it sees the caller's context variables.

    When cancelled it cancels the work there, waits until that has ended, and lets the cancellation pass. So nothing
    uses the caller's buffers any more when this is over.
    """
    box: list[Outcome[T]] = []
    job = Future[None]()
    tasks: list[asyncio.Task[None]] = []

    async def work() -> None:
        try:
            box.append((await function(*args), None))
        except BaseException as error:  # noqa: BLE001 -- raised again by the caller; here it could end the loop
            box.append((None, error))

    def begin() -> None:
        if job.set_running_or_notify_cancel():
            tasks.append(loop.create_task(work()))
            tasks[0].add_done_callback(lambda _: job.set_result(None))

    def cancel() -> None:  # comes after begin, which the loop was given first
        tasks[0].cancel()

    loop.call_soon_threadsafe(begin)
    await _ended(job, lambda: loop.call_soon_threadsafe(cancel))
    return _taken(box)


def thread_count() -> int:
    """Return how many threads bcp has in this process now, of whatever room."""
    return sum(thread.name.startswith("bcp-") for thread in threading.enumerate())


def _threads(count: int = MAX_THREADS) -> ThreadPoolExecutor:
    """Return the running event loop's thread pool of the current priority. Its threads end when the loop is gone.

    There is one for each priority, because without privileges a thread cannot raise its own again.
    """
    pools = _pools.get(None)
    if pools is None:
        pools = {}
        _pools.set(pools)
    key = priority, _ = _priority.get(), count
    if key not in pools:
        pools[key] = ThreadPoolExecutor(count, "bcp-worker", _give_way, priority)
    return pools[key]


def _give_way(nice: int, io: int) -> None:
    """Lower the priority of the calling thread, as far as the system lets it."""
    if nice:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + nice, 19))
    if io and platform.machine() in _IOPRIO_SET:
        call, process_or_thread, itself = _IOPRIO_SET[platform.machine()], 1, 0
        ctypes.CDLL(None).syscall(call, process_or_thread, itself, io)  # advice: an error changes nothing


def _call(function: Callable[[], T], box: list[Outcome[T]]) -> None:
    """Call the function and put its outcome into the box.

    An error too: a future hangs on StopIteration (Python 3.11), and takes a CancelledError for its own cancellation.
    """
    try:
        _first.get()()
        box.append((function(), None))
    except BaseException as error:  # noqa: BLE001 -- raised again by in_thread
        box.append((None, error))


def _submit(pool: ThreadPoolExecutor, call: Callable[[], None]) -> Future[None]:
    """Give the call to a thread. If none can be had, it is never made: the pool itself would keep it for later."""
    job = Future[None]()

    def run() -> None:
        if job.set_running_or_notify_cancel():
            call()
            job.set_result(None)

    try:
        pool.submit(run)
    except RuntimeError:
        if job.cancel():
            raise
    return job


def _taken(box: list[Outcome[T]]) -> T:
    """Return or raise the outcome in the box."""
    result, error = box.pop()
    if error is None:
        return result  # type: ignore[return-value]  # the first of the two forms of an outcome
    try:
        raise error
    finally:
        del error  # it would hold this frame and the frame it: a cycle that keeps the caller's buffers alive


async def _ended(job: Future[None], interrupt: Callable[[], object]) -> None:
    """Wait until the job has ended, also when cancelled."""
    try:
        await asyncio.wrap_future(job)
    except asyncio.CancelledError:
        if not job.cancel():
            interrupt()
            with anyio.CancelScope(shield=True):
                while not job.done():
                    with suppress(asyncio.CancelledError):  # a second cancellation must not cut the waiting short
                        await asyncio.wait([asyncio.wrap_future(job)])
        raise


_OFF = 0  # as the first threshold: no collection begins by itself

_lock = process_lock()
_inside = 0
_usual = gc.get_threshold()


async def in_thread_gc_paused(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Do as :func:`~bcp.runtime.threads.in_thread`, with garbage collection put off.

    The objects of a plan for 20,000 tensors would set off full collections, which look at every object of the process:
    0.2 s where torch is imported, and all threads stand still meanwhile.
    """
    return await in_thread(gc_paused()(function), *args)


@contextmanager
def gc_paused() -> Iterator[None]:
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
async def collect_failure_garbage() -> AsyncIterator[None]:
    """Collect garbage before an operation if the one before it failed.

    An error and the frames of its traceback can form cycles, in the standard library and anyio too. The frames lead to
    the state's tensors. Few large objects set off no collection by themselves: 336 failed saves in a row doubled the
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
    if gc.get_threshold()[0] == _OFF:
        gc.set_threshold(*_usual)


def _begin_anew_in_child() -> None:
    """Let a forked child collect again, as a dataloader's worker is: no thread is in here there."""
    global _inside  # noqa: PLW0603 -- as the switch itself, for the whole process
    if _inside:
        _as_usual()
    _inside = 0


in_forked_child(_begin_anew_in_child)
