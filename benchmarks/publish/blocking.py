"""How long a publication in the background blocks training, beside a lazy save of the same weights."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import bcp
from benchmarks.figures import Figures

__all__ = ["blocking"]

MOST_RATIO = 1.2
"""Both copy the same bytes; the rest is noise of the machine."""

ROUNDS = 15
WARM = 2
"""Rounds that are not counted: the first ones make plans and staging memory."""


@dataclass(slots=True)
class _Blocked:
    """Milliseconds that training was blocked: in the calls, and in the calls and the steps that follow at once."""

    calls: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)


def blocking(weights: Mapping[str, torch.Tensor], folder: Path, figures: Figures) -> None:
    """Publish and save lazily in turns, each followed by a step of the optimizer, which waits for the copy.

    Args:
        weights: to publish, in float32.
        folder: an empty directory.
        figures: get the result.

    """
    nbytes = sum(4 * weight.numel() for weight in weights.values())
    figures.head(f"a publication in the background and a lazy save of {nbytes / 1e6:.1f} MB of weights, {ROUNDS} times")
    figures.again["publish_async blocks, calls and steps, to a lazy save"] = lambda: _measured(weights, folder)[1]
    ways, ratio = _measured(weights, folder)
    for name, way in ways.items():
        figures.add(f"{name}: blocked in the call; median", statistics.median(way.calls), "ms")
        figures.add(f"{name}: blocked in call and step; median", statistics.median(way.both), "ms")
    figures.add("publish_async blocks, calls and steps, to a lazy save", ratio, goal=MOST_RATIO)


def _measured(weights: Mapping[str, torch.Tensor], folder: Path) -> tuple[dict[str, _Blocked], float]:
    model = {name: torch.nn.Parameter(weight.float().clone()) for name, weight in weights.items()}
    optimizer = torch.optim.SGD(model.values(), lr=1e-3)
    for parameter in model.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    begin = max((int(path.name[8:]) for path in folder.glob("publication/weight_v*")), default=0) + 1
    calls: dict[str, Callable[[int], Any]] = {
        "publish_async": lambda number: bcp.publish_async(
            model, folder / "publication", number, dtype="bfloat16", optimizer=optimizer, cache=folder / "cache", keep=2
        ),
        "lazy save": lambda _: bcp.save_async(
            folder / "saved", {"model": model, "optimizer": optimizer}, snapshot="lazy", overwrite=True
        ),
    }
    ways = {name: _Blocked() for name in calls}
    for number in range(begin, begin + WARM + ROUNDS):
        for name in sorted(calls, reverse=number % 2 == 1):  # in turns, since the second one finds other caches
            plain = min(_seconds(optimizer.step) for _ in range(3))
            start = perf_counter()
            pending = calls[name](number)
            called = perf_counter()
            optimizer.step()
            ended = perf_counter()
            pending.wait()
            if number >= begin + WARM:
                ways[name].calls.append(1000 * (called - start))
                ways[name].both.append(1000 * (ended - start - plain))
    published, saved = (statistics.median(way.both) for way in ways.values())
    return ways, published / saved


def _seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start
