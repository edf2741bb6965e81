"""The planner for DeepSpeed: ZeRO-1, ZeRO-2, ZeRO-3, BF16_Optimizer, the 16-bit optimizers of stage 0, ZeRO-Offload.

DeepSpeed settings that put state out of a planner's reach are refused, each with the remedy.

Weights, fp32 masters and optimizer states of each parameter are stated as flat intervals of this rank.

ZeRO-3 cuts every parameter into equal runs; ZeRO-1, ZeRO-2 and BF16_Optimizer lay all parameters of a group in a row
and cut that. Both times it is one 1-D fp32 tensor that the inner torch optimizer steps, and a parameter is an
interval of it. Nothing here imports DeepSpeed, gathers or copies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import distributed, nn

from bcp.errors import InputError, StateError
from bcp.plan.box import Box
from bcp.plan.read.renamed import CheckpointNames
from bcp.planners.torch_native import PlainPlanner
from bcp.protocols import ObjectKey, States
from bcp.state.inventory import Leaves, named_state_of
from bcp.state.load_path import customs_of, give, owned_tensors, whole
from bcp.state.modules import Finish, ParamNames, add_state
from bcp.state.names import cleaner
from bcp.state.optimizers import OPTIMIZER, STEP, Slot, counts_in_group, optimizers_in
from bcp.state.placement import Leaf, LocalInterval, Placement, ShardedLeaf

__all__ = ["DeepSpeedPlanner", "holds_deepspeed"]

_PARALLEL_SIZES = (
    "get_tensor_model_parallel_world_size",
    "get_slice_parallel_world_size",
    "get_model_parallel_world_size",
)
"""Names of the number of tensor-parallel ranks in the versions of Megatron."""


def check_readable(engine: Any, optimizer: Any, module: nn.Module | None) -> None:
    """Refuse settings whose state cannot be read; arguments that the caller does not have are None.

    Raises StateError, which names the setting and the remedy.
    """
    for reason in (*_engine(engine), *_optimizer(optimizer), *_parameters(module)):
        raise StateError(f"DeepSpeed: {reason}")


def _engine(engine: Any) -> Iterator[str]:
    """Yield the unsupported settings of the engine."""
    if any(base.__name__ == "PipelineEngine" for base in type(engine).__mro__):
        yield (
            "a PipelineEngine numbers its layers by pipeline stage; only engines without pipeline parallelism can be "
            "saved and loaded: use its own save_checkpoint, or train without PipelineModule"
        )
    for name in _PARALLEL_SIZES:
        size = getattr(getattr(engine, "mpu", None), name, None)
        if size is not None and size() > 1:
            yield (
                f"the engine's mpu splits tensors over {size()} ranks, and does not say how; use framework='megatron' "
                "with Megatron's own optimizer, or train with ZeRO alone"
            )
            return


def _optimizer(optimizer: Any) -> Iterator[str]:
    """Yield the unsupported settings of the optimizer."""
    if getattr(optimizer, "swap_optimizer", False):
        yield "offload_optimizer.device is 'nvme', so that states are in swap files; use 'cpu' or 'none'"
    if getattr(optimizer, "offload_optimizer", False) and getattr(optimizer, "partial_offload", 1.0) != 1.0:
        yield (
            f"offload_optimizer.ratio is {optimizer.partial_offload}, so that two optimizers share the states; use 1.0"
        )
    if getattr(optimizer, "zenflow", False):
        yield "zenflow keeps part of the states in buffers of its own; leave it out of zero_optimization"
    if any(base.__name__.startswith("SuperOffload") for base in type(optimizer).__mro__):
        yield "super_offload keeps the states in another process; use offload_optimizer without it"
    if getattr(optimizer, "offloaded_states", None):
        yield "engine.offload_states() took states away; call engine.reload_states() first"


def _parameters(module: nn.Module | None) -> Iterator[str]:
    """Yield the unsupported settings of a parameter."""
    named: Iterator[tuple[str, Any]] = iter(()) if module is None else module.named_parameters()
    for name, parameter in named:
        run = getattr(parameter, "ds_tensor", None)
        if not getattr(parameter, "allreduce", True):
            yield f"{name!r} belongs to MoE experts, whose names are the same on all ranks; train without MoE layers"
        if getattr(parameter, "tensor_model_parallel", False):
            yield f"{name!r} is split by AutoTP (tensor_parallel.autotp_size), which does not say how; use ZeRO alone"
        if getattr(parameter, "nvme_swapper", None) is not None:
            yield "offload_param.device is 'nvme', so that weights are in swap files; use 'cpu' or 'none'"
        if hasattr(run, "ds_quant_scale") or hasattr(parameter, "ds_quant_scale"):
            yield (
                f"{name!r} is kept quantized (zero_quantized_nontrainable_weights or quantized_initialization), so "
                "that its values are not there; turn that off"
            )


@dataclass(frozen=True, slots=True)
class Held:
    """The states of one parameter in this rank's optimizer."""

    parameter: nn.Parameter  # the model's
    # the tensor that the inner optimizer steps, key of its states: a partition of many parameters in a row, or the
    # parameter's own fp32 copy
    fp32: torch.Tensor
    placement: Placement | None  # place of ``fp32`` in the parameter; None if it is all of the parameter
    group: dict[str, Any]  # the inner optimizer's group with the hyper-parameters

    @property
    def master(self) -> Leaf | None:
        """The fp32 master; None if the optimizer steps the model's own memory."""
        weights: torch.Tensor = getattr(self.parameter, "ds_tensor", self.parameter)
        if self.fp32.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr():
            return None
        return ShardedLeaf(self.fp32, self.placement) if self.placement else self.fp32


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 keeps a run of the parameter on each rank."""
    return hasattr(parameter, "ds_tensor")


def is_marked(parameter: nn.Parameter) -> bool:
    """Whether a ZeRO optimizer has taken the parameter over."""
    return is_partitioned(parameter) or hasattr(parameter, "_hp_mapping")


def held_by(optimizer: Any) -> Iterator[Held]:
    """Yield the states of every parameter that a DeepSpeed optimizer steps, also if this rank has no part of it.

    Raises StateError if it is not known where an optimizer of this type keeps its states.
    """
    for mark, read in _READERS.items():
        if hasattr(optimizer, mark):
            return read(optimizer)
    raise StateError(
        f"states['optimizer'] leads to a {type(optimizer).__name__}, of which it is not known where it keeps its "
        "states; leave it out of the states where the engine does not train"
    )


def add_partitioned(leaves: Leaves, module: nn.Module) -> Finish:
    """Take the leaves of a module under ZeRO-3: this rank's run of each parameter, and whole buffers.

    A parameter that is whole at the moment, as small (persistent) ones always are between steps, is loaded there too.
    Raises StateError if a parameter is being gathered, or two leaves have one name.
    """
    clean, placed, names = cleaner(module), {}, {}
    state = named_state_of(module, "states['model']")
    if leaves.loading:
        _check_taken(leaves, module, state)
    for raw, value in state.items():
        name: ObjectKey = ("model", clean(raw))
        if not isinstance(value, torch.Tensor) or raw.rpartition(".")[2] == "_extra_state":
            leaves.add_object(*name, value)
            names[raw] = name
        elif isinstance(value, nn.Parameter) and is_partitioned(value):
            if id(value) not in placed:
                placed[id(value)] = _run_of(value, name[1])
            leaves.add(*name, placed[id(value)])
            if _is_whole(value):
                leaves.also(*name, value.data)
        else:
            leaves.add(*name, value)

    def finish(objects: Any) -> None:
        _drop_second_copies(module)
        values = {raw: objects[name] for raw, name in names.items() if name in objects}
        if values:
            found = give(module, whole(state, {**state, **values}), "states['model']")
            leaves.refuse([], sorted({f"model: {clean(raw)}" for raw in found.unexpected} - {*leaves.refused[1]}))

    return finish


def _check_taken(leaves: Leaves, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Note entries that the module does not take back.

    Raises StateError for hooks and overrides of ``load_state_dict``, which would see empty parameters.
    """
    if customs := customs_of(module, ("deepspeed.",)):
        raise StateError(
            f"DeepSpeed: under ZeRO-3, {next(iter(customs.all.values()))} would see parameters without their elements; "
            "remove it before the load, and call it afterwards under deepspeed.zero.GatheredParameters"
        )
    clean, expected = cleaner(module), owned_tensors(module).keys()
    leaves.refuse(
        [f"model: {clean(raw)}" for raw in sorted(expected - state.keys())],
        [f"model: {clean(raw)}" for raw in sorted(state.keys() - expected)],
    )


