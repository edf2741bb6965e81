"""How soon a rank comes back: from the memory of its host, from that of another host, from a disk."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

import bcp
from bcp.coordinators import memory_coordinators
from bcp.protocols import States, at_once_of
from bcp.tiers.memory import TierMemory
from bcp.tiers.near import NearBackend
from benchmarks.figures import Figures
from benchmarks.speed import disk as files_of_a_disk
from benchmarks.speed.state import State
from benchmarks.tiers import raw
from benchmarks.tiers.hosts import LOADING, SAVING, Host, Recovered, filled, keep, memory_of, recover

__all__ = ["from_here", "from_peer"]

TO_MEMCPY, TIMES_DISK, TO_SENDFILE = 2.0, 2.5, 0.7
THREADS = at_once_of(NearBackend)
"""Reads of a recovery at once; the machine copies and receives in as many threads."""

GIB = 1 << 30


def from_here(nbytes: int, rounds: int, memory: Path, disk: Path, figures: Figures) -> None:
    """Compare recoveries from the memory of the own host with a copy of the same bytes, and with a load from disk.

    Args:
        nbytes: of the state.
        rounds: in each of them all ways take turns.
        memory: a directory on a tmpfs.
        disk: a directory for a checkpoint of the same state.
        figures: get the result.

    """
    figures.head(f"Recovery of {nbytes / GIB:.3g} GiB from the memory of the own host, {rounds} rounds")
    state, states = filled(nbytes)
    host, whole = Host.make(memory, "here", disk / "run"), state.digest()
    _keep(host, states)
    bcp.save(disk / "direct", states, options=SAVING)
    first = _recovered([host], [states]).seconds
    rows = []
    for _ in range(rounds):
        memcpy = raw.copied(_file_of(host), memory_of(states), THREADS)
        state.clear()
        ours = _recovered([host], [states]).seconds
        _check(state, whole)
        files_of_a_disk.cool(disk / "direct")
        rows.append((memcpy, ours, _loaded(disk / "direct", states)))
    names = (f"memcpy in {THREADS} threads", "recovery", "load from disk, cold")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        figures.add(f"{name}; median", 1000 * statistics.median(column), "ms")
    figures.add("recovery before any agent has made checksums, once", 1000 * first, "ms")
    figures.add("recovery, to memcpy", statistics.median(ours / memcpy for memcpy, ours, _ in rows), "", TO_MEMCPY)
    times = statistics.median(cold / ours for _, ours, cold in rows)
    figures.add("times faster than from disk", times, "", TIMES_DISK, least=True)


def from_peer(nbytes: int, rounds: int, memory: Path, disk: Path, figures: Figures) -> None:
    """Compare recoveries through the agent of another host with ``sendfile`` of the same bytes over the loopback.

    Rank 0 lives on the host with the files, and needs next to nothing. Rank 1 lives on an empty host.

    Args:
        nbytes: of the state.
        rounds: in each of them both ways take turns.
        memory: a directory on a tmpfs.
        disk: a directory for a run.
        figures: get the result.

    """
    figures.head(f"Recovery of {nbytes / GIB:.3g} GiB from the memory of another host, {rounds} rounds")
    state, states = filled(nbytes)
    there, here = (Host.make(memory, name, disk / "run") for name in ("there", "empty"))
    whole, extra = state.digest(), {"extra_states": {"step": 1}}
    _keep(there, {**states, **extra})
    rows = []
    with _living(there, here), there.served(), raw.sender(_file_of(there)) as address:
        for turn in range(rounds + 1):
            sendfile = raw.sent(address, memory_of(states), THREADS)
            state.clear()
            ours = _recovered([there, here], [extra, states])
            _check(state, whole)
            if ours.read_nbytes.get(there.name, 0) < state.nbytes:
                raise RuntimeError(f"{state.nbytes} bytes were recovered, and {ours.read_nbytes} were read")
            rows += [(sendfile, ours.seconds)] if turn else []  # in the first turn the agent makes checksums
    for name, column in zip(("sendfile", "recovery"), zip(*rows, strict=True), strict=True):
        figures.add(f"{name}, {THREADS} streams; median", state.nbytes / 1e6 / statistics.median(column), "MB/s")
    part = statistics.median(sendfile / ours for sendfile, ours in rows)
    figures.add("recovery, as a part of the rate of sendfile", part, "", TO_SENDFILE, least=True)


@contextmanager
def _living(*hosts: Host) -> Iterator[None]:
    """Let a rank live on each host: an agent whose ranks have ended makes their snapshot durable, and ends."""
    with ExitStack() as stack:
        for rank, host in enumerate(hosts):
            stack.callback(TierMemory(host.folder, rank).close)
        yield


def _keep(host: Host, states: States) -> None:
    """Leave a snapshot in the memory of a host, as a rank that has died."""
    tier = TierMemory(host.folder, 0)
    asyncio.run(keep([tier], memory_coordinators(1), states, 1))
    tier.close()


def _recovered(hosts: Sequence[Host], states: Sequence[States]) -> Recovered:
    return asyncio.run(recover(hosts, memory_coordinators(len(hosts)), states))


def _loaded(path: Path, states: States) -> float:
    begin = perf_counter()
    bcp.load(path, states, options=LOADING)
    return perf_counter() - begin


def _file_of(host: Host) -> Path:
    """Return the largest file of a snapshot, which has all tensors."""
    every = [path for paths in host.folder.data_files().values() for path in paths]
    return max(every, key=lambda path: path.stat().st_size)


def _check(state: State, digest: str) -> None:
    if state.digest() != digest:
        raise RuntimeError("a recovery has brought back other values than were saved")
