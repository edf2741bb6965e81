"""Ranks that train until one of them is told to end, and all of them stop.

As a program of torchrun: ``meeting_jobs.py FOLDER STEPS``. Each rank writes ``ready-RANK`` with its process id after
its first step. At the end it writes ``stopped-RANK`` with the last step, whether it was stopped, and the reason. It
ends as soon as it is done, without a last word to the others.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist

from bcp.runs.meetings import Meetings, meeting_place
from bcp.runs.preemption import Preemption

STEPS = 1_000_000
"""More than any job does."""
GRACE_SECONDS = 900.0
CONNECTING_SECONDS = 200.0
"""A slow name server delays each of the connections to the store, one after the other."""


@dataclass
class Round:
    """How one job ended on one rank.

    Attributes:
        step: the last step.
        reason: why it ended.
        seconds_left: until the expected kill.
        collectives: how many all-reduces it did.
    """

    step: int = 0
    reason: str | None = None
    seconds_left: float = 0.0
    collectives: int = field(default=0)


def rounds(number: int, seed: int) -> list[Round]:
    """Train again and again; each time some ranks get a signal at some moment."""
    return [_round(f"{seed}-{each}", random.Random(f"{seed}-{each}")) for each in range(number)]  # noqa: S311 -- a test


def _round(life: str, chance: random.Random) -> Round:
    """Train until all stop. The ranks draw the same numbers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told, after = chance.sample(range(size), chance.choice([1, 1, size])), chance.uniform(0.0, 0.05)
    number, stride = chance.choice([signal.SIGTERM, signal.SIGUSR1]), chance.choice([1, 7])
    seen = Round()
    preemption = Preemption(grace_seconds=GRACE_SECONDS)
    meetings = Meetings(rank, size, meeting_place(size), life, preemption)
    assert meetings._connected.wait(CONNECTING_SECONDS)
    dist.barrier()
    timer = threading.Timer(after, os.kill, (os.getpid(), number))
    if rank in told:
        timer.start()
    for step in range(stride, STEPS, stride):
        seen.step = step
        dist.all_reduce(torch.ones(8))
        seen.collectives += 1
        if chance.random() < 0.2:
            time.sleep(0.001 * ((rank + step) % 3))  # ranks are fast in turns
        assert meetings.at(step) == meetings.at(step)
        if meetings.at(step):
            break
    seen.reason, seen.seconds_left = meetings.reason, (meetings.deadline or 0.0) - time.monotonic()
    dist.barrier()  # they are really at the same collective
    if rank in told:
        timer.join()
    meetings.close()
    return seen


def deaf_main_thread(life: str) -> Round:
    """Let the main thread of rank 1 wait in C while rank 0 is told, until rank 1's own thread has heard of it."""
    rank, seen, store = dist.get_rank(), Round(), dist.HashStore()
    size, heard = dist.get_world_size(), partial(store.set, "heard", "")
    meetings = Meetings(rank, size, meeting_place(size), life, Preemption(), on_alarm=heard)
    assert meetings._connected.wait(CONNECTING_SECONDS)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    store.wait(["heard"], timedelta(seconds=60))
    for step in range(1, STEPS):
        seen.step = step
        if meetings.at(step):
            break
    seen.reason = meetings.reason
    meetings.close()
    return seen


def main(folder: Path, steps: int) -> None:
    """Be one rank of torchrun's."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    meetings = Meetings(rank, size, meeting_place(size), life, Preemption())
    step, stops = 0, False
    while step < steps and not stops:
        step += 1
        time.sleep(0.002)
        dist.all_reduce(torch.ones(8))
        stops = meetings.at(step)
        if step == 1:
            (folder / f"ready-{rank}.new").write_text(str(os.getpid()))
            (folder / f"ready-{rank}.new").rename(folder / f"ready-{rank}")
    (folder / f"stopped-{rank}").write_text(f"{step} {stops} {meetings.reason}")
    meetings.close()


def first_leaves(rank: int, port: int, size: int) -> None:
    """Be one rank of a job whose rank 0 serves the store and leaves first; with no ``close`` on the odd ranks."""
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False) if rank else None
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)
    meetings = Meetings(rank, size, store, "first", Preemption())
    store.set(f"here-{rank}", "")
    store.wait([f"here-{each}" for each in range(size)])
    time.sleep(0.3 * rank)  # rank 0 is long gone when the last one ends
    if rank % 2 == 0:
        meetings.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