def _is_whole(parameter: Any) -> bool:
    return bool(parameter.ds_status.name == "AVAILABLE")


def _drop_second_copies(module: Any) -> None:
    """Let ZeRO++ (``zero_hpz_partition_size``) make its second copies anew of the runs, as it does after a step."""
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None


def _run_of(parameter: Any, fqn: str) -> ShardedLeaf:
    """Return this rank's run of a ZeRO-3 parameter's weights."""
    if parameter.ds_status.name == "INFLIGHT":
        raise StateError(f"ZeRO-3 is gathering {fqn!r} at the moment; save and load between steps")
    return ShardedLeaf(parameter.ds_tensor, _run_in(parameter, tuple(parameter.ds_tensor.shape)))


def _run_in(parameter: Any, local: tuple[int, ...], offset: int = 0) -> Placement:
    """Place this rank's run of a ZeRO-3 parameter in a local tensor; the last ranks' runs are short, or empty."""
    shape, length = tuple(parameter.ds_shape), parameter.ds_tensor.ds_numel
    start = min(distributed.get_rank(parameter.ds_process_group) * length, parameter.ds_numel)
    return Placement(
        shape, local, (LocalInterval(Box.whole(shape), start, min(start + length, parameter.ds_numel), offset),)
    )


def _zero3(optimizer: Any) -> Iterator[Held]:
    """Read ZeRO-3: per sub-group one tensor of the padded runs of its parameters."""
    partitions = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    for number, (parameters, fp32) in enumerate(partitions):
        group, offset = optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[number]], 0
        for parameter in parameters:
            yield Held(parameter, fp32, _run_in(parameter, tuple(fp32.shape), offset), group)
            offset += parameter.ds_tensor.ds_numel


