"""How long ranks take to agree, over the real coordinator, on the loopback of one machine."""

from __future__ import annotations

import gc
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio
import xxhash

from bcp._agree import gather_broadcast
from bcp.coordinators.tree.coordinator import GrpcCoordinator
from bcp.coordinators.tree.loop import current_loop
from bcp.coordinators.tree.rendezvous import Tree
from bcp.protocols import Buffer
from benchmarks.figures import Figures, cpu_ms

__all__ = ["gathered", "spine", "virtual_ranks"]

WORD = 17
"""Bytes that a rank says when it commits."""


def spine(levels: int, fanout: int, goal_ms: float, figures: Figures, rounds: int = 100) -> None:
    """Time gather + scatter on the longest way of a tree of ``fanout ** levels`` ranks.

    Only the inner ranks of one way from the root down are there, with all their children. A child that would have a
    subtree says as much as all ranks of it would.
    """
    parents: list[int | None] = [None]
    stands_for, inner = [1], 0
    for level in range(levels):
        below = fanout ** (levels - 1 - level)
        deepest = level == levels - 1
        parents += [inner] * fanout
        stands_for += [below if deepest else 1, *[below] * (fanout - 1)]
        inner = len(parents) - fanout  # the first of them has the next level below it
    children: list[list[int]] = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(rank)
    tree = Tree(tuple(parents), tuple(map(tuple, children)))
    name = f"gather + scatter through {levels} levels of {fanout}: {fanout**levels:,} ranks"
    figures.measure(
        f"{name}, p50", lambda: 1000 * statistics.median(_timed(tree, stands_for, 3 + rounds)[3:]), "ms", goal_ms
    )


def virtual_ranks(world_size: int, fanout: int, goal_s: float, figures: Figures, rounds: int = 3) -> None:
    """Time gather + scatter of so many ranks, all of which are in this process: total work, not latency."""
    tree = Tree.of([f"host {rank // 8}" for rank in range(world_size)], fanout)
    started = time.perf_counter()
    first, *times = _timed(tree, [1] * world_size, 1 + rounds)
    total = time.perf_counter() - started
    name = f"{world_size:,} ranks in one process"
    figures.add(f"{name}: starting and connecting, with the first round", first, "s")
    figures.add(f"{name}: gather + scatter, p50", statistics.median(times), "s", goal_s)
    figures.add(f"{name}: gather + scatter, slowest of {rounds}", max(times), "s")
    figures.add(f"{name}: all of it, with leaving and closing", total, "s")


def gathered(world_size: int, figures: Figures) -> None:
    """Time what rank 0 does with what it has gathered, before it answers: looks for errors, compares, joins."""

    async def same_plan(said: Sequence[bytes]) -> bytes:
        return bytes([all(word == said[0] for word in said)])

    async def joined(said: Sequence[bytes]) -> bytes:
        return xxhash.xxh3_128_digest(b"".join(said))

    for name, answer in (("begin", same_plan), ("commit", joined)):
        words = [b"\0" + (bytes(16) if answer is same_plan else secrets.token_bytes(16)) for _ in range(world_size)]
        work = partial(anyio.run, gather_broadcast, _Gathered(words), name, 0, words[0][1:], answer)
        figures.add(f"rank 0 and what {world_size:,} ranks say at {name}", cpu_ms(work), "ms")


class _Gathered:
    """An agreement in which all others have said what they have to say."""

    def __init__(self, words: Sequence[bytes]) -> None:
        self._words = words

    async def gather_broadcast(
        self, step: str, mine: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]
    ) -> bytes:
        """Let rank 0 decide."""
        del step, mine
        return await decide(self._words)

    async def gather_scatter(
        self, step: str, mine: bytes, divide: Callable[[Sequence[bytes]], Sequence[bytes]]
    ) -> bytes:
        """Refuse: nobody asks."""
        raise NotImplementedError

    async def all_to_all(self, send: Sequence[Buffer], receive: Sequence[Buffer]) -> None:
        """Refuse: nobody asks."""
        raise NotImplementedError

    async def bandwidth(self) -> float:
        """Refuse: nobody asks."""
        raise NotImplementedError


def _timed(tree: Tree, stands_for: Sequence[int], rounds: int) -> list[float]:
    return current_loop().run(_run(tree, stands_for, rounds)).result()


async def _run(tree: Tree, stands_for: Sequence[int], rounds: int) -> list[float]:
    coordinators = GrpcCoordinator.in_memory(tree)
    times: list[float] = []

    async def answer(said: Sequence[bytes]) -> bytes:
        if sum(map(len, said)) != WORD * sum(stands_for):
            raise AssertionError("something was lost on the way")
        return bytes(WORD)

    async def take_part(coordinator: GrpcCoordinator) -> None:
        word = secrets.token_bytes(WORD * stands_for[coordinator.rank])
        async with coordinator.begin("benchmark", 60.0) as agreement:
            for _ in range(rounds):
                started = time.perf_counter()
                await agreement.gather_broadcast("round", word, answer)
                if coordinator.rank == 0:
                    times.append(time.perf_counter() - started)
                    gc.freeze()  # thousands of connected ranks in one process are a million objects to look through

    async with anyio.create_task_group() as group:
        for coordinator in coordinators:
            group.start_soon(take_part, coordinator)
    async with anyio.create_task_group() as group:
        for coordinator in coordinators:
            group.start_soon(coordinator.aclose)
    gc.unfreeze()
    return times
