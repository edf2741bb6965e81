"""``Exact`` under FSDP1, FSDP2, DDP and ZeroRedundancyOptimizer, and what ranks do with it there."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exact import ADAMW, Block, Exact, batch, grouped
from layouts import mesh_of
from ranks import kept
from silent import load, save
from torch import distributed as dist
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from watch import Seen

import bcp
from bcp.planners import versions
from bcp.planners.fsdp1 import Fsdp1Planner
from bcp.runtime.staging import shared_pool

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Layout:
    """How the model is trained.

    Attributes:
        kind: "fsdp1", "fsdp2", "ddp", "zero1" (DDP and ZeroRedundancyOptimizer), or "plain" on one rank.
        strategy: of FSDP1.
        orig: ``use_orig_params`` of FSDP1.
        mixed: whether FSDP1 computes in bf16.
        size: number of ranks; the first ones of the pool.
        slow: names of parameters that are in a second parameter group, by their last segment.
        swapped: whether that group comes first.
        odd: whether the model is :class:`Odd`, with wrappers around its parts.
    """

    kind: str = "fsdp1"
    strategy: str = "FULL_SHARD"
    orig: bool = True
    mixed: bool = False
    size: int = 4
    slow: tuple[str, ...] = ()
    swapped: bool = False
    odd: bool = False

    def __str__(self) -> str:
        parts = [self.kind, str(self.size)]
        if self.kind == "fsdp1":
            parts = [self.strategy.strip("_"), str(self.size), "orig" if self.orig else "flat"]
        return "-".join([*parts, *(["mixed"] if self.mixed else [])])


@functools.cache
def group_of(size: int) -> dist.ProcessGroup:
    """Make a group of the first ranks; collective over the whole pool."""
    with kept():
        return dist.new_group(list(range(size)))


def prepare() -> None:
    """Make every group that a layout may need, in the same order on all ranks."""
    for shape in ((1,), (2,), (4,), (2, 2)):
        if math.prod(shape) <= dist.get_world_size():
            group_of(math.prod(shape))
            mesh_of(shape)


class Counter(nn.Module):
    """Has extra state."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Packed(nn.Module):
    """Saves its buffer as another tensor, made for the occasion."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.register_buffer("value", torch.arange(5.0) + seed)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: ARG002, FBT001
        destination[prefix + "whole"] = self.value * 2

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        self.value.copy_(state_dict[prefix + "whole"] / 2)


class Odd(Exact):
    """Has a frozen layer, extra state, a tensor that is made to be saved, and one layer under two names."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, frozen=True)
        self.counter = Counter()
        self.packed = Packed(seed)
        self.again = self.inp

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.counter.count += 1
        return super().forward(rows)


class Broken(nn.Module):
    """Cannot say what its state is."""

    def get_extra_state(self) -> None:
        raise ZeroDivisionError("no state")


def built(layout: Layout, model: nn.Module) -> tuple[nn.Module, optim.Optimizer]:
    """Wrap a model and make its optimizer."""
    if layout.kind == "fsdp1":
        model = wrapped(layout, model)
    elif layout.kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh_of((layout.size,)))
        fully_shard(model, mesh=mesh_of((layout.size,)))
    elif layout.kind != "plain":
        model = DistributedDataParallel(model, process_group=group_of(layout.size))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = grouped(named, layout.slow)[:: -1 if layout.swapped else 1]
    if layout.kind == "zero1":
        return model, zero_redundancy(groups, group_of(layout.size))
    return model, optim.AdamW(groups, **ADAMW)


def zero_redundancy(groups: Any, group: dist.ProcessGroup | None = None, **how: Any) -> optim.Optimizer:
    """Make a ZeroRedundancyOptimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from its import
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 -- as it warns
    return ZeroRedundancyOptimizer(groups, optim.AdamW, group, **ADAMW, **how)


def wrapped(layout: Layout, model: nn.Module, **how: Any) -> nn.Module:
    """Wrap a model in FSDP1, each block in a unit of its own."""
    where = {"device_mesh": mesh_of((2, 2))} if layout.strategy in HYBRID else {"process_group": group_of(layout.size)}
    if layout.odd:
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
        how["ignored_states"] = list(model.fixed.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and tells so
        model = FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=layout.orig,
            sharding_strategy=ShardingStrategy[layout.strategy],
            mixed_precision=MIXED if layout.mixed else None,
            **{"auto_wrap_policy": ModuleWrapPolicy({Block}), **where, **how},
        )
    if layout.odd:
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])  # around the unit; it is inside of blocks[0]'s
    return model


def step(layout: Layout, model: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
    """Take one step."""
    model(batch(number, dist.get_rank() % layout.size)).backward()
    optimizer.step()
    optimizer.zero_grad()


def states_of(layout: Layout, model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Return what is saved."""
    return {"model": torch.compile(model, backend="eager") if layout.odd else model, "optimizer": optimizer}


def save_between(path: Path, layout: Layout) -> None:
    """Save between forward and backward, and again after the step."""
    prepare()
    model, optimizer = built(layout, Exact())
    step(layout, model, optimizer, 0)
    loss = model(batch(1, dist.get_rank()))
    save(path / "between", {"model": model, "optimizer": optimizer})
    loss.backward()
    optimizer.step()
    save(path / "stepped", {"model": model, "optimizer": optimizer})


