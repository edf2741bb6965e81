"""How long a save keeps training waiting: in a tmpfs or in ordinary memory, with or without copies elsewhere."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from bcp._calls import save_call
from bcp.coordinators import memory_coordinators
from bcp.protocols import Coordinator, States
from bcp.runtime.threads import in_thread
from bcp.tiers.memory import TierMemory
from bcp.tiers.recovery import Hosts
from benchmarks.figures import Figures
from benchmarks.tiers.hosts import SAVING, Host, Kept, filled, keep, until

__all__ = ["beside_copies", "staging"]

WARM_UP = 4
"""Saves until all memory is there: of two snapshots, and of a third one while one is being copied."""

TO_STAGING, TO_ITSELF = 1.15, 1.1

GIB = 1 << 30

T = TypeVar("T")
U = TypeVar("U")


def staging(nbytes: int, rounds: int, memory: Path, disk: Path, figures: Figures) -> None:
    """Compare saves into memory with saves in the background, whose snapshot is ordinary memory that is kept.

    Args:
        nbytes: of the state.
        rounds: pairs.
        memory: a directory on a tmpfs.
        disk: a directory for the checkpoints of the saves in the background.
        figures: get the result.

    """
    figures.head(f"A snapshot of {nbytes / GIB:.3g} GiB by one rank, {rounds} pairs")
    _, states = filled(nbytes)
    host = Host.make(memory, "staging", disk / "run")
    tier = TierMemory(host.folder, 0)
    pairs = asyncio.run(_staged(tier, states, rounds, disk / "plain"))
    tier.close()
    into_tmpfs, staged = (statistics.median(column) for column in zip(*pairs, strict=True))
    figures.add("into ordinary memory, then to disk: the call takes", 1000 * staged, "ms")
    figures.add("into files of a tmpfs: the call takes", 1000 * into_tmpfs, "ms")
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    figures.add("snapshot into a tmpfs, to plain staging; median of pairs", ratio, "", TO_STAGING)


async def _staged(tier: TierMemory, states: States, rounds: int, path: Path) -> list[tuple[float, float]]:
    """Measure in turns: seconds of saves into memory, and in the background. The first ones make their memory."""
    [ranks], [others] = memory_coordinators(1), memory_coordinators(1)
    pairs = []
    for step in range(1, WARM_UP + rounds + 1):
        mine = partial(keep, [tier], [ranks], states, step)
        ours, theirs = await _in_turns(mine, partial(_in_background, states, path, others), is_swapped=step % 2 > 0)
        pairs.append((ours.seconds, theirs))
    return pairs[WARM_UP:]


async def _in_turns(
    first: Callable[[], Awaitable[T]], second: Callable[[], Awaitable[U]], *, is_swapped: bool
) -> tuple[T, U]:
    """Await two calls one after the other, in this order or in the other one; return both results."""
    if is_swapped:
        after = await second()
        return await first(), after
    return await first(), await second()


async def _in_background(states: States, path: Path, ranks: Coordinator) -> float:
    """Save in the background to disk, until it is durable; return the seconds until training may go on."""
    begin, ends = perf_counter(), list[float]()
    call = save_call(path, states, None, None, SAVING, ranks, background=True, overwrite=True)
    await call.run(lambda: ends.append(perf_counter()))
    return ends[0] - begin


class Pair:
    """Two ranks on two hosts, whose agents copy the snapshots of the other host, or do not."""

    def __init__(self, memory: Path, durable: Path, copies: int, stack: ExitStack) -> None:
        self.hosts = [Host.make(memory, f"{copies}-copies-{number}", durable) for number in range(2)]
        for host in self.hosts:
            stack.enter_context(host.served())
        every = Hosts(tuple(each.name for each in self.hosts), tuple(each.folder.address() for each in self.hosts))
        self.memories = [TierMemory(host.folder, rank, str(durable)) for rank, host in enumerate(self.hosts)]
        for host, tier in zip(self.hosts, self.memories, strict=True):
            stack.callback(tier.close)
            sources = every.copied_by(host.name, copies - 1, 1)
            host.folder.put_sources(sources)
            tier.copies = len(sources.nodes)
        self.ranks = memory_coordinators(2)

    async def keep(self, states: States, step: int) -> Kept:
        """Save into the memories of both hosts."""
        return await keep(self.memories, self.ranks, states, step)

    def are_copying(self, kept: Kept) -> bool:
        """Whether the hosts have begun to copy a snapshot."""
        return any(mark.operation == kept.operation for host in self.hosts for mark in host.folder.copies())

    def have_copied(self) -> bool:
        """Whether the hosts have copied all snapshots that were to be copied."""
        return all(tier.is_copied() for tier in self.memories)


def beside_copies(nbytes: int, rounds: int, memory: Path, disk: Path, figures: Figures) -> None:
    """Compare saves whose snapshots are copied to another host with saves that are not copied.

    Args:
        nbytes: of the state; each host saves a half.
        rounds: pairs.
        memory: a directory on a tmpfs.
        disk: a directory for runs.
        figures: get the result.

    """
    figures.head(
        f"Saves of {nbytes / GIB:.3g} GiB by two hosts on this machine, with and without copies, {rounds} pairs"
    )
    _, states = filled(nbytes)
    with ExitStack() as stack:
        with_copies, without = (Pair(memory, disk / f"run-{copies}", copies, stack) for copies in (2, 1))
        between, beside = asyncio.run(_compared(with_copies, without, states, rounds))
    figures.add("without copies: the call takes", 1000 * statistics.median(theirs for _, theirs in between), "ms")
    figures.add("with copies: the call takes", 1000 * statistics.median(ours for ours, _ in between), "ms")
    figures.add("with copies, to without; median of pairs", _median_ratio(between), "", TO_ITSELF)
    if beside:
        figures.add("the same while agents copy the snapshot before, on the same cores", _median_ratio(beside))


def _median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(ours / theirs for ours, theirs in pairs)


async def _compared(
    with_copies: Pair, without: Pair, states: States, rounds: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Measure pairs of saves: when the snapshot before is copied, and while it is being copied."""
    between, beside = [], []
    for step in range(1, 2 * (WARM_UP + rounds) + 1, 2):
        mine, other = (partial(each.keep, states, step) for each in (with_copies, without))
        ours, theirs = await _in_turns(mine, other, is_swapped=step % 4 == 1)
        await in_thread(until, partial(with_copies.are_copying, ours), "nobody copies a snapshot")
        ours_beside = await with_copies.keep(states, step + 1)
        is_beside = not with_copies.have_copied()
        await in_thread(until, with_copies.have_copied, "a snapshot is not copied")
        theirs_beside = await without.keep(states, step + 1)
        if step > 2 * WARM_UP:
            between.append((ours.seconds, theirs.seconds))
            beside += [(ours_beside.seconds, theirs_beside.seconds)] if is_beside else []
    return between, beside
