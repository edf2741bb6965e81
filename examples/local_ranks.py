"""Ranks of a job on this machine, for examples that start several jobs; torchrun starts those of a training."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import distributed as dist


class LocalRanks:
    """One process per rank, in one gloo group. Rank ``r`` calls ``work(r, size, pipe, *args)``.

    Attributes:
        pipes: by rank, the other end of ``pipe``.
    """

    def __init__(self, work: Callable[..., None], size: int, meeting: Path, *args: Any) -> None:
        """Start the processes, which meet at a file that does not exist yet."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["local_ranks", "bcp.data"])  # each process would import torch otherwise
        self.pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(work, rank, size, meeting, theirs, args))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self._processes.append(process)

    def kill(self) -> None:
        """Send SIGKILL to every process."""
        for process in self._processes:
            process.kill()

    def join(self) -> list[int | None]:
        """Wait for the processes, and return their exit codes."""
        for process in self._processes:
            process.join()
        return [process.exitcode for process in self._processes]


def _run(
    work: Callable[..., None], rank: int, size: int, meeting: Path, pipe: Connection, args: tuple[Any, ...]
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    work(rank, size, pipe, *args)
    dist.barrier()
    dist.destroy_process_group()
