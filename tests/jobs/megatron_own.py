"""Megatron's own saves and loads of a model and its optimizer, in its format ``torch_dist``."""

# ruff: noqa: PLC0415 -- the parent of the ranks does not import Megatron, which takes seconds and warns

from __future__ import annotations

import argparse
import multiprocessing.dummy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from frameworks.cuda_as_cpu import cuda_as_cpu
from megatron_gpt import Layout, Net, Trainer
from megatron_jobs import built, train
from torch import distributed as dist

import bcp


@contextmanager
def _working() -> Iterator[None]:
    """Let Megatron write in threads: it forks processes, which must not be made of one with threads."""
    as_threads = patch.object(torch.multiprocessing, "get_context", lambda _: multiprocessing.dummy)
    with cuda_as_cpu(), warnings.catch_warnings(), as_threads:
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _without_steps() -> Iterator[None]:
    """Let Megatron 0.16 find the steps of torch's Adam among the moments that it copies: it means FusedAdam."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    getter = DistributedOptimizer._get_main_param_and_optimizer_states
    setter = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_all(self: Any, parameter: torch.Tensor, tensors: dict[str, Any]) -> None:
        setter(self, parameter, {"step": getter(self, parameter)["step"], **tensors})

    with patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_all):
        yield


def _sharded(trainer: Trainer, about: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    model = {f"model{at}": module.sharded_state_dict(metadata=dict(about)) for at, module in enumerate(trainer.modules)}
    of_optimizer = model["model0"] if len(model) == 1 else model
    optimizer = trainer.optimizer.sharded_state_dict(of_optimizer, is_loading=loading, metadata=dict(about))
    return {**model, "optimizer": optimizer}


def save_own(net: Net, layout: Layout, path: Path, form: str, numbered: str = "") -> None:
    """Train two steps; save path/own by Megatron, and path/bcp by bcp."""
    trainer = built(net, layout, 5)
    train(trainer, 0, 2)
    if dist.get_rank() == 0:
        (path / "own").mkdir(parents=True)
    bcp.save(path / "bcp", trainer.states)
    about = {"non_homogeneous_layers": bool(numbered), "distrib_optim_sharding_type": form}
    with _working():
        from megatron.core import dist_checkpointing
        from megatron.core.transformer.enums import AttnBackend

        arguments = argparse.Namespace(dtype=torch.bfloat16, attention_backend=AttnBackend.auto)
        common = {"checkpoint_version": 3.0, "iteration": 2, "args": arguments}
        state = {**_sharded(trainer, about, loading=False), **common}
        dist_checkpointing.save(state, path / "own", content_metadata=about)


def load_own(net: Net, layout: Layout, source: Path, path: Path, numbered: str = "") -> None:
    """Load by Megatron into a job with other weights, and save by bcp."""
    trainer = built(net, layout, 77)
    train(trainer, 7, 1)  # Megatron loads into states that exist
    about = {"non_homogeneous_layers": bool(numbered), "distrib_optim_sharding_type": "fully_reshardable"}
    with _working():
        from megatron.core import dist_checkpointing

        found = dist_checkpointing.load(_sharded(trainer, about, loading=True), source)
        for at, module in enumerate(trainer.modules):
            module.load_state_dict(found[f"model{at}"])
        with _without_steps():
            trainer.optimizer.load_state_dict(found["optimizer"])
    for optimizer in trainer.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()  # Megatron gives all of them one tensor
    bcp.save(path, trainer.states)


def load_model(net: Net, layout: Layout, source: Path, path: Path) -> str:
    """Load the model by bcp, and save it; return the error of a load with the optimizer."""
    trainer = built(net, layout, 77)
    bcp.load(source, {"model": trainer.chunks})
    bcp.save(path, {"model": trainer.chunks})
    try:
        bcp.load(source, trainer.states)
    except bcp.BcpError as error:
        return str(error)
    return ""