def _zero12(optimizer: Any) -> Iterator[Held]:
    """Read ZeRO-1 and ZeRO-2."""
    return _rows(
        optimizer, optimizer.bit16_groups, optimizer.bit16_groups_flat, optimizer.single_partition_of_fp32_groups
    )


def _bf16(optimizer: Any) -> Iterator[Held]:
    return _rows(optimizer, optimizer.bf16_groups, optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition)


def _fused(optimizer: Any) -> Iterator[Held]:
    return _rows(optimizer, optimizer.fp16_groups, optimizer.fp16_groups_flat, optimizer.fp32_groups_flat)


def _rows(optimizer: Any, groups: Any, rows: Any, partitions: Any) -> Iterator[Held]:
    """Read groups whose weights lie in a row, of which the fp32 partitions of the ranks are equal lengths.

    A parameter's place in the row is read from its memory. DeepSpeed's own record, ``_hp_mapping``, is of other
    elements with ``round_robin_gradients`` (0.19.8), which lays the parameters in another order than it assumes.
    """
    per_group = zip(groups, rows, partitions, optimizer.optimizer.param_groups, strict=True)
    for number, (parameters, row, fp32, group) in enumerate(per_group):
        ranks = getattr(optimizer, "real_dp_process_group", None)
        low = distributed.get_rank(ranks[number]) * fp32.numel() if ranks else 0
        for parameter in parameters:
            shape, begin = tuple(parameter.shape), parameter.storage_offset() - row.storage_offset()
            if parameter.untyped_storage().data_ptr() != row.untyped_storage().data_ptr():
                raise StateError(
                    f"a parameter of shape {list(shape)} lies elsewhere than where DeepSpeed put it; "
                    "change weights in place, without setting .data"
                )
            start = min(max(low - begin, 0), parameter.numel())
            stop = min(max(low + fp32.numel() - begin, start), parameter.numel())
            span = LocalInterval(Box.whole(shape), start, stop, max(begin - low, 0) if stop > start else 0)
            yield Held(parameter, fp32, Placement(shape, tuple(fp32.shape), (span,)), group)


def _unfused(optimizer: Any) -> Iterator[Held]:
    """Read FP16_UnfusedOptimizer (stage 0): an fp32 copy of every parameter, whole on every rank."""
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, optimizer.optimizer.param_groups, strict=True)
    for parameters, masters, group in groups:
        for parameter, fp32 in zip(parameters, masters, strict=True):
            yield Held(parameter, fp32, None, group)


_READERS: dict[str, Callable[[Any], Iterator[Held]]] = {
    "fp32_partitioned_groups_flat": _zero3,
    "single_partition_of_fp32_groups": _zero12,
    "fp32_groups_flat_partition": _bf16,
    "fp32_groups_flat": _fused,
    "fp32_groups": _unfused,
}
"""By the attribute in which an optimizer keeps its fp32 tensors."""


