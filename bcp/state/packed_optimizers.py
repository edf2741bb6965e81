"""The state dict of an optimizer, ``{"state": {0: ...}, "param_groups": [...]}``, named by the model beside it.

torch numbers the parameters, and numbers do not tell which parameter is meant where. So the numbers become names of the
model's parameters, if sizes leave no doubt; else the state dict is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from bcp._log import log
from bcp.errors import StateError
from bcp.plan.read.renamed import CheckpointNames
from bcp.state.inventory import Leaves
from bcp.state.modules import ParamNames
from bcp.state.optimizers import OPTIMIZER, Slot

__all__ = ["is_packed", "packed_slots", "refuse_packed_inside", "was_saved_by_number"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def is_packed(state: object) -> bool:
    """Whether a state is what ``state_dict()`` of a torch optimizer returns: its parameters are numbers."""
    if not isinstance(state, Mapping) or set(state) != {"state", "param_groups"}:
        return False
    groups = state["param_groups"]
    if not isinstance(groups, list) or not groups or not isinstance(state["state"], MutableMapping):
        return False
    params = [group.get("params") if isinstance(group, dict) else None for group in groups]
    numbers = [number for some in params if isinstance(some, list) for number in some]
    return None not in params and bool(numbers) and all(type(number) is int for number in numbers)


def refuse_packed_inside(state: object, path: str = "") -> None:
    """Raise StateError for a state dict of an optimizer inside of another container, or with more keys."""
    if not isinstance(state, (Mapping, list, tuple)):
        return
    if isinstance(state, Mapping) and is_packed({key: state.get(key) for key in ("state", "param_groups")}):
        place = f" at {path!r}" if path else f" with {sorted(map(str, set(state) - {'state', 'param_groups'}))}"
        raise StateError(
            f"states['optimizer'] has an optimizer's state_dict(){place}, which numbers the parameters, so that no "
            "optimizer would find them again. Pass the optimizer itself; several as a list or a dict"
        )
    for key, child in state.items() if isinstance(state, Mapping) else enumerate(state):
        refuse_packed_inside(child, f"{path}.{key}" if path else str(key))


def was_saved_by_number(saved: CheckpointNames) -> bool:
    """Whether a checkpoint has such a state dict as older versions saved it."""
    return any(kind == OPTIMIZER and name.endswith(".params.0") for kind, name in saved.objects)


def packed_slots(
    leaves: Leaves, model: object, state: Mapping[str, Any], saved: CheckpointNames | None = None
) -> list[Slot]:
    """Return the parameters of a state dict, with the names of the model's.

    Raises StateError, which says what to pass instead, if there is no model, or it does not tell which parameter a
    number is.
    """
    groups, states = state["param_groups"], state["state"]
    names = ParamNames(leaves, model, saved.rows if saved else ())
    parameters = _by_name(leaves, groups, states)
    if not parameters:
        parameters = _numbered(_parameters_of(model), groups, states)
        if saved is None:
            _tell_order()
    view = _ByParameter(states, parameters)
    for number in states:
        if number not in parameters:
            raise _unnamed(f"its state has the entry {number!r} of no parameter")
    slots = []
    for group in groups:
        for number in group["params"]:
            fqn, *tied = names(parameters[number])
            slots.append(Slot(fqn, parameters[number], group, view, tied, keeps_kind=True))
    return slots


class _ByParameter(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The states of a state dict by parameter instead of number."""

    def __init__(self, states: MutableMapping[int, dict[str, Any]], parameters: Mapping[int, torch.Tensor]) -> None:
        self._states = states
        self._parameters = parameters
        self._numbers = {id(parameter): number for number, parameter in parameters.items()}

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self._states[self._numbers[id(parameter)]]

    def __setitem__(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        self._states[self._numbers[id(parameter)]] = values

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._states[self._numbers[id(parameter)]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self._parameters[number] for number in self._states)

    def __len__(self) -> int:
        return len(self._states)


def _parameters_of(model: object) -> list[torch.Tensor]:
    """Return the parameters of a model in their order; of a state dict, its tensors that can be some."""
    given = list(model) if isinstance(model, (list, tuple)) else [model]
    modules = [module for module in given if isinstance(module, nn.Module)]
    if modules and len(modules) == len(given):
        return [parameter for module in modules for parameter in module.parameters()]
    if not isinstance(model, Mapping):
        raise _unnamed("there is no model beside it")
    tensors: list[torch.Tensor] = []
    seen: set[Any] = set()
    for name, value in model.items():
        if isinstance(value, torch.Tensor) and not str(name).endswith(_BUFFERS):
            place = (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
            if not value.numel() or place not in seen:
                seen.add(place)
                tensors.append(value)
    return tensors


@cache
def _tell_order() -> None:
    """Warn, once, of names that follow from an order which nothing proves."""
    log.warning(
        "states['optimizer'] is an optimizer's state_dict() without names: its parameters are taken in the order of "
        "model.parameters(). If the optimizer was built in another order, its states get wrong names; pass the "
        "optimizer itself"
    )


def _by_name(leaves: Leaves, groups: Sequence[Any], states: Mapping[Any, Any]) -> dict[int, torch.Tensor]:
    """Return the parameter of each number by ``param_names``, if torch has kept them."""
    leaf_of = {**leaves.tensors.get("model", {}), **leaves.originals}
    named = {name: leaf for name, leaf in leaf_of.items() if isinstance(leaf, torch.Tensor)}
    pairs = [pair for group in groups for pair in zip(group["params"], group.get("param_names") or (), strict=False)]
    found = {number: named[name] for number, name in pairs if name in named}
    if len(found) != sum(len(group["params"]) for group in groups):
        return {}
    alike = all(_shape(states.get(number), None) in (None, tuple(value.shape)) for number, value in found.items())
    return found if alike else {}


def _numbered(
    parameters: Sequence[torch.Tensor], groups: Sequence[Any], states: Mapping[Any, Any]
) -> dict[int, torch.Tensor]:
    """Return the parameter of each number. Raises StateError if several orders would do, or none."""
    numbers = [number for group in groups for number in group["params"]]
    given = len(parameters)
    if given != len(numbers):
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if len(parameters) != len(numbers):
        raise _unnamed(f"it has {len(numbers)} parameters, the model {given} (a state dict's buffers count, too)")
    if len(groups) > 1:
        return _by_size(parameters, groups, states)
    known = {tuple(parameter.shape) for parameter in parameters}
    for number, parameter in zip(numbers, parameters, strict=True):
        shape = _shape(states.get(number), None)
        if shape not in (None, tuple(parameter.shape)) and (len(shape) == parameter.dim() or shape in known):
            raise _unnamed(f"its parameter {number} has shape {list(shape or ())}, the model's {list(parameter.shape)}")
    return dict(zip(numbers, parameters, strict=True))


def _by_size(
    parameters: Sequence[torch.Tensor], groups: Sequence[Any], states: Mapping[Any, Any]
) -> dict[int, torch.Tensor]:
    """Find the parameters of several groups: all parameters of one shape have to be in one of them, in order."""
    by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
    numbered: dict[int, torch.Tensor] = {}
    for group in groups:
        wanted: dict[tuple[int, ...], list[int]] = {}
        for number in group["params"]:
            shape = _shape(states.get(number), None)
            if shape is None:
                raise _unnamed(f"it has {len(groups)} groups, and no state tells the shape of parameter {number}")
            wanted.setdefault(shape, []).append(number)
        for shape, numbers in wanted.items():
            alike = by_shape.pop(shape, [])
            if len(alike) != len(numbers):
                raise _unnamed(f"it has {len(groups)} groups, and parameters of shape {list(shape)} are in several")
            numbered |= dict(zip(numbers, alike, strict=True))
    return numbered


def _shape(values: Any, dims: int | None) -> tuple[int, ...] | None:
    """Return the shape that the states of a parameter have; None if there is no state that tells it."""
    tensors: Collection[Any] = values.values() if isinstance(values, Mapping) else ()
    shapes = {tuple(value.shape) for value in tensors if isinstance(value, torch.Tensor) and value.dim()}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    return shape if dims is None or len(shape) == dims else None


def _unnamed(reason: str) -> StateError:
    return StateError(
        f"states['optimizer'] is an optimizer's state_dict(), which numbers the parameters, and {reason}: it cannot be "
        "told which parameter is meant. Pass the optimizer itself"
    )
