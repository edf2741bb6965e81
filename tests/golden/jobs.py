"""Work of every rank of a pool for a golden checkpoint: train with a framework, save, and load again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import any_to_any
import fsdp1
import megatron_gpt
import megatron_jobs
import ragged
import sharded_tensors
import torch
from any_to_any import How, Task
from frameworks.cuda_as_cpu import cuda_as_cpu
from fsdp1 import Layout
from golden.arithmetic import GoldenExact, numbers
from golden.described import described
from silent import save
from torch import distributed as dist

import bcp
from bcp.data import Source, TokenLoader

__all__ = [
    "TOKENS",
    "Shelf",
    "load_exact",
    "load_megatron",
    "save_dataloaders",
    "save_exact",
    "save_megatron",
    "save_sharded_tensors",
    "sharded_tensor_values",
    "token_loader",
]

STEPS = 2

ADAM: dict[str, Any] = {"lr": 2**-6, "betas": (0.5, 0.75), "eps": 2**-20}
"""Settings of Megatron's optimizer that keep the moments exact."""

Groups = list[dict[str, Any]]
"""Descriptions of the settings of parameter groups."""


def options(**how: Any) -> bcp.SaveOptions:
    """Return options of a save without a recording."""
    return bcp.SaveOptions(record=False, **how)


def settings(groups: Any) -> Groups:
    """Describe everything in parameter groups but the parameters."""
    return [{key: described(value) for key, value in group.items() if key != "params"} for group in groups]


# -- the model of the other tests, under any framework ----------------------------------------------


def save_exact(path: Path, how: How, extra: dict[str, Any] | None = None, balance: str = "split") -> Groups:
    """Train and save; return the settings of the optimizer. Each rank's number is among its extra states."""
    if isinstance(how, Layout):
        fsdp1.prepare()
        if dist.get_rank() >= how.size:
            return []
    job = any_to_any.trainer(how, GoldenExact())
    with mock.patch.object(ragged, "Exact", GoldenExact):  # the model that gives it gradients
        for number in range(STEPS):
            job.take(number)
    states = dict(job.states)
    if extra is not None:
        states["extra_states"] = {**extra, "rank": dist.get_rank()}
    save(path, states, job.ranks, options(balance=balance))
    return settings(job.groups)


def load_exact(source: Path, path: Path, how: How) -> None:
    """Load into other weights and other settings, and save path/again."""
    task = Task(make=GoldenExact, options=bcp.LoadOptions(record=False))
    any_to_any.go_on(source, path, how, task)


# -- Megatron ----------------------------------------------------------------------------------------


def golden_value(fqn: str, shape: list[int], seed: int) -> torch.Tensor:
    """Return a logical parameter's initial value; from seed 100 on a gradient of small integers."""
    values = numbers(f"{seed} {fqn}", shape)
    return (values * 16).round() if seed >= 100 else values


def _small(net: megatron_gpt.Net, layout: megatron_gpt.Layout) -> Any:
    """Return a configuration whose model has two thousand parameters."""
    config = _config_of(net, layout)
    config.hidden_size, config.ffn_hidden_size = 8, 12
    config.num_attention_heads, config.num_query_groups, config.kv_channels = 4, 2, 2
    return config


_config_of = megatron_gpt.config_of


def _megatron(layout: megatron_gpt.Layout, seed: int, shapes: dict[str, list[int]]) -> megatron_gpt.Trainer:
    """Make a trainer, and note the shapes of its logical parameters."""

    def initial(fqn: str, shape: list[int], seed: int) -> torch.Tensor:
        shapes[fqn] = list(shape)
        return golden_value(fqn, shape, seed)

    with mock.patch.multiple(megatron_gpt, initial=initial, config_of=_small):
        trainer = megatron_jobs.built(MEGATRON, layout, seed)
    for group in trainer.optimizer.param_groups:
        group.update(ADAM)
    return trainer


MEGATRON = megatron_gpt.Net(bf16=True, layers=2, vocab=24)


def save_megatron(path: Path, layout: megatron_gpt.Layout) -> tuple[dict[str, list[int]], Groups]:
    """Take steps with gradients of arithmetic, and save; return shapes of logical parameters, and settings."""
    shapes: dict[str, list[int]] = {}
    trainer = _megatron(layout, 0, shapes)
    for number in range(STEPS):
        with mock.patch.object(megatron_gpt, "initial", golden_value), cuda_as_cpu():
            for module in trainer.modules:
                for fqn, parameter in megatron_gpt.logical_names(MEGATRON, module):
                    parameter.main_grad.copy_(megatron_gpt.mine_of(MEGATRON, fqn, parameter, 100 + number))
            trainer.optimizer.step()
    bcp.save(path, trainer.states, options=options())
    return shapes, settings(trainer.optimizer.param_groups)


