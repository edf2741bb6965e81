"""Gathering the state at the save step: with prefetch (paper section 4.5) and without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from bcp.data import Source, TokenLoader
from benchmarks.data_state.pages import Pages
from benchmarks.figures import Figures

__all__ = ["gather"]

WORKERS, SHARDS, AHEAD = 4, 64, 16

GOAL_MS = 50.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One save.

    Attributes:
        prepare: seconds that ``prepare`` kept its caller.
        states: seconds of ``unit_states``.
        nbytes: bytes of the tokens in all units.
        samples: samples that these tokens are of.
    """

    prepare: float
    states: float
    nbytes: int
    samples: int


def gather(nbytes: int, rounds: int, step: float, figures: Figures) -> None:
    """Measure saves of a loader whose workers hold so many bytes of tokens. The slowest save of each kind counts.

    A training step takes ``step`` seconds, in which the workers prepare their states.
    """
    context = nbytes // (8 * SHARDS * AHEAD)
    title = f"{WORKERS} workers, {nbytes // MIB} MiB of tokens, a step of {step:.1f} s"
    figures.head(f"Gathering the state: {title}")
    with _opened(context) as loader:
        time.sleep(step)
        without = [_save(loader, step, prepared=False) for _ in range(rounds)]
        figures.add("unit_states without prefetch", _slowest(without), "ms")
        prepared: list[Sample] = []
        work = partial(_prepared, loader, step, rounds, prepared)
        figures.measure("unit_states with prefetch", work, "ms", GOAL_MS)
        figures.look_again()
        figures.again.clear()
    figures.add("prepare keeps its caller", 1000 * max(sample.prepare for sample in prepared), "ms")
    figures.add("tokens of the state", prepared[-1].nbytes / MIB, "MiB")
    figures.add("samples of these tokens", prepared[-1].samples)


@contextmanager
def _opened(context: int) -> Iterator[TokenLoader]:
    """Open a loader, one batch of which has a window of every shard, and wait until its workers have started."""
    sources = [Source("pages", Pages(10**9))]
    with TokenLoader(sources, context, SHARDS, shards=SHARDS, workers=WORKERS, prefetch=AHEAD + 1) as loader:
        next(loader)
        yield loader


def _save(loader: TokenLoader, step: float, *, prepared: bool) -> Sample:
    """Train a step that does nothing, with or without a prepared save at its end."""
    began = time.perf_counter()
    if prepared:
        loader.prepare(0)
    prepare = time.perf_counter() - began
    time.sleep(step)
    next(loader)
    began = time.perf_counter()
    states = loader.unit_states()
    seconds = time.perf_counter() - began
    nbytes = sum(state["tokens"].nbytes for state in states.values())
    return Sample(prepare, seconds, nbytes, sum(len(state["samples"]) for state in states.values()))


def _slowest(samples: list[Sample]) -> float:
    return 1000 * max(sample.states for sample in samples)


def _prepared(loader: TokenLoader, step: float, rounds: int, samples: list[Sample]) -> float:
    """Make some prepared saves, replace the samples by theirs, and return the slowest."""
    samples[:] = [_save(loader, step, prepared=True) for _ in range(rounds)]
    return _slowest(samples)
