"""Slots of Megatron's optimizers: which flat interval of which parameter a rank steps, and where its fp32 master is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bcp.errors import InputError, StateError
from bcp.planners.megatron.logical import flat_placement, whole_placement
from bcp.planners.megatron.model import LogicalShards, has_base
from bcp.state.names import dotted, walk
from bcp.state.optimizers import Slot, counts_in_group
from bcp.state.placement import ShardedLeaf

__all__ = [
    "FORMAT",
    "fresh_in",
    "optimizers_of",
    "refuse_sharded_optimizers",
    "scalers_of",
    "slots_of",
]

_WHERE = "states['optimizer']"

_READ = ("DistributedOptimizer", "Float16OptimizerWithFloat16Params", "FP32Optimizer")

_NEEDED: Mapping[str, Sequence[str]] = {
    "DistributedOptimizer": (
        *("optimizer", "config", "ddp_config", "gbuf_ranges", "buffers", "model_float16_groups", "model_fp32_groups"),
        *("shard_fp32_from_float16_groups", "shard_fp32_groups", "_copy_main_params_to_model_params"),
    ),
    "Float16OptimizerWithFloat16Params": (
        *("optimizer", "config", "float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups"),
        "_copy_main_params_to_model_params",
    ),
    "FP32Optimizer": ("optimizer",),
}
"""The attributes that are read, by class; most of them are private to Megatron."""

FORMAT = "param_state_sharding_type"
"""Key by which a distributed optimizer's sharded state dict names its format."""

_DEEPEST = 8  # containers around such a state dict; a state that contains itself has no end

_LAYOUT_KEYS = frozenset({"is_expert_parallel"})
"""Keys of param groups that depend on the layout: without expert parallelism, experts are in the other groups."""

_REFUSED = {
    "LayerWiseDistributedOptimizer": "deals whole parameters out to ranks; build it with use_distributed_optimizer",
    "HybridDeviceOptimizer": "keeps states on the CPU; set optimizer_cpu_offload=False",
}
"""Optimizers that cannot be read, and why."""

_UNREADABLE = {
    "use_megatron_fsdp": "is sharded by Megatron-FSDP",
    "use_precision_aware_optimizer": "keeps scaled states",
    "fp8_param_gather": "steps parameters in fp8",
}
"""Settings of the optimizer or of Megatron's DDP that cannot be read, and why."""


def optimizers_of(state: object, tested: Callable[[], str]) -> list[Any]:
    """Return Megatron's optimizers in a state, those inside of chains, without the empty ones of frozen models.

    Raises StateError if there is anything else, or a setting that cannot be read. Raises InputError if this Megatron
    lacks a needed attribute; ``tested`` returns the versions that have it.
    """
    optimizers = []
    for path, leaf in walk(state, _WHERE):
        location = _WHERE + (f" at {dotted(path)!r}" if path else "")
        _refuse(leaf, location)
        for optimizer in getattr(leaf, "chained_optimizers", [leaf]):
            if not getattr(optimizer, "is_stub_optimizer", False):
                _check(optimizer, location, tested)
                optimizers.append(optimizer)
    return optimizers


def _sharded_optimizer_in(state: object, where: str, depth: int = 0) -> tuple[str, str] | None:
    """Return the place and the format of a distributed optimizer's ``sharded_state_dict`` in a state; None for none."""
    if depth > _DEEPEST:
        return None
    if isinstance(state, Mapping):
        if FORMAT in state:
            return where, str(getattr(state[FORMAT], "data", state[FORMAT]))
        children: Iterable[tuple[Any, Any]] = state.items()
    elif isinstance(state, (list, tuple)):
        children = enumerate(state)
    else:
        return None
    nested = ((f"{where}[{key!r}]", child) for key, child in children if isinstance(child, (Mapping, list, tuple)))
    return next((found for path, child in nested if (found := _sharded_optimizer_in(child, path, depth + 1))), None)


