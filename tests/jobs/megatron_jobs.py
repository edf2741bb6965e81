"""What every rank of a pool does with Megatron and ``bcp``; CUDA means the CPU only while Megatron works."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameworks.cuda_as_cpu import cuda_as_cpu
from megatron_gpt import Layout, Net, Trainer, build
from watch import Seen, watched

import bcp


@dataclass(frozen=True)
class Hop:
    """What one rank saw of one job.

    Attributes:
        losses: of the steps that were taken, where this rank computes them.
        collectives: which ones were called during load and save.
        largest: bytes of the largest tensor that was allocated during them.
    """

    losses: list[float | None]
    collectives: dict[str, int]
    largest: int


SMALL = 1 << 20
"""Bytes of each of the buffers of a save or load that is to have small ones."""


def options(*, small: bool) -> tuple[bcp.SaveOptions, bcp.LoadOptions]:
    if not small:
        return bcp.SaveOptions(), bcp.LoadOptions()
    return bcp.SaveOptions(part_bytes=SMALL), bcp.LoadOptions(read_bytes=SMALL, exchange_bytes=SMALL)


def start(net: Net, layout: Layout, seed: int, steps: int, path: Path, *, small: bool = False) -> Hop:
    """Train, save, and train one step more."""
    trainer = built(net, layout, seed)
    losses = train(trainer, 0, steps)
    with watched() as seen:
        bcp.save(path, trainer.states, options=options(small=small)[0])
    return hop([*losses, *train(trainer, steps, 1)], seen)


def reload(net: Net, layout: Layout, source: Path, path: Path, step: int, *, small: bool = False) -> Hop:
    """Load into a job with other weights that took no step, save again, and train the step of that number."""
    trainer = built(net, layout, seed=77)
    with watched() as seen:
        bcp.load(source, trainer.states, options=options(small=small)[1])
        bcp.save(path, trainer.states, options=options(small=small)[0])
    return hop(train(trainer, step, 1), seen)


@contextmanager
def page() -> Iterator[dict[str, Any]]:
    """Give the page of the documentation a training script."""

    def setup(tp: int, pp: int) -> tuple[list[Any], Any]:
        trainer = built(Net(), Layout(tp=tp, pp=pp), seed=0)
        train(trainer, 0, 1)
        return trainer.chunks, trainer.optimizer

    yield {"setup": setup}


def built(net: Net, layout: Layout, seed: int) -> Trainer:
    logging.disable(logging.WARNING)
    with cuda_as_cpu():
        return build(net, layout, seed)


def train(trainer: Trainer, first: int, steps: int) -> list[float | None]:
    with cuda_as_cpu():
        return [trainer.step(number) for number in range(first, first + steps)]


def hop(losses: list[float | None], seen: Seen) -> Hop:
    return Hop(losses, dict(seen.collectives), seen.largest)


def start_small(net: Net, layout: Layout, path: Path) -> Hop:
    return start(net, layout, 5, 1, path, small=True)


def reload_small(net: Net, layout: Layout, source: Path, path: Path) -> Hop:
    return reload(net, layout, source, path, 1, small=True)
