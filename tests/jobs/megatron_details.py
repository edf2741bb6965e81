"""Single questions to a real Megatron job, on every rank of a pool."""

# ruff: noqa: PLC0415 -- the parent of the ranks does not import Megatron, which takes seconds and warns

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from frameworks.cuda_as_cpu import cuda_as_cpu
from megatron_gpt import Layout, Net
from megatron_jobs import built, train
from torch import distributed as dist

import bcp
from bcp.plan.box import Box
from bcp.plan.read.renamed import CheckpointNames
from bcp.planners.megatron import MegatronPlanner, MegatronRng


def said(function: Any, *args: Any, **how: Any) -> str:
    """Return what an error says."""
    try:
        function(*args, **how)
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def save(net: Net, layout: Layout, path: Path, kinds: tuple[str, ...] = ("model", "optimizer"), steps: int = 1) -> None:
    trainer = built(net, layout, seed=5)
    train(trainer, 0, steps)
    bcp.save(path, {kind: trainer.states[kind] for kind in kinds})


def resave(net: Net, layout: Layout, source: Path, path: Path, dtypes: str = "equal") -> None:
    trainer = built(net, layout, seed=77)
    bcp.load(source, trainer.states, options=bcp.LoadOptions(cast=dtypes == "cast"))
    bcp.save(path, trainer.states)


def copy_model(net: Net, layout: Layout, source: Path, path: Path) -> None:
    trainer = built(net, layout, seed=77)
    bcp.load(source, {"model": trainer.chunks})
    bcp.save(path, {"model": trainer.chunks})


def load_optimizer_alone(net: Net, layout: Layout, source: Path, path: Path) -> None:
    """Load masters and moments only; what the weights are then follows from the masters."""
    trainer = built(net, layout, seed=77)
    bcp.load(source, {"optimizer": trainer.optimizer})
    with cuda_as_cpu():
        for chunk in trainer.chunks if net.distopt else ():
            chunk.start_param_sync(force_sync=True)
    bcp.save(path, trainer.states)


def prepare(net: Net, layout: Layout) -> list[str]:
    """Plan a load into a job that took no step; return the names of the states that are made. Nothing else changes."""
    trained, fresh = built(net, layout, seed=5), built(net, layout, seed=77)
    train(trained, 0, 1)
    table = MegatronPlanner().local_shards(trained.states).table
    metas = [table.tensors[row] for row in range(len(table.tensors))]
    rows = {(meta.kind, meta.fqn): row for row, meta in enumerate(metas)}
    weights = [p.detach().clone() for chunk in fresh.chunks for p in chunk.parameters()]
    groups = [{**group, "params": list(map(id, group["params"]))} for group in fresh.optimizer.param_groups]
    with mock.patch("torch.optim.AdamW.step", side_effect=AssertionError("a step was taken")):
        targets = MegatronPlanner().load_targets(
            fresh.states, CheckpointNames(rows, frozenset(table.objects), table.tensors)
        )
    assert [{**group, "params": list(map(id, group["params"]))} for group in fresh.optimizer.param_groups] == groups
    assert all(map(torch.equal, weights, [p.detach() for chunk in fresh.chunks for p in chunk.parameters()]))
    states = [state for each in fresh.optimizer.chained_optimizers for state in each.optimizer.state.values()]
    assert not any(value.any() for state in states for value in state.values())
    wanted = targets.shards.table.tensors
    return [wanted[row].fqn for row in range(len(wanted)) if wanted[row].kind == "optimizer"]


def blocks(net: Net, layout: Layout) -> tuple[set[tuple[str, Box]], int]:
    """Return the blocks of masters and moments that this rank states, and how many it has no element of."""
    trainer = built(net, layout, seed=5)
    train(trainer, 0, 1)
    table = MegatronPlanner().local_shards(trainer.states).table
    rows = [row for row in range(len(table)) if table.meta(row).kind == "optimizer" and table.meta(row).shape]
    nothing = sum(not table.nbytes[row] for row in rows)
    return {(table.meta(row).fqn, table.box(row)) for row in rows}, nothing


def said_of_optimizer_alone(net: Net, source: Path) -> str:
    return said(bcp.load, source, {"optimizer": built(net, Layout(), seed=77).optimizer})


