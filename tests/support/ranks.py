"""A pool of gloo processes that stay alive, so that a test pays for its ranks only once a session.

::

    def double(x):                       # at the top level of a test module; runs on every rank
        return x * 2 + dist.get_rank()

    def test_double(ranks4):
        assert ranks4.run(double, 10) == [20, 21, 22, 23]
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, ClassVar
from weakref import WeakSet

import fork_server
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from bcp import _record

__all__ = ["HOST", "RankFailedError", "Ranks", "ended", "kept", "meeting_place", "record_patiently", "started"]

HOST = "127.0.0.1"
PRELOADED = [*fork_server.PRELOADED, "datasets", "bcp.data", "bcp.data.adapters.torchdata"]
GRACE_SECONDS = 60.0
"""After one rank failed: how long the others may go on before they are taken to wait for it in vain."""
IDLE_FILES = 3


def forkserver() -> ForkServerContext:
    """Return what starts processes: from one that has imported what all need, so that each is there 5 s sooner."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def record_patiently() -> None:
    """Let this process wait longer for recordings than a training job would: tests look at them, on busy disks too."""
    _record.SHARE_SECONDS = _record.STORE_SECONDS = 60.0


def meeting_place() -> dist.TCPStore:
    """Return a store in which ranks find each other; the system picks its port."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def started(size: int, function: Callable[..., None], *args: Any) -> list[Any]:
    """Start ``function(rank, *args)`` in so many processes of their own, which may come to harm."""
    processes = [forkserver().Process(target=function, args=(rank, *args)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def ended(processes: list[Any], timeout: float) -> list[int | None]:
    """Wait for processes, and return their exit codes: None for those that have not ended in time, and are killed."""
    for process in processes:
        process.join(timeout)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


_kept: list[dist.ProcessGroup] = []


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Let groups that a function makes on its rank outlive the call."""
    before = set(distributed_c10d._world.pg_map)
    yield
    _kept.extend(set(distributed_c10d._world.pg_map) - before)


class RankFailedError(AssertionError):
    """A rank raised, died or did not answer; the message holds the traceback text of every rank that raised.

    Attributes:
        ranks: the ranks to blame.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


class Ranks:
    """``size`` processes in one gloo group, started by the first ``run``.

    Groups that a function makes are gone when the next one begins; not those of meshes, nor those made in :func:`kept`.
    A function that raises leaves the pool alive. A pool whose rank died or hangs is ended, and the next ``run``
    starts a new one.
    """

    _pools: ClassVar[WeakSet[Ranks]] = WeakSet()

    def __init__(self, size: int) -> None:
        self.size = size
        self._idle_files = 0
        self._pools.add(self)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None

    def __repr__(self) -> str:
        return f"Ranks(size={self.size}, {'running' if self._processes else 'not started'})"

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """Call ``function(*args)`` on every rank; return what it returned, in rank order.

        Function, arguments and results are pickled, the function by reference, tensors by value.
        """
        self._idle_files = -1  # until this one ends
        if not self._processes:
            self._start()
        call = pickle.dumps((function, args))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a dead rank is noticed, with its exit code, when it does not answer
                pipe.send_bytes(call)
        replies = self._collect(function.__name__, timeout)
        failed = sorted(rank for rank, (ok, _) in replies.items() if not ok)
        if failed:
            texts = [f"--- rank {rank} ---\n{replies[rank][1]}" for rank in failed]
            raise RankFailedError(f"{function.__name__} failed on ranks {failed}\n" + "\n".join(texts), failed)
        return [replies[rank][1] for rank in range(self.size)]

    @classmethod
    def rest(cls) -> None:
        """Be told of the end of a file: end all pools that did nothing in the last three.

        Threads of gloo wake ten times a second, and a new pool costs a second of CPU time, those of DeepSpeed more.
        """
        for pool in list(cls._pools):
            pool._idle_files += 1
            if pool._idle_files >= IDLE_FILES:
                pool.close()

    def close(self) -> None:
        """End all processes, at once: there is nothing in them to lose. Idempotent."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        self._store = meeting_place()
        context = forkserver()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._store.port, rank, self.size), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, what: str, timeout: float) -> dict[int, tuple[bool, Any]]:
        """Wait for every rank's (ok, result or traceback); raise as soon as one died, or time is up."""
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(replies) < self.size:
            waiting = {self._pipes[rank]: rank for rank in range(self.size) if rank not in replies}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up(f"{what}: no answer in time from ranks {sorted(waiting.values())}", replies, waiting)
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    replies[rank] = pickle.loads(pipe.recv_bytes())  # noqa: S301 -- from our own child
                except (EOFError, ConnectionError):  # the other end is closed: only death does that
                    self._processes[rank].join(60.0)
                    code = self._processes[rank].exitcode
                    self._give_up(f"{what}: rank {rank} died with exit code {code}", replies, {pipe: rank})
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return replies

    def _give_up(self, message: str, replies: dict[int, tuple[bool, Any]], blamed: dict[Any, int]) -> None:
        self.close()
        texts = [f"--- rank {rank} ---\n{text}" for rank, (ok, text) in sorted(replies.items()) if not ok]
        raise RankFailedError("\n".join([message, *texts]), sorted(blamed.values()))


def _serve(pipe: Connection, port: int, rank: int, size: int) -> None:
    """Be one rank: join the group, then run what comes until the parent kills or leaves us."""
    torch.set_num_threads(1)
    record_patiently()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    gc.freeze()  # collections look at what calls have made, not at all that was imported
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            call = pipe.recv_bytes()
            _forget()
            try:
                modules = len(sys.modules)
                function, args = pickle.loads(call)  # noqa: S301 -- from our own parent
                if len(sys.modules) > modules:
                    gc.freeze()
                reply = pickle.dumps((True, function(*args)))
            except BaseException:  # noqa: BLE001 -- pytest's own failures are no Exceptions; the parent tells them all
                reply = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(reply)


def _forget() -> None:
    """End the groups of earlier calls. Each has three threads, one of which wakes up ten times a second.

    Those of meshes stay: DTensor remembers by what groups equal meshes communicate.
    """
    groups = [group for group in distributed_c10d._world.pg_map if group not in (dist.group.WORLD, *_kept)]
    made = [group for group in groups if not group.group_desc.startswith("mesh_")]
    for group in made:
        dist.destroy_process_group(group)
    if made:
        gc.collect()  # a model and its groups hold each other
