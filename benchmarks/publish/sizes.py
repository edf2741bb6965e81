"""How many bytes a step of an RL run publishes, and how long it takes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import torch

import bcp
from benchmarks.figures import Figures
from benchmarks.publish.training import Training

__all__ = ["sizes"]

MOST_PER_CENT = 4.0
"""Of the bf16 bytes, at a learning rate of 3e-6."""

JUDGED = 3e-6
MISSED = 3
"""Versions that a slow reader misses."""


def sizes(weights: Mapping[str, torch.Tensor], rate: float, steps: int, folder: Path, figures: Figures) -> None:
    """Publish each step of a run, and follow it; compare all weights of both readers with those of the run.

    Args:
        weights: to begin with.
        rate: learning rate.
        steps: of the run, behind its first version.
        folder: an empty directory.
        figures: get the result.

    """
    nbytes = sum(2 * weight.numel() for weight in weights.values())
    figures.head(f"{steps} steps at a learning rate of {rate:g}, {nbytes / 1e6:.1f} MB of bf16 weights")
    training, to = Training(weights, rate), folder / "publication"
    bcp.publish(training.weights(), to, 1, cache=folder / "cache")
    quick, slow = (bcp.Subscriber(to, folder / name) for name in ("quick", "slow"))
    for each in (quick, slow):
        each.pull()
    parts, publishing, pulling = [], [], []
    for version in range(2, steps + 2):
        now, begin = training.step(), perf_counter()
        result = bcp.publish(now, to, version, cache=folder / "cache")
        published = perf_counter()
        quick.pull()
        pulling.append(perf_counter() - published)
        publishing.append(published - begin)
        parts.append(100 * result.delta_nbytes / nbytes)
        check(folder / "quick", now)
        if version % (MISSED + 1) == 0:
            slow.pull()
            check(folder / "slow", now)
    goal = MOST_PER_CENT if rate == JUDGED else None
    figures.add("bytes of a step, of the bf16 bytes; mean", statistics.mean(parts), "%", goal)
    figures.add("the same, of the largest step", max(parts), "%")
    figures.add("to publish a step; median", 1000 * statistics.median(publishing), "ms")
    figures.add("to pull a step; median", 1000 * statistics.median(pulling), "ms")


def check(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Compare the folder of a subscriber with weights, bit by bit.

    Raises:
        RuntimeError: they differ.

    """
    with bcp.Checkpoint(folder) as checkpoint:
        found = {name: checkpoint.read(name) for name in checkpoint.names()}
    wrong = [
        name
        for name in found.keys() | weights.keys()
        if name not in found or name not in weights or not torch.equal(_bits(found[name]), _bits(weights[name]))
    ]
    if wrong:
        raise RuntimeError(f"{folder}: {len(wrong)} tensors differ from those of the run, as {min(wrong)}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)