def load_megatron(source: Path, path: Path, layout: megatron_gpt.Layout) -> None:
    """Load into other weights and an optimizer that took no step, and save path/again."""
    trainer = _megatron(layout, 9, {})
    bcp.load(source, trainer.states, options=bcp.LoadOptions(record=False))
    bcp.save(path / "again", trainer.states, options=options())


# -- ShardedTensor -----------------------------------------------------------------------------------

SHAPES = {"rows": (9, 7), "columns": (6, 10), "dealt": (9, 4), "grid": (5, 7), "last rank": (3, 4)}


def sharded_tensor_values() -> dict[str, torch.Tensor]:
    """Return the whole tensors, one for each way to cut."""
    return {f"tables.{how}": numbers(how, shape) for how, shape in SHAPES.items()}


def save_sharded_tensors(path: Path) -> None:
    """Save a ShardedTensor cut in each way."""
    tables = {
        how: sharded_tensors.sharded(numbers(how, shape), sharded_tensors.BLOCKS[how](shape, dist.get_world_size()))
        for how, shape in SHAPES.items()
    }
    bcp.save(path, {"model": {"tables": tables}}, options=options())


# -- dataloaders -------------------------------------------------------------------------------------

READERS = 2
TOKENS = numbers("tokens", (3, 5))
"""A tensor beside the dataloaders."""


class Shelf:
    """Some units with values and tensors, dealt to the readers; it only gives them."""

    readers = READERS

    def __init__(self, reader: int) -> None:
        self.reader = reader

    def shared_state(self) -> Any:
        return {"count": 5, "names": ("a", "b")}

    def unit_states(self) -> Mapping[str, Any]:
        return {f"{number:05d}": _unit(number) for number in range(self.reader, 5, self.readers)}

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> Sequence[str]:
        raise NotImplementedError

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def prepare(self, step: int) -> None:
        del step


def _unit(number: int) -> dict[str, Any]:
    """Return the state of a unit; some of its tensors take more than 4096 bytes, and lie outside of the archive."""
    return {
        "cursor": (number, None, 0.5),
        "large": torch.arange(530 + number) * number,
        "half": numbers(f"unit {number}", (2, 1030)).to(torch.bfloat16),
        "small": torch.arange(number, dtype=torch.uint8),
        "array": [b"\0", {"deep": -0.0}],
    }


@dataclass
class Read:
    """Facts about the dataloaders of a rank.

    Attributes:
        shared: description of each one's shared part.
        units: descriptions of each one's units.
        windows: tokens of the windows that come next, by number.
    """

    shared: dict[str, Any]
    units: dict[str, dict[str, Any]]
    windows: dict[int, list[int]]


def token_loader(reader: int, readers: int) -> TokenLoader:
    """Return a loader of two sources."""
    books = [list(range(100 * at, 100 * at + at % 7)) for at in range(1, 24)]
    code = [list(range(5000 + 50 * at, 5000 + 50 * at + 11)) for at in range(16)]
    sources = [Source("books", books, weight=2.0), Source("code", code)]
    return TokenLoader(sources, context=6, batch=4, reader=reader, readers=readers, shards=4, seed=3)


def save_dataloaders(path: Path) -> Read | None:
    """Read three batches on each of two ranks, and save; return the states, and the windows of the next batch."""
    dist.barrier()
    rank = dist.get_rank()
    if rank >= READERS:
        return None
    loader, shelf = token_loader(rank, READERS), Shelf(rank)
    for _ in range(3):
        next(loader)
    own = {"train": loader, "shelf": shelf}
    found = Read(
        {name: described(each.shared_state()) for name, each in own.items()},
        {name: {unit: described(each) for unit, each in one.unit_states().items()} for name, one in own.items()},
        {},
    )
    states = {"model": {"tokens": TOKENS.clone()}, "dataloader": own, "extra_states": {"epoch": 1}}
    save(path, states, READERS, options())
    batch = next(loader)
    found.windows.update(zip(batch.windows, batch.tokens.tolist(), strict=True))
    return found