def refuse_sharded_optimizers(states: Mapping[str, Any]) -> None:
    """Raise StateError for a distributed optimizer's ``sharded_state_dict``: it has buckets, or gathered copies."""
    for kind in ("model", "optimizer"):
        if found := _sharded_optimizer_in(states.get(kind), f"states[{kind!r}]"):
            where, form = found
            raise StateError(
                f"{where} is the sharded_state_dict() of Megatron's distributed optimizer, in its format {form!r}; "
                "pass the optimizer itself, as states['optimizer']: its shards are read in place, and load under any "
                "layout"
            )


def slots_of(optimizers: Iterable[Any], shards: LogicalShards) -> Iterator[Slot]:
    """Yield the slots of all optimizers. Raises StateError if the model lacks a parameter, or a cut is impossible."""
    for optimizer in optimizers:
        if has_base(optimizer, ("DistributedOptimizer",)):
            yield from _flat_slots(optimizer, shards)
            yield from _empty_slots(optimizer, shards)
        else:
            yield from _whole_slots(optimizer, shards)


def fresh_in(optimizers: Iterable[Any]) -> dict[int, tuple[int, int]]:
    """Return, by ``id`` of the parameter, the interval that this rank stepped, where weights are gathered late.

    With ``overlap_param_gather``, a step brings the new weights only into the shard of the rank that made them, and the
    next forward pass gathers the rest. Until then the rest has the values of the step before.
    """
    late = [
        optimizer
        for optimizer in optimizers
        if getattr(getattr(optimizer, "ddp_config", None), "overlap_param_gather", False)
    ]
    everything = {
        id(parameter): (0, 0) for optimizer in late for buffer in optimizer.buffers for parameter in buffer.params
    }
    return everything | {id(parameter): held for optimizer in late for parameter, held in _ranges(optimizer).items()}


def scalers_of(optimizers: Iterable[Any]) -> dict[str, Any]:
    """Return the loss scalers that have a state, by name: experts are stepped by an optimizer of their own."""
    scalers: dict[str, Any] = {}
    for optimizer in optimizers:
        scaler = getattr(optimizer, "grad_scaler", None)
        if scaler is not None and scaler.state_dict():
            experts = any(group.get("is_expert_parallel") for group in optimizer.optimizer.param_groups)
            scalers.setdefault("grad_scaler.experts" if experts else "grad_scaler", scaler)
    return scalers


def _refuse(part: object, location: str) -> None:
    """Refuse an optimizer by its class."""
    for name, reason in _REFUSED.items():
        if has_base(part, (name,)):
            raise StateError(f"{location} is a {name}, which {reason}")


def _check(optimizer: Any, location: str, tested: Callable[[], str]) -> None:
    """Refuse optimizers whose states cannot be read."""
    _refuse(getattr(optimizer, "optimizer", None), location)
    if not has_base(optimizer, _READ):
        raise StateError(
            f"{location} is a {type(optimizer).__name__}; pass what get_megatron_optimizer() returned, not its "
            "state dict"
        )
    for config in ("config", "ddp_config"):
        for setting, reason in _UNREADABLE.items():
            if getattr(getattr(optimizer, config, None), setting, False):
                raise StateError(f"{location} {reason}; to save or load it, set {setting}=False")
    for name in _READ:
        missing = [attribute for attribute in _NEEDED[name] if not hasattr(optimizer, attribute)]
        if has_base(optimizer, (name,)) and missing:
            raise InputError(
                f"{tested()}, in which {name} has no {', '.join(missing)}; pin megatron-core or upgrade bcp"
            )


def _flat_slots(optimizer: Any, shards: LogicalShards) -> Iterator[Slot]:
    """Yield a slot for each shard of each parameter of which a DistributedOptimizer has elements here.

    Tensor and pipeline parallel ranks may cut replicas differently. Only the first is saved; all are loaded.
    """
    inner, ranges = optimizer.optimizer, _ranges(optimizer)
    for group, parameter, stepped in _stepped(optimizer):
        low, high = ranges[parameter]
        if stepped is None or stepped.numel() != high - low:
            raise StateError(
                f"{_WHERE} does not step the {high - low} elements of {shards.of(parameter)[0].fqn!r} that its "
                "gbuf_ranges give this rank; pass the optimizer as get_megatron_optimizer() made it"
            )
        for shard in shards.of(parameter):
            placement = flat_placement(shard, low, high, stated=shard.main or shards.saved is not None)
            yield _slot(inner, group, shard.fqn, stepped, ShardedLeaf(stepped, placement), parameter)


