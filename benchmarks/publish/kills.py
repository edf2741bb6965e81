"""A publisher, a subscriber and a rank of a sharded publisher that are killed at random moments, again and again.

No version may be lost that a call has returned for, and no reader may get weights that are of no version.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import deque
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bcp
from benchmarks.figures import Figures
from benchmarks.publish.sizes import check

__all__ = ["kills"]

WARM = ["bcp", "torch", "zstandard"]
TENSORS, ELEMENTS = 12, 20_000
ANCHOR_EVERY = 7
RANKS = 2
LONGEST_SECONDS = 2.0
"""Between the start of a process and its kill."""

HANG_SECONDS = 120.0

_made: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=4)
"""Weights that were asked for last, by version."""


def kills(count: int, seed: int, folder: Path, figures: Figures) -> None:
    """Kill publishers, subscribers and ranks in turns, and judge what they leave.

    Args:
        count: of kills.
        seed: of the moments.
        folder: an empty directory.
        figures: get the result.

    """
    figures.head(f"{count} kills of publishers, subscribers and ranks of a job, seed {seed}")
    context, moments = multiprocessing.get_context("forkserver"), random.Random(seed)  # noqa: S311 -- moments of kills
    context.set_forkserver_preload(WARM)
    to, lost, torn, hung, number = folder / "publication", 0, 0, 0, 0
    within = dict.fromkeys(("publisher", "subscriber", "rank"), 0)
    bcp.publish(weights(1), to, 1)
    while sum(within.values()) < count:
        number += 1
        what = [*within][number % len(within)]
        said = folder / f"said-{number}"
        processes = _started(context, what, to, folder, said)
        _await(processes[0], said)
        time.sleep(moments.random() * LONGEST_SECONDS)
        victim = moments.choice(processes)
        within[what] += all(process.is_alive() for process in processes)
        victim.kill()
        hung += sum(not _has_ended(process) for process in processes)
        lost += _newest(to, folder) < max(int(line) for line in said.read_text().split())
        torn += not _is_sound(to, folder)
    figures.add("kills of a process at work", sum(within.values()))
    for what, kills_of in within.items():
        figures.add(f"kills of a {what}", kills_of)
    figures.add("ranks that did not end by themselves behind the kill of another", hung, goal=0)
    figures.add("versions", _newest(to, folder))
    figures.add("versions lost, though their call had returned", lost, goal=0)
    figures.add("pulls behind a kill that got no version, or other weights", torn, goal=0)
    for version in range(1, _newest(to, folder) + 1):
        bcp.Subscriber(to, folder / "again").pull(version=version)
        check(folder / "again", weights(version))


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version, the same in every process: each one differs from the one before in 3 %."""
    known, found = max((each for each in _made if each[0] <= version), key=lambda each: each[0], default=(1, _first()))
    found = {name: tensor.clone() for name, tensor in found.items()}
    for number in range(known + 1, version + 1):
        made = torch.Generator().manual_seed(number)
        for tensor in found.values():
            places = torch.randint(ELEMENTS, (ELEMENTS // 33,), generator=made)
            tensor[places] = torch.randn(len(places), generator=made).bfloat16()
    _made.append((version, {name: tensor.clone() for name, tensor in found.items()}))
    return found


def _first() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {f"w{each}": torch.randn(ELEMENTS, generator=made).bfloat16() for each in range(TENSORS)}


def _started(context: Any, what: str, to: Path, folder: Path, said: Path) -> list[BaseProcess]:
    """Start a publisher, a subscriber, or the ranks of a job."""
    if what == "rank":
        store = folder / f"store-{said.name}"
        processes = [context.Process(target=_publish_rank, args=(to, folder, said, store, r)) for r in range(RANKS)]
    else:
        processes = [
            context.Process(target=_publish_all if what == "publisher" else _pull_all, args=(to, folder, said))
        ]
    for process in processes:
        process.start()
    return processes


def _has_ended(process: BaseProcess) -> bool:
    """Wait for the end of a process; kill it if it does not come."""
    process.join(HANG_SECONDS)
    has_ended = process.exitcode is not None
    process.kill()
    process.join()
    return has_ended


def _publish_all(to: Path, folder: Path, said: Path) -> None:
    """Publish version after version; say each number behind its call."""
    version, cache = _newest(to, folder), folder / "cache"
    _say(said, version)
    while True:
        version += 1
        with suppress(bcp.errors.ExistsError):  # a killed publisher had begun its commit, which this call has ended
            bcp.publish(weights(version), to, version, anchor_every=ANCHOR_EVERY, cache=cache, claim_seconds=0.0)
        _say(said, version)


def _publish_rank(to: Path, folder: Path, said: Path, store: Path, rank: int) -> None:
    """Publish a sharded model with other ranks, version after version, until one of them is killed.

    The first version is said first: the death of a rank that never came is noticed by its silence alone.
    """
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "BCP_TIMEOUT": str(HANG_SECONDS / 4)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    newest = [_newest(to, folder / f"rank-{rank}")]
    dist.broadcast_object_list(newest)
    version = newest[0]
    while True:
        version += 1
        own = {name: value.chunk(RANKS)[rank].clone() for name, value in weights(version).items()}
        shards = {name: DTensor.from_local(value, mesh, [Shard(0)], run_check=False) for name, value in own.items()}
        try:
            with suppress(bcp.errors.ExistsError):
                bcp.publish(shards, to, version, anchor_every=ANCHOR_EVERY, cache=folder / "cache", claim_seconds=0.0)
        except bcp.BcpError:
            os._exit(1)  # the other rank was killed
        if not rank:
            _say(said, version)


def _pull_all(to: Path, folder: Path, said: Path) -> None:
    """Go back to the first version and to the newest one again, for ever."""
    subscriber = bcp.Subscriber(to, folder / "pulled")
    _say(said, 0)
    while True:
        for version in (1, None):
            subscriber.pull(version=version)


def _say(said: Path, version: int) -> None:
    with said.open("a") as file:
        file.write(f"{version}\n")


def _await(process: BaseProcess, said: Path) -> None:
    """Wait until a process is at work."""
    end = time.monotonic() + HANG_SECONDS
    while not said.exists() or not said.read_text().endswith("\n"):
        if not process.is_alive() or time.monotonic() > end:
            raise RuntimeError(f"a process has done nothing, and ended with {process.exitcode}")
        time.sleep(0.01)


def _newest(to: Path, folder: Path) -> int:
    """Return the newest version that a reader gets."""
    return bcp.Subscriber(to, folder / "newest").pull().version


def _is_sound(to: Path, folder: Path) -> bool:
    """Whether the folder of the killed subscriber comes to the newest version, with the weights of this version."""
    try:
        version = bcp.Subscriber(to, folder / "pulled").pull().version
        check(folder / "pulled", weights(version))
    except (bcp.BcpError, RuntimeError) as error:
        print(f"!! {error}", flush=True)
        return False
    return True
