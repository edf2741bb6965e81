"""A publisher and a subscriber that are killed at random moments, again and again.

No version may be lost that a call has returned for, and no reader may get weights that are of no version.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import deque
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

import bcp
from benchmarks.figures import Figures
from benchmarks.publish.sizes import check

__all__ = ["kills"]

WARM = ["bcp", "torch", "zstandard"]
TENSORS, ELEMENTS = 12, 20_000
ANCHOR_EVERY = 7
LONGEST_SECONDS = 2.0
"""Between the start of a process and its kill."""

HANG_SECONDS = 120.0

_made: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=4)
"""Weights that were asked for last, by version."""


def kills(count: int, seed: int, folder: Path, figures: Figures) -> None:
    """Kill publishers and subscribers in turns, and judge what they leave.

    Args:
        count: of kills.
        seed: of the moments.
        folder: an empty directory.
        figures: get the result.

    """
    figures.head(f"{count} kills of publishers and subscribers, seed {seed}")
    context, moments = multiprocessing.get_context("forkserver"), random.Random(seed)  # noqa: S311 -- moments of kills
    context.set_forkserver_preload(WARM)
    to, lost, torn, within = folder / "publication", 0, 0, 0
    bcp.publish(weights(1), to, 1)
    number = 0
    while within < count:
        number += 1
        work = _publish_all if number % 2 else _pull_all
        said = folder / f"said-{number}"
        process = context.Process(target=work, args=(to, folder, said))
        process.start()
        _await(process, said)
        time.sleep(moments.random() * LONGEST_SECONDS)
        within += process.is_alive()
        process.kill()
        process.join()
        lost += _newest(to, folder) < max(int(line) for line in said.read_text().split())
        torn += not _is_sound(to, folder)
    figures.add("kills of a process at work", within)
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


def _publish_all(to: Path, folder: Path, said: Path) -> None:
    """Publish version after version; say each number behind its call."""
    version, cache = _newest(to, folder), folder / "cache"
    _say(said, version)
    while True:
        version += 1
        with suppress(bcp.errors.ExistsError):  # a killed publisher had begun its commit, which this call has ended
            bcp.publish(weights(version), to, version, anchor_every=ANCHOR_EVERY, cache=cache, claim_seconds=0.0)
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
