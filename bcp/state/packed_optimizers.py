"""The state dict of an optimizer, ``{"state": {0: ...}, "param_groups": [...]}``, named by the model beside it.

torch numbers the parameters, and numbers do not tell which parameter is meant where. So the numbers become names of the
model's parameters, if sizes leave no doubt; else the state dict is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any

import torch

from bcp._log import log
from bcp.errors import StateError
from bcp.plan.read.renamed import CheckpointNames
from bcp.state.inventory import Leaves
from bcp.state.modules import ParamNames
from bcp.state.optimizers import OPTIMIZER, Slot
from bcp.state.packed_numbers import by_name, by_order, unnamed
from bcp.state.saved_order import add_numbers, by_saved_number

__all__ = ["is_packed", "packed_slots", "refuse_packed_inside", "was_saved_by_number"]


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

    A save whose names follow from an order alone stores the numbers as well (:mod:`bcp.state.saved_order`). Raises
    StateError, which says what to pass instead, if there is no model, or it does not tell which parameter a number is.
    """
    groups, states = state["param_groups"], state["state"]
    names = ParamNames(leaves, model, saved)
    tensors = {**leaves.tensors.get("model", {}), **leaves.originals}
    parameters = by_name(tensors, groups, states) or (by_saved_number(tensors, groups, saved) if saved else {})
    is_ordered = not parameters
    if is_ordered:
        parameters, is_certain = by_order(model, groups, states)
        if not is_certain:
            _tell_order()
    view = _ByParameter(states, parameters)
    for number in states:
        if number not in parameters:
            raise unnamed(f"its state has the entry {number!r} of no parameter")
    slots = []
    for group in groups:
        for number in group["params"]:
            fqn, *tied = names(parameters[number])
            slots.append(Slot(fqn, parameters[number], group, view, tied, keeps_kind=True))
    if saved is None and is_ordered:
        add_numbers(leaves, slots)
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


@cache
def _tell_order() -> None:
    """Warn, once, of names that follow from an order which nothing proves."""
    log.warning(
        "states['optimizer'] is an optimizer's state_dict() without names: its parameters are taken in the order of "
        "model.parameters(). If the optimizer was built in another order, its states have wrong names: only an "
        "optimizer that was built in the same order gets them right. Pass the optimizer itself"
    )