_TESTED = "0.19.8"
_NEEDED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "deepspeed.utils.tensor_fragment": {
        "fragment_address": ("__dataclass_fields__",),
        "tensor_fragment": ("__dataclass_fields__", "get_hp_fragment_address"),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "DeepSpeedZeroOptimizer": ("_link_all_hp_params", "_lazy_init_hp_params_optimizer_state")
    },
    "deepspeed.runtime.zero.stage3": {"DeepSpeedZeroOptimizer_Stage3": ("_create_fp32_partitions",)},
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": ("_link_all_hp_params",)},
}
"""By module and class: what has to be there for the rest to be where it is read."""

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of a dynamic loss scaler that change."""


class DeepSpeedPlanner(PlainPlanner):
    """``states["model"]`` is the engine or the model inside it, ``states["optimizer"]`` the engine or its optimizer.

    Under ZeRO-3 the weights are the intervals of this rank, otherwise they are whole. fp32 masters and states are read
    from the 1-D partition that the inner torch optimizer steps, and loaded into it. The number of ranks and the stage
    may differ from those of the save, before and after the first step. Nothing is gathered.

    A load without ``states["optimizer"]`` fills the masters with the weights: the next step would undo it otherwise.
    A dynamic loss scale belongs to the optimizer; counters of the engine and schedulers are the caller's extra states.
    """

    name = "deepspeed"
    fills_meta = False

    def probe(self) -> str:
        """Return the running and the tested versions. Raises InputError if DeepSpeed or an attribute is missing."""
        super().probe()
        try:
            version = metadata.version("deepspeed")
        except metadata.PackageNotFoundError:
            raise InputError("framework='deepspeed' needs DeepSpeed; install deepspeed") from None
        tested = f"planner {self.name!r} was tested with deepspeed {_TESTED}; this is deepspeed {version}"
        for module, classes in _NEEDED.items():
            for name, attributes in classes.items() if module in sys.modules else ():
                owner = getattr(sys.modules[module], name, None)
                if missing := [attribute for attribute in attributes if not hasattr(owner, attribute)]:
                    raise InputError(
                        f"{tested}, in which {module}.{name} has no {', '.join(missing)}; pin deepspeed or upgrade bcp"
                    )
        return tested

    def _add_model(self, leaves: Leaves, states: States, saved: CheckpointNames | None = None) -> Finish:
        """Take the weights, and in a load without an optimizer its masters as well."""
        engine, optimizer, module = _parts(states)
        check_readable(engine, optimizer, module)
        if states.get("model") is None:
            return super()._add_model(leaves, states, saved)
        if module is None:
            raise StateError(
                f"states['model'] is a {type(states['model']).__name__}; under DeepSpeed pass the engine, or the "
                "module inside it: its state dict is gathered from all ranks"
            )
        partitioned = any(map(is_partitioned, module.parameters()))
        finish = add_partitioned(leaves, module) if partitioned else add_state(leaves, "model", module)
        if saved is not None and states.get(OPTIMIZER) is None:
            self._add_masters(leaves, optimizer, module)
        return finish

    def _add_masters(self, leaves: Leaves, optimizer: Any, module: nn.Module) -> None:
        """Let a load of the weights fill their masters too, from which the next step makes the weights anew."""
        if optimizer is None and any(map(is_marked, module.parameters())):
            raise StateError(
                "states['model'] is the module of a ZeRO engine, whose fp32 masters would undo the load at the "
                "next step; pass the engine"
            )
        if not _is(optimizer, "DeepSpeedOptimizer"):
            return
        names = ParamNames(leaves, module)  # any name will do: a load fills the memory of all tied names
        for held in held_by(optimizer):
            if (master := held.master) is not None:
                leaves.also("model", names(held.parameter)[0], master)

    def _slots(self, leaves: Leaves, states: States, saved: CheckpointNames | None = None) -> Sequence[Slot] | None:
        """Read the optimizer; stage 0 in fp32 has a plain one of torch."""
        _, optimizer, module = _parts(states)
        if states.get(OPTIMIZER) is None:
            return None
        if _is_engine(states[OPTIMIZER]) and not (_is(optimizer, "DeepSpeedOptimizer") or optimizers_in(optimizer)):
            raise StateError("states['optimizer'] is an engine without an optimizer; leave it out of the states")
        if not _is(optimizer, "DeepSpeedOptimizer"):
            if any(map(is_marked, module.parameters() if module else ())):
                raise StateError(
                    f"states['optimizer'] is a {type(states[OPTIMIZER]).__name__}, and ZeRO keeps the model's states; "
                    "pass the engine, or the optimizer that deepspeed.initialize() returned"
                )
            return super()._slots(leaves, {OPTIMIZER: optimizer, "model": module}, saved)
        _add_scaler(leaves, optimizer, saved)
        names = ParamNames(leaves, module, saved)
        return [_slot(held, optimizer.optimizer, names) for held in held_by(optimizer)]

    def _torch_optimizers(self, states: States) -> object:
        """Return the optimizer of stage 0 in fp32; those of DeepSpeed are not asked for their state dict."""
        _, optimizer, _ = _parts(states)
        return () if _is(optimizer, "DeepSpeedOptimizer") else optimizer

    def _settle(self, states: States, objects: Mapping[ObjectKey, Any]) -> None:
        """Let DeepSpeed find the states that a load made, and count in its own types."""
        _, optimizer, _ = _parts(states)
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or states.get(OPTIMIZER) is None:
            return
        scaler = _scaler(optimizer)
        for key in _SCALER:
            if scaler is not None and _scale_name(key) in objects:
                setattr(scaler, key, objects[_scale_name(key)])
        inner_states = {id(held.fp32): inner.state.get(held.fp32, {}) for held in held_by(optimizer)}
        for state in inner_states.values():
            if isinstance(state.get(STEP), torch.Tensor) and _counts_itself(inner):
                state[STEP] = int(state[STEP].item())
        if hasattr(optimizer, "_hp_optimizer_states_linked") and all(inner_states.values()):
            optimizer._hp_optimizer_states_linked = False  # noqa: SLF001 -- as after its own load
            optimizer._lazy_init_hp_params_optimizer_state()  # noqa: SLF001


def holds_deepspeed(states: States) -> bool:
    """Whether model or optimizer are of DeepSpeed; does not import it."""
    parts = [states.get("model"), states.get(OPTIMIZER)]
    modules = (part for part in parts if isinstance(part, nn.Module))
    if any(_is_engine(part) or _is(part, "DeepSpeedOptimizer") for part in parts):
        return True
    return "deepspeed" in sys.modules and any(
        is_marked(parameter) for module in modules for parameter in module.parameters()
    )


def _is_engine(value: object) -> bool:
    return _is(value, "DeepSpeedEngine")


def _is(value: object, name: str) -> bool:
    return any(base.__name__ == name and _is_of_deepspeed(base) for base in type(value).__mro__)


def _is_of_deepspeed(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "deepspeed"


def _counts_itself(inner: object) -> bool:
    return any(map(_is_of_deepspeed, type(inner).__mro__))


def _parts(states: States) -> tuple[Any, Any, nn.Module | None]:
    """Return the engine, DeepSpeed's optimizer and the model inside; None for each that is unknown."""
    model, optimizer = states.get("model"), states.get(OPTIMIZER)
    engine: Any = next((part for part in (model, optimizer) if _is_engine(part)), None)
    module: Any = engine.module if engine is not None and model in (None, engine) else model
    if optimizer is None or _is_engine(optimizer):
        optimizer = getattr(engine, "optimizer", None)
    if not isinstance(module, nn.Module):
        return engine, optimizer, None
    if optimizer is None:  # a module alone knows that of ZeRO-3
        optimizer = next((p._z3_optimizer for p in module.parameters() if hasattr(p, "_z3_optimizer")), None)  # noqa: SLF001
    return engine, optimizer, module


