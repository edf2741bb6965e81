"""Trains Megatron, goes on in a model with Hugging Face's names, under plain torch or FSDP2, and comes back."""

# ruff: noqa: PLC0415 -- the parent of the ranks does not import Megatron, which takes seconds and warns

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import silent
import torch
from frameworks.cuda_as_cpu import cuda_as_cpu
from hf_llama import GROUPS, HEADS, Llama
from megatron_gpt import Layout, Net, Trainer, batch, run
from megatron_jobs import built, train
from torch.distributed.fsdp import fully_shard

import bcp

__all__ = ["ADAM", "STEPS", "Seen", "back", "go_on", "start"]

NAMES = bcp.MegatronNames(num_attention_heads=HEADS, num_query_groups=GROUPS)
STEPS = 2

ADAM = {"lr": 5e-3, "eps": 1e-4, "betas": {"tuple": [0.9, 0.999]}}
"""Hyper-parameters as ``built`` makes them, and the scheduler's rate after the steps, as a checkpoint has them."""


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one job.

    Attributes:
        logits: of the batch behind the saved steps; under Megatron, of this rank's part of the vocabulary.
        losses: before the step on that batch, and after it, of the next one; of this rank's part of the batches.
    """

    logits: torch.Tensor
    losses: list[float | None]


def start(net: Net, layout: Layout, path: Path) -> Seen:
    """Train under Megatron without a pipeline, save path/saved, train one step more, save path/stepped."""
    trainer = built(net, layout, seed=5)
    scheduler = scheduled(trainer)
    for number in range(STEPS):
        train(trainer, number, 1)
        scheduler.step(1)
    silent.save(path / "saved", {**trainer.states, "model": [*trainer.chunks, bcp.MegatronRng()]})
    with cuda_as_cpu(), torch.no_grad():
        logits = run(trainer.chunks[0], batch(net, STEPS), labelled=False)
    before = train(trainer, STEPS, 1)
    silent.save(path / "stepped", trainer.states)
    return Seen(logits, before + train(trainer, STEPS + 1, 1))


def scheduled(trainer: Trainer) -> Any:
    """Let Megatron's scheduler set learning rates, which grow by 5e-4 a step, and decays: none of the norms."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rates = {"init_lr": 4e-3, "max_lr": 8e-3, "min_lr": 0.0, "lr_warmup_steps": 8, "lr_decay_steps": 20}
    decays = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 0, "wd_incr_style": "constant"}
    for group in trainer.optimizer.param_groups:
        group["max_lr"] = rates["max_lr"]
    return OptimizerParamScheduler(trainer.optimizer, **rates, lr_decay_style="constant", **decays)


def go_on(net: Net, source: Path, path: Path, how: str) -> Seen:
    """Load into Hugging Face's names, save path/saved, train one step more on whole batches, save path/stepped."""
    model = Llama(net, seed=77)
    if how == "fsdp2":
        for part in (*model.model.layers, model):
            fully_shard(part)
    groups = [[p for p in model.parameters() if (p.dim() == 1) == norms] for norms in (False, True)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.5, eps=0.1, weight_decay=0.7)
    states = {"model": model, "optimizer": optimizer}
    silent.load(source, states, options=bcp.LoadOptions(rename=NAMES.to_hf))
    silent.save(path / "saved", states)
    with torch.no_grad():
        logits = model(batch(net, STEPS))
    before = model.loss(batch(net, STEPS))
    before.backward()
    optimizer.step()
    silent.save(path / "stepped", states)
    with torch.no_grad():
        after = model.loss(batch(net, STEPS + 1))
    return Seen(logits, [float(before.detach()), float(after)])


def back(net: Net, layout: Layout, source: Path, path: Path) -> None:
    """Load into Megatron again, and save from there."""
    trainer = built(net, layout, seed=78)
    silent.load(source, trainer.states, options=bcp.LoadOptions(rename=NAMES.from_hf, cast=net.bf16))
    silent.save(path, trainer.states)