def _slot(
    inner: Any, group: dict[str, Any], fqn: str, stepped: torch.Tensor, leaf: ShardedLeaf, parameter: Any
) -> Slot:
    """Make one slot. The stepped tensor is a master unless it is the model's own memory."""
    own = stepped.untyped_storage()._cdata == parameter.untyped_storage()._cdata  # noqa: SLF001 -- as state/memory.py
    return Slot(
        fqn,
        stepped,
        group,
        inner.state,
        placement=leaf.placement,
        master=None if own else leaf,
        master_saved=stepped.dtype != parameter.dtype,
        step_in_group=counts_in_group(inner),
        layout_keys=_LAYOUT_KEYS,
        optimizer=type(inner),
    )


def _empty_slots(optimizer: Any, shards: LogicalShards) -> Iterator[Slot]:
    """Yield slots of the parameters of which other ranks of the group have everything.

    They hold nothing, but state the same blocks, so that all ranks of the group are planned for as one.
    """
    held = _ranges(optimizer)
    example: dict[str, Any] = next(iter(optimizer.optimizer.state.values()), {})
    keys = {key: value.dtype for key, value in example.items() if isinstance(value, torch.Tensor) and value.dim()}
    for parameter in (parameter for buffer in optimizer.buffers for parameter in buffer.params):
        if parameter in held:
            continue
        nothing = torch.empty(0, dtype=torch.float32, device=parameter.device)
        state = {key: nothing.new_empty(0, dtype=dtype) for key, dtype in keys.items()}
        for shard in shards.of(parameter):
            leaf = ShardedLeaf(nothing, flat_placement(shard, 0, 0))
            master = leaf if parameter.dtype != torch.float32 else None
            yield Slot(
                shard.fqn, nothing, {}, defaultdict(dict, {nothing: state}), placement=leaf.placement, master=master
            )


def _whole_slots(optimizer: Any, shards: LogicalShards) -> Iterator[Slot]:
    """Yield a slot for each shard of each parameter of an optimizer that has all of this rank's."""
    inner = optimizer.optimizer
    for group, parameter, stepped in _stepped(optimizer):
        for shard in shards.of(parameter):
            yield _slot(
                inner, group, shard.fqn, stepped, ShardedLeaf(stepped, whole_placement(shard, stepped)), parameter
            )


def _ranges(optimizer: Any) -> dict[torch.Tensor, tuple[int, int]]:
    """Return the flat interval of each parameter that a DistributedOptimizer has here."""
    return {
        parameter: (ranges["param"].start, ranges["param"].end)
        for by_dtype in optimizer.gbuf_ranges
        for buckets in by_dtype.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    }


def _stepped(optimizer: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]:
    """Yield (group, parameter of the model, the tensor that the inner optimizer steps for it)."""
    for index, group in enumerate(optimizer.optimizer.param_groups):
        if has_base(optimizer, ("DistributedOptimizer",)):
            parameters = [*optimizer.model_float16_groups[index], *optimizer.model_fp32_groups[index]]
            stepped = [*optimizer.shard_fp32_from_float16_groups[index], *optimizer.shard_fp32_groups[index]]
        elif has_base(optimizer, ("Float16OptimizerWithFloat16Params",)):
            parameters = [*optimizer.float16_groups[index], *optimizer.fp32_from_fp32_groups[index]]
            stepped = [*optimizer.fp32_from_float16_groups[index], *optimizer.fp32_from_fp32_groups[index]]
        else:
            parameters = stepped = group["params"]
        for parameter, part in zip(parameters, stepped, strict=True):
            yield group, parameter, part
