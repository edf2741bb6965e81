"""How long ranks take to agree, over the real coordinator, on the loopback of one machine."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Sequence

import anyio

from bcp.coordinators.grpc_coordinator import GrpcCoordinator
from bcp.coordinators.tree import Tree
from bcp.protocols import Agreement
from benchmarks.figures import Figures

__all__ = ["spine", "virtual_ranks"]

WORD = 17
"""Bytes that a rank says when it commits."""


def spine(levels: int, fanout: int, goal_ms: float, figures: Figures, rounds: int = 100) -> None:
    """Time gather + scatter on the longest way of a tree of ``fanout ** levels`` ranks.

    Only the inner ranks of one way from the root down are there, with all their children. A child that would have a
    subtree says as much as all ranks of it would.
    """
    parents: list[int | None] = [None]
    stands_for = [1]
    inner = 0
    for level in range(levels):
        first = len(parents)
        parents += [inner] * fanout
        below = fanout ** (levels - 1 - level)
        stands_for += [1 if level < levels - 1 else below, *[below] * (fanout - 1)]
        inner = first
    children = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(rank)
    tree = Tree(tuple(parents), tuple(map(tuple, children)))
    times = anyio.run(_run, tree, stands_for, rounds)
    name = f"gather + scatter through {levels} levels of {fanout}: {fanout**levels:,} ranks"
    figures.add(f"{name}, p50", 1000 * statistics.median(times[3:]), "ms", goal_ms)
    figures.add(f"{name}, p95", 1000 * statistics.quantiles(times[3:], n=20)[-1], "ms")


def virtual_ranks(world_size: int, fanout: int, goal_s: float, figures: Figures, rounds: int = 3) -> None:
    """Time gather + scatter of so many ranks, all of which are in this process: total work, not latency."""
    started = time.perf_counter()
    tree = Tree.of([f"host {rank // 8}" for rank in range(world_size)], fanout)
    times = anyio.run(_run, tree, [1] * world_size, 1 + rounds)
    total = time.perf_counter() - started
    name = f"{world_size:,} ranks in one process"
    figures.add(f"{name}: starting, connecting, and all rounds", total, "s")
    figures.add(f"{name}: gather + scatter, slowest of {rounds}", max(times[1:]), "s", goal_s)


async def _run(tree: Tree, stands_for: Sequence[int], rounds: int) -> list[float]:
    """Return the seconds that rank 0 waits in each round."""
    coordinators = GrpcCoordinator.in_memory(tree)
    times: list[float] = []

    async def answer(said: Sequence[bytes]) -> bytes:
        if sum(map(len, said)) != WORD * sum(stands_for):
            raise AssertionError("something was lost on the way")
        return bytes(WORD)

    async def take_part(rank: int, agreement: Agreement) -> None:
        word = secrets.token_bytes(WORD * stands_for[rank])
        for _ in range(rounds):
            started = time.perf_counter()
            await agreement.decide("round", word, answer)
            if rank == 0:
                times.append(time.perf_counter() - started)

    async def one(coordinator: GrpcCoordinator) -> None:
        async with coordinator.begin("benchmark", 60.0) as agreement:
            await take_part(coordinator.rank, agreement)

    async with anyio.create_task_group() as group:
        for coordinator in coordinators:
            group.start_soon(one, coordinator)
    async with anyio.create_task_group() as group:
        for coordinator in coordinators:
            group.start_soon(coordinator.aclose)
    return times
