"""Ranks whose training loop keeps the interpreter busy, each in a process of its own, one below the other.

Started by :func:`busy_chain`; ``python -m benchmarks.chain RANK PORT PORT ...`` is one of them.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import anyio

from bcp.coordinators import GrpcCoordinator
from benchmarks.figures import Figures

__all__ = ["busy_chain"]

ROUNDS = 40
WORD = bytes(17)


def busy_chain(levels: int, goal_ms: float, figures: Figures) -> None:
    """Time gather + scatter through so many levels of processes, all of which compute in Python meanwhile."""
    figures.measure(
        f"gather + scatter through {levels} levels of busy trainers, p50", lambda: _timed(levels), "ms", goal_ms
    )


def _timed(levels: int) -> float:
    """Return the median that rank 0 has measured, in ms."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(levels + 1)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in sockets]
    command = [sys.executable, "-m", "benchmarks.chain"]
    ranks = [
        subprocess.Popen([*command, str(rank), *ports], stdout=subprocess.PIPE, text=True)  # noqa: S603 -- this module
        for rank in range(levels + 1)
    ]
    said, *_ = [rank.communicate()[0] for rank in ranks]
    return float(said)


def _spin() -> None:
    """Be a training loop that never waits."""
    count = 0
    while True:
        count += 1


async def _rounds(tree: GrpcCoordinator) -> list[float]:
    async def answer(said: Sequence[bytes]) -> bytes:
        del said
        return WORD

    times = []
    async with tree.begin("chain", 60.0) as agreement:
        for _ in range(ROUNDS):
            started = time.perf_counter()
            await agreement.gather_broadcast("round", WORD, answer)
            times.append(time.perf_counter() - started)
    return times


def main(rank: int, ports: Sequence[str]) -> None:
    """Take part; rank 0 prints what it has measured."""
    threading.Thread(target=_spin, daemon=True).start()
    hosts = [f"host {each}" for each in range(len(ports))]  # one rank each, so that fan-out 1 makes a chain
    addresses = [f"127.0.0.1:{port}" for port in ports]
    tree = GrpcCoordinator.at(rank, addresses, "a benchmark has no secrets", hosts=hosts, fanout=1)
    times = anyio.run(_rounds, tree)
    tree.close()
    if rank == 0:
        print(1000 * statistics.median(times[3:]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
