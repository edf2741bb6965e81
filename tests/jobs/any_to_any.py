"""Trains ``Exact`` under any framework, by the framework's name, saves it, and goes on with it under another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed_job
import dtensor_layouts
import fsdp1
import ragged
import torch
from exact import ADAMW, Exact, Twin, as_dtype
from fsdp1 import Layout
from logical import differences, logical
from ranks import Ranks
from silent import load_in_place, save
from torch import distributed as dist
from torch import nn, optim

import bcp
from bcp.planners import planner

__all__ = [
    "How",
    "Renamed",
    "Task",
    "by_deepspeed",
    "data_parallel",
    "dtype_of",
    "go_on",
    "goes_on",
    "planner_of",
    "train",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

How = Layout | str
"""A layout; or "tp_fsdp2" or "hsdp"; or "ragged"; or a stage of DeepSpeed and a precision, "z3/bf16"."""


class Renamed(Exact):
    """Has its blocks under another name, and last."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.layers = self._modules.pop("blocks")

    @property
    def blocks(self) -> nn.Module:
        return self.layers


@dataclass(frozen=True)
class Task:
    """How to go on.

    Attributes:
        make: makes the model of a seed.
        steps_before: how many steps the target has taken, with other weights, before it is loaded into.
        number: of the step that is taken then.
        options: of the load.
    """

    make: Callable[[int], nn.Module] = Exact
    steps_before: int = 0
    number: int = 2
    options: bcp.LoadOptions = field(default_factory=bcp.LoadOptions)


@dataclass(frozen=True)
class Trainer:
    """A model in training.

    Attributes:
        states: what is saved.
        groups: the parameter groups of its optimizer.
        take: takes the step of a number.
        ranks: how many ranks take part, the first ones; None: all of them.
    """

    states: dict[str, Any]
    groups: list[dict[str, Any]]
    take: Callable[[int], None]
    ranks: int | None = None


def by_deepspeed(how: How) -> bool:
    """Whether it is a stage of DeepSpeed."""
    return isinstance(how, str) and "/" in how


def data_parallel(how: How, world: int = 4) -> int:
    """Return how many batches there are in a step."""
    if isinstance(how, Layout):
        return how.size
    return world // 2 if how == "tp_fsdp2" or how.endswith("pairs") else world


def dtype_of(how: How) -> torch.dtype:
    """Return the dtype of the weights."""
    return DTYPES[how.split("/")[1][:4]] if by_deepspeed(how) else torch.float32


def trainer(how: How, model: nn.Module) -> Trainer:
    """Put a model under a framework, with an optimizer that has no states yet."""
    if by_deepspeed(how):
        job = deepspeed_job.Job(how, model)
        return Trainer(job.states, job.model.optimizer.param_groups, job.step)
    if isinstance(how, Layout):
        model, optimizer = fsdp1.built(how, model)
        states = fsdp1.states_of(how, model, optimizer)
        return Trainer(states, optimizer.param_groups, partial(fsdp1.step, how, model, optimizer), how.size)
    if how == "ragged":
        model = ragged.make_ragged(model, how)
        take: Callable[..., None] = ragged.step_ragged
    else:
        model = dtensor_layouts.shard(how, model)
        take = partial(dtensor_layouts.take, how)
    optimizer = optim.AdamW(model.parameters(), **ADAMW)
    states = {"model": model, "optimizer": optimizer}
    return Trainer(states, optimizer.param_groups, partial(take, model, optimizer))


def planner_of(how: How) -> str | None:
    """Return which planner is chosen on this rank, if it takes part."""
    return planner(None, trainer(how, Exact()).states).name if _takes_part(how) else None


def train(path: Path, how: How, make: Callable[[int], nn.Module] = Exact, steps: int = 2) -> None:
    """Train from the beginning, and save."""
    if _takes_part(how):
        job = trainer(how, make(0))
        for number in range(steps):
            job.take(number)
        save(path, job.states, job.ranks)


def go_on(source: Path, path: Path, how: How, task: Task | None = None) -> None:
    """Load into other weights and other hyper-parameters; save path/again, take a step, save path/stepped."""
    task = task or Task()
    if _takes_part(how):
        job = trainer(how, task.make(9))
        for number in range(task.steps_before):
            job.take(7 + number)
        for group in job.groups:
            group.update(lr=0.5, betas=(0.1, 0.1), weight_decay=0.25)
        load_in_place(source, job.states, job.states["model"].parameters(), job.ranks, task.options)
        save(path / "again", job.states, job.ranks)
        job.take(task.number)
        save(path / "stepped", job.states, job.ranks)


def goes_on(ranks: Ranks, source: Path, path: Path, twin: Twin, how: How, task: Task | None = None) -> None:
    """Go on on those ranks, and compare with a twin that has gone as far as the source; it takes the step, too."""
    task = task or Task()
    ranks.run(go_on, source, path, how, task)
    assert not differences(logical(path / "again"), as_dtype(twin.state(), dtype_of(how)))
    twin.step(task.number, data_parallel(how, ranks.size))
    assert not differences(logical(path / "stepped"), as_dtype(twin.state(), dtype_of(how)))


def _takes_part(how: How) -> bool:
    """Make the groups of ranks that a layout needs, which all ranks do together; whether this one is in it."""
    if isinstance(how, Layout):
        fsdp1.prepare()
        return dist.get_rank() < how.size
    return True