def rng(layout: Layout, path: Path, how: str, *, of_process: bool = False) -> list[float] | str:
    """Save the random states, of Megatron's ranks or each process's own, or load them; return what is drawn next."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    trainer = built(Net(), layout, seed=dist.get_rank() if how == "save" else 50)
    random.seed(dist.get_rank() + len(how))
    np.random.seed(dist.get_rank() + len(how))  # noqa: NPY002 -- the state that is saved
    states: dict[str, Any] = {"model": [*trainer.chunks, MegatronRng()]}
    if of_process:
        states = {"model": trainer.chunks, "extra_states": {"rng": bcp.RngState()}}
    if how == "save":
        bcp.save(path, states)
    else:
        text = said(bcp.load, path, states, strict=how == "load")
        if text != "nothing":
            return text
    with cuda_as_cpu(), get_cuda_rng_tracker().fork():
        tracked = float(torch.rand(()))
    return [random.random(), float(np.random.rand()), float(torch.rand(())), tracked]  # noqa: NPY002, S311


def rng_of_processes(layout: Layout, path: Path, how: str) -> list[float] | str:
    """Do the same with the states of each process."""
    return rng(layout, path, how, of_process=True)


def change_hyper(net: Net, layout: Layout, source: Path, path: Path) -> None:
    """Save with another learning rate."""
    trainer = built(net, layout, seed=77)
    bcp.load(source, trainer.states)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.5
        group["max_lr"] = 0.75
    bcp.save(path, trainer.states)


def hyper_of(net: Net, layout: Layout, source: Path) -> list[tuple[float, float]]:
    """Load, and return learning rates of groups that have parameters."""
    trainer = built(net, layout, seed=77)
    bcp.load(source, trainer.states)
    return [(group["lr"], group["max_lr"]) for group in trainer.optimizer.param_groups if group["params"]]


def extra_state(layout: Layout, path: Path, how: str) -> list[Any]:
    """Let one kind of module have an extra state; save it, or load it and return what the modules got."""
    from megatron.core.tensor_parallel import RowParallelLinear

    trainer, got = built(Net(), layout, seed=5), []
    value = None if how == "without" else torch.arange(3) + (dist.get_rank() if how == "save" else 70)
    with (
        mock.patch.object(RowParallelLinear, "get_extra_state", return_value=value),
        mock.patch.object(RowParallelLinear, "set_extra_state", got.append),
    ):
        if how == "load":
            bcp.load(path, {"model": trainer.chunks})
        else:
            bcp.save(path, {"model": trainer.chunks})
    return got


def sharded_dict(layout: Layout, source: Path, path: Path) -> None:
    """Load into sharded state dicts that the user made, with an axis for the layers, and save others' from there."""
    trainer = built(Net(), layout, seed=77)
    states = {"model": {f"model{at}": module.sharded_state_dict() for at, module in enumerate(trainer.modules)}}
    bcp.load(source, states)
    bcp.save(path, {"model": trainer.chunks})


def scaler(path: Path, how: str) -> list[float]:
    """Save or load a job in fp16, or one that has no scaler; return its loss scaler's state."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    trainer = built(Net(bf16=True), Layout(), seed=5)
    (optimizer,) = trainer.optimizer.chained_optimizers
    with cuda_as_cpu():
        made = DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 2, 3)
        for inf in (False, False, True) if how == "save" else ():
            made.update(inf)
    optimizer.grad_scaler = None if how in ("without", "into none") else made
    if how in ("save", "without"):
        bcp.save(path, trainer.states)
    else:
        bcp.load(path, trainer.states)
    return [float(made.scale), made._growth_tracker, made._hysteresis_tracker]


def refused(net: Net, change: str) -> list[str]:
    """Return what a save, and a planner's probe, say after a change of the job."""
    trainer = built(net, Layout(tp=2), seed=5)
    (optimizer,) = trainer.optimizer.chained_optimizers
    states = dict(trainer.states)
    if change == "precision":
        optimizer.config.use_precision_aware_optimizer = True
    elif change == "fsdp":
        optimizer.ddp_config.use_megatron_fsdp = True
    elif change == "fp8":
        optimizer.ddp_config.fp8_param_gather = True
    elif change == "ranges":
        del optimizer.gbuf_ranges
    elif change == "late weights":
        states = {"model": built(replace(net, overlap=True), Layout(tp=2), seed=6).chunks}
    elif change == "other model":
        states["model"] = built(net, Layout(tp=2), seed=6).chunks
    elif change == "state dict":
        states["optimizer"] = optimizer.optimizer.state_dict()
    return [said(bcp.save, "/nowhere", states, framework="megatron"), said(MegatronPlanner().probe)]


def sharded_optimizer(net: Net, form: str) -> list[str]:
    """Pass Megatron's own sharded state dict of the optimizer, whose buffer has several buckets; return the errors."""
    trainer = built(net, Layout(tp=2), seed=5)
    train(trainer, 0, 1)
    (optimizer,) = trainer.optimizer.chained_optimizers
    assert len(optimizer.buffers[0].buckets) > 1 or not net.overlap
    with cuda_as_cpu():
        model = {f"model{at}": module.sharded_state_dict() for at, module in enumerate(trainer.modules)}
        sharded = trainer.optimizer.sharded_state_dict(model, metadata={"distrib_optim_sharding_type": form})
    places = [
        {"model": model, "optimizer": sharded},
        {"model": {**model, "optimizer": sharded}},
        {"optimizer": [sharded]},
    ]
    return [said(bcp.save, "/nowhere", states, framework=which) for states in places for which in ("megatron", None)]


def common_state(path: Path) -> tuple[dict[str, Any], str]:
    """Save a sharded state dict with plain values in it; load it with a value in each place, and without them."""
    from megatron.core.dist_checkpointing import ShardedTensor

    def state(common: dict[str, Any]) -> dict[str, Any]:
        data = torch.ones(4)
        return {"weight": ShardedTensor("weight", data, data.dtype, (4,), (4,), (0,), None, dist.get_rank()), **common}

    saved = {"iteration": 7, "rate": 0.5, "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], 0: {"of": torch.arange(3)}}
    others = {"iteration": 0, "rate": 0.0, "groups": [{"lr": 0.0, "betas": (0.0, 0.0)}]}
    target = state({**others, 0: {"of": torch.zeros(3, dtype=torch.int64)}})
    bcp.save(path, {"model": state(saved)}, framework="megatron")
    bcp.load(path, {"model": target}, framework="megatron")
    del target["weight"]
    same = {**target, 0: target[0]["of"].tolist()} == {**saved, 0: [0, 1, 2]}
    return {"same": same}, said(bcp.load, path, {"model": state({})}, framework="megatron")


def probe_without(module: str, owner: str, attribute: str) -> str:
    """Return what the probe says when Megatron lacks an attribute."""
    import importlib

    holder = getattr(importlib.import_module(module), owner)
    kept = holder.__dict__[attribute]
    delattr(holder, attribute)
    try:
        return said(MegatronPlanner().probe)
    finally:
        setattr(holder, attribute, kept)