def load_after_forward(path: Path, layout: Layout, how: str) -> torch.Tensor:
    """Load after a forward without backward, of which FSDP1 may keep unsharded weights; return the next loss."""
    prepare()
    model, optimizer = built(layout, Exact(9))
    rows = batch(5, 0)
    with torch.set_grad_enabled(how == "with grad"):
        model(rows)
    load(path, {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        return model(rows)


def square(path: Path, layout: Layout, width: int, budget: int, part: int) -> tuple[Seen, Seen]:
    """Save and load one square matrix and its moments, which are there; return what was seen of both."""
    prepare()
    shared_pool(pinned=False).clear()
    model, optimizer = built(layout, nn.Linear(width, width, bias=False))
    fresh, unused = built(layout, nn.Linear(width, width, bias=False))
    for each, its in ((model, optimizer), (fresh, unused)):
        each(torch.ones(1, width)).sum().backward()
        its.step()
        its.zero_grad()
    saving = bcp.SaveOptions(budget_bytes=budget, part_bytes=part)
    loading = bcp.LoadOptions(budget_bytes=budget, read_bytes=part, exchange_bytes=part)
    return (
        save(path, {"model": model, "optimizer": optimizer}, options=saving),
        load(path, {"model": fresh, "optimizer": unused}, options=loading),
    )


def transposed() -> nn.Module:
    """Return a layer whose weight is not in row-major order."""
    layer = nn.Linear(4, 6, bias=False)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


def over_tensor_parallelism() -> nn.Module:
    """Return FSDP1 over a layer that is cut in two."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    layer = parallelize_module(nn.Linear(8, 8), mesh["tp"], ColwiseParallel())
    return wrapped(Layout(), layer, device_mesh=mesh["dp"], process_group=None, auto_wrap_policy=None)


UNREADABLE: dict[str, Callable[[], nn.Module]] = {
    "inside, orig": lambda: wrapped(Layout(), nn.Linear(8, 8, bias=False)).module,
    "inside, flat": lambda: wrapped(Layout(orig=False), nn.Linear(8, 8, bias=False)).module,
    "tensor parallelism": over_tensor_parallelism,
    "strides": lambda: wrapped(Layout(orig=False), transposed()),
    "module": lambda: wrapped(Layout(), nn.Sequential(nn.Linear(3, 4), Broken())),
}


def refused(path: Path, case: str) -> str:
    """Save what cannot be saved; return what is said."""
    prepare()
    if case in UNREADABLE:
        return _said(path, {"model": UNREADABLE[case]()})
    if case == "overlap":
        model = DistributedDataParallel(Exact())
        return _said(path, {"model": model, "optimizer": zero_redundancy(model.parameters(), overlap_with_ddp=True)})
    model, optimizer = built(Layout(), Exact())
    step(Layout(), model, optimizer, 0)
    if case == "summoned":
        with FullyShardedDataParallel.summon_full_params(model):
            return _said(path, {"model": model})
    if case == "state dict":
        return _said(path, {"model": model, "optimizer": optimizer.state_dict()})
    return _said(path, {"model": model}, case)


def _said(path: Path, states: Mapping[str, Any], framework: str | None = None) -> str:
    try:
        bcp.save(path, states, framework=framework)
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def chunks(path: Path) -> bool:
    """Save FSDP1 modules in a container, beside a tensor, and load them into other layouts; return if all is right."""
    prepare()
    states, others = [
        {
            "model": {
                "first": wrapped(Layout(orig=orig), Exact(seed)),
                "rest": [wrapped(Layout(orig=orig, strategy="NO_SHARD"), Exact(seed + 1)), torch.full((3,), seed)],
            }
        }
        for orig, seed in ((True, 0), (False, 5))
    ]
    save(path, states)
    load(path, others)
    save(path.with_name("again"), others)
    return others["model"]["rest"][1].tolist() == [0, 0, 0]


def tied_across_units(path: Path) -> None:
    """Save weights of which one is in a unit, and by another name in the unit around it."""
    prepare()
    save(path, {"model": wrapped(Layout(), Exact(), auto_wrap_policy=ModuleWrapPolicy({nn.Embedding}))})


def reload(source: Path, path: Path, layout: Layout) -> None:
    """Load model and optimizer before the first step, and save them again."""
    prepare()
    states = states_of(layout, *built(layout, Exact(9)))
    load(source, states)
    save(path, states)


def versions_seen(layout: Layout) -> tuple[list[str], list[str]]:
    """Return of which tensors a step changes the version that guards a snapshot, and of which it does not."""
    prepare()
    model, optimizer = built(layout, Exact())
    step(layout, model, optimizer, 0)
    shards = Fsdp1Planner().local_shards({"model": model, "optimizer": optimizer})
    before = versions(shards)
    model(batch(1, dist.get_rank())).backward()
    optimizer.step()
    names = [shards.table.meta(row).fqn for row in range(len(shards.table))]
    pairs = list(zip(names, shards.tensors, before, versions(shards), strict=True))
    changed = [name for name, tensor, old, new in pairs if new != old and tensor.numel()]
    return changed, [name for name, tensor, old, new in pairs if new == old and tensor.numel()]


def owned_states(path: Path) -> tuple[list[str], list[str]]:
    """Load into a new ZeroRedundancyOptimizer; return of which parameters this rank has states, and should have."""
    prepare()
    model, optimizer = built(Layout("zero1"), Exact(seed=9))
    load(path, {"model": model, "optimizer": optimizer})
    names = {parameter: name for name, parameter in model.named_parameters()}
    owners = optimizer._param_to_rank
    mine = [names[parameter] for parameter, state in optimizer.optim.state.items() if state]
    return sorted(mine), sorted(name for parameter, name in names.items() if owners[parameter] == dist.get_rank())


def load_refused(path: Path, layout: Layout) -> str:
    """Load what does not fit; return what is said."""
    prepare()
    model, optimizer = built(layout, Exact())
    try:
        bcp.load(path, {"model": model, "optimizer": optimizer})
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"