def _slot(held: Held, inner: torch.optim.Optimizer, names: ParamNames) -> Slot:
    """Return the slot of one parameter."""
    fqn, *tied = names(held.parameter)
    return Slot(
        fqn,
        held.fp32,
        held.group,
        inner.state,
        tied,
        placement=held.placement,
        master=held.master,
        master_saved=held.fp32.dtype != held.parameter.dtype,
        step_in_group=counts_in_group(inner) and not _counts_itself(inner),
        optimizer=type(inner),
    )


def _scaler(optimizer: Any) -> Any:
    """Return the dynamic loss scaler, or None."""
    for attribute, dynamic in (("loss_scaler", "dynamic"), ("loss_scale_config", "dynamic_loss_scale")):
        scaler = getattr(optimizer, attribute, None)
        if getattr(scaler, dynamic, False):
            return scaler
    return None


def _scale_name(key: str) -> ObjectKey:
    return (OPTIMIZER, f"loss_scaler.{key}")


def _add_scaler(leaves: Leaves, optimizer: Any, saved: CheckpointNames | None) -> None:
    """Add a dynamic loss scaler; a load requests its entries that the checkpoint has."""
    scaler = _scaler(optimizer)
    for key in _SCALER:
        if hasattr(scaler, key) and (saved is None or _scale_name(key) in saved.objects):
            leaves.add_object(*_scale_name(key), getattr(scaler, key))
