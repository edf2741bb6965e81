"""The planner for DeepSpeed: ZeRO-1, ZeRO-2, ZeRO-3, BF16_Optimizer, the 16-bit optimizers of stage 0, ZeRO-Offload."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import nn

from bcp.errors import InputError, StateError
from bcp.plan.load.saved import Saved
from bcp.planners.deepspeed_checks import check_readable
from bcp.planners.deepspeed_parts import Held, add_partitioned, held_by, is_marked, is_partitioned
from bcp.planners.leaves import Leaves
from bcp.planners.model import Finish, ParamNames, add_state
from bcp.planners.optimizer import OPTIMIZER, STEP, Slot, counts_in_group, optimizers_in
from bcp.planners.plain import PlainPlanner
from bcp.protocols import ObjectKey, States

__all__ = ["DeepSpeedPlanner", "holds_deepspeed"]

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
"""What changes in a dynamic loss scaler."""


class DeepSpeedPlanner(PlainPlanner):
    """``states["model"]`` is the engine or the model inside it, ``states["optimizer"]`` the engine or its optimizer.

    Under ZeRO-3 the weights are what lies on this rank, otherwise they are whole. fp32 masters and states are read
    from the 1-D partition that the inner torch optimizer steps, and loaded into it, so that neither the number of
    ranks nor the stage has to be that of the save, before the first step or after. Nothing is gathered.

    A load without ``states["optimizer"]`` fills the masters with the weights: the next step would undo it otherwise.
    A dynamic loss scale belongs to the optimizer; counters of the engine and schedulers are the caller's extra states.
    """

    name = "deepspeed"

    def probe(self) -> str:
        """Check the private attributes that are read; return which versions run and were tested.

        Raises:
            InputError: DeepSpeed is not installed, or lacks one.

        """
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

    def _add_model(self, leaves: Leaves, states: States, saved: Saved | None = None) -> Finish:
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
            self._add_masters(leaves, optimizer, module, saved)
        return finish

    def _add_masters(self, leaves: Leaves, optimizer: Any, module: nn.Module, saved: Saved) -> None:
        """Let a load of the weights fill their masters too, from which the next step makes the weights anew."""
        if optimizer is None and any(map(is_marked, module.parameters())):
            raise StateError(
                "states['model'] is the module of a ZeRO engine, whose fp32 masters would undo the load at the "
                "next step; pass the engine"
            )
        if not _is(optimizer, "DeepSpeedOptimizer"):
            return
        names = ParamNames(leaves, module, saved.rows)
        for held in held_by(optimizer):
            if (master := held.master) is not None:
                leaves.also("model", names(held.parameter)[0], master)

    def _slots(self, leaves: Leaves, states: States, saved: Saved | None = None) -> Sequence[Slot] | None:
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
        names = ParamNames(leaves, module, saved.rows if saved else ())
        return [_slot(held, optimizer.optimizer, names) for held in held_by(optimizer)]

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
        found = {id(held.fp32): inner.state.get(held.fp32, {}) for held in held_by(optimizer)}
        for state in found.values():
            if isinstance(state.get(STEP), torch.Tensor) and _counts_itself(inner):
                state[STEP] = int(state[STEP].item())
        if hasattr(optimizer, "_hp_optimizer_states_linked") and all(found.values()):
            optimizer._hp_optimizer_states_linked = False  # noqa: SLF001 -- as after its own load
            optimizer._lazy_init_hp_params_optimizer_state()  # noqa: SLF001


def holds_deepspeed(states: States) -> bool:
    """Whether model or optimizer are of DeepSpeed; does not import it."""
    parts = [states.get("model"), states.get(OPTIMIZER)]
    modules = (part for part in parts if isinstance(part, nn.Module))
    if any(_is_engine(part) or _is(part, "DeepSpeedOptimizer") for part in parts):
        return True
    return "deepspeed" in sys.modules and any(is_marked(each) for module in modules for each in module.parameters())


def _is_engine(value: object) -> bool:
    """Whether it is what ``deepspeed.initialize()`` returns first."""
    return _is(value, "DeepSpeedEngine")


def _is(value: object, name: str) -> bool:
    """Whether it is an instance of DeepSpeed's class of that name."""
    return any(base.__name__ == name and _is_of_deepspeed(base) for base in type(value).__mro__)


def _is_of_deepspeed(kind: type) -> bool:
    """Whether DeepSpeed made that class."""
    return kind.__module__.partition(".")[0] == "deepspeed"


def _counts_itself(inner: object) -> bool:
    """Whether an inner optimizer is DeepSpeed's own, as FusedAdam: its kernels take the step count as an int."""
    return any(map(_is_of_deepspeed, type(inner).__mro__))


def _parts(states: States) -> tuple[Any, Any, nn.Module | None]:
    """Return the engine, DeepSpeed's optimizer and the model inside; None for what was not passed and is not known."""
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
    )


def _scaler(optimizer: Any) -> Any:
    """Return the dynamic loss scaler, or None."""
    for attribute, dynamic in (("loss_scaler", "dynamic"), ("loss_scale_config", "dynamic_loss_scale")):
        scaler = getattr(optimizer, attribute, None)
        if getattr(scaler, dynamic, False):
            return scaler
    return None


def _scale_name(key: str) -> ObjectKey:
    """Return the name of a value of the loss scaler."""
    return (OPTIMIZER, f"loss_scaler.{key}")


def _add_scaler(leaves: Leaves, optimizer: Any, saved: Saved | None) -> None:
    """Take a dynamic loss scaler; a load wants of it what the checkpoint has."""
    scaler = _scaler(optimizer)
    for key in _SCALER:
        if hasattr(scaler, key) and (saved is None or _scale_name(key) in saved.objects):
            leaves.add_object(*_scale_name(key), getattr(scaler, key))
