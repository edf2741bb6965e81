"""Which parameter of a model has which number in the state dict of an optimizer: by kept names, by order, by size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from bcp.errors import StateError

__all__ = ["by_name", "by_order", "unnamed"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

_MOST_SHOWN = 10

Numbered = dict[int, torch.Tensor]
"""The parameter of each number."""


def by_name(tensors: Mapping[str, Any], groups: Sequence[Any], states: Mapping[Any, Any]) -> Numbered:
    """Return the parameters by ``param_names``, if torch has kept them, and their shapes agree; else nothing."""
    pairs = [pair for group in groups for pair in zip(group["params"], group.get("param_names") or (), strict=False)]
    found = {number: tensors[name] for number, name in pairs if isinstance(tensors.get(name), torch.Tensor)}
    if len(found) != sum(len(group["params"]) for group in groups):
        return {}
    alike = all(_shape(states.get(number)) in (None, tuple(value.shape)) for number, value in found.items())
    return found if alike else {}


def by_order(model: object, groups: Sequence[Any], states: Mapping[Any, Any]) -> tuple[Numbered, bool]:
    """Return the parameters in the order of the model, or of its state dict; and whether sizes alone prove each.

    Raises StateError if there is no model, or if sizes contradict the order, or several orders would do.
    """
    tensors = _parameters_of(model)
    numbered = _in_order(model, tensors, groups, states)
    sizes = Counter(tuple(tensor.shape) for tensor in tensors.values())
    shapes = {number: tuple(parameter.shape) for number, parameter in numbered.items()}
    return numbered, all(sizes[s] == 1 and _shape(states.get(number)) == s for number, s in shapes.items())


def _in_order(
    model: object, tensors: Mapping[str, torch.Tensor], groups: Sequence[Any], states: Mapping[Any, Any]
) -> Numbered:
    filled = [group for group in groups if group["params"]]
    if len(filled) > 1:
        return _by_size(list(tensors.values()), filled, states)
    numbers = [number for group in filled for number in group["params"]]
    shapes = {number: _shape(states.get(number)) for number in numbers}
    parameters = _chosen(model, tensors, list(shapes.values()))
    known = {tuple(parameter.shape) for parameter in parameters}
    for number, parameter in zip(numbers, parameters, strict=True):
        shape = shapes[number]
        if shape not in (None, tuple(parameter.shape)) and (len(shape) == parameter.dim() or shape in known):
            raise unnamed(f"its parameter {number} has shape {list(shape)}, the model's {list(parameter.shape)}")
    return dict(zip(numbers, parameters, strict=True))


def unnamed(reason: str) -> StateError:
    """Return the error of a state dict whose numbers stay without names."""
    return StateError(
        f"states['optimizer'] is an optimizer's state_dict(), which numbers the parameters, and {reason}: it cannot be "
        "told which parameter is meant. Pass the optimizer itself"
    )


def _parameters_of(model: object) -> dict[str, torch.Tensor]:
    """Return the parameters of a model in their order; of a state dict, the tensors that can be some."""
    given = list(model) if isinstance(model, (list, tuple)) else [model]
    modules = [module for module in given if isinstance(module, nn.Module)]
    if modules and len(modules) == len(given):
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return {str(number): parameter for number, parameter in enumerate(parameters)}
    if not isinstance(model, Mapping):
        raise unnamed("there is no model beside it")
    tensors: dict[str, torch.Tensor] = {}
    seen: set[Any] = set()
    for name, value in model.items():
        if isinstance(value, torch.Tensor) and not str(name).endswith(_BUFFERS):
            place = (value.data_ptr(), tuple(value.shape), tuple(value.stride()))
            if not value.numel() or place not in seen:
                seen.add(place)
                tensors[str(name)] = value
    return tensors


def _chosen(
    model: object, tensors: Mapping[str, torch.Tensor], shapes: Sequence[tuple[int, ...] | None]
) -> list[torch.Tensor]:
    """Return the tensors that are the optimizer's, as many as there are ``shapes``.

    Raises StateError if it cannot be told which ones.
    """
    parameters = list(tensors.values())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for some in (parameters, trained):
        if len(some) == len(shapes):
            return some
    count = f"it has {len(shapes)} parameters"
    if not isinstance(model, Mapping):
        raise unnamed(f"{count}, the model {len(parameters)}, of which {len(trained)} require gradients")
    if found := _aligned(tensors, shapes, is_module=hasattr(model, "_metadata")):
        return found
    names = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in [*tensors.items()][:_MOST_SHOWN])
    more = ", ..." if len(tensors) > _MOST_SHOWN else ""
    raise unnamed(
        f"{count}, and the model's state dict has {len(tensors)} tensors that may be parameters or buffers "
        f"({names}{more}); pass the module instead of its state dict, or build the optimizer with named_parameters()"
    )


def _aligned(
    tensors: Mapping[str, torch.Tensor], shapes: Sequence[tuple[int, ...] | None], *, is_module: bool
) -> list[torch.Tensor]:
    """Return the one choice of tensors with these shapes, in order; an empty list for none, or for several.

    A module's own state dict has the parameters of each module before the buffers of that module.
    """
    named = list(enumerate(tensors))
    blocks = groupby(named, key=lambda pair: pair[1].rpartition(".")[0] if is_module else pair[0])
    values, left = list(tensors.values()), len(tensors)
    choices: dict[int, list[Any]] = {0: [None]}  # by number of chosen tensors, up to two chains (chain, index)
    for _, block in blocks:
        indices = [index for index, _ in block]
        left -= len(indices)
        reached: dict[int, list[Any]] = {}
        for taken, chains in choices.items():
            ends = chains
            for number in range(len(indices) + 1):
                if number:
                    place, index = taken + number - 1, indices[number - 1]
                    if place == len(shapes) or shapes[place] not in (None, tuple(values[index].shape)):
                        break
                    ends = [(chain, index) for chain in ends]
                if taken + number + left >= len(shapes):
                    reached[taken + number] = (reached.get(taken + number, []) + ends)[:2]
        choices = reached
    chains = choices.get(len(shapes), [])
    chosen, chain = [], chains[0] if len(chains) == 1 else None
    while chain:
        chain, index = chain
        chosen.append(values[index])
    return chosen[::-1]


def _by_size(parameters: Sequence[torch.Tensor], groups: Sequence[Any], states: Mapping[Any, Any]) -> Numbered:
    """Find the parameters of several groups: all parameters of one shape have to be in one of them, in order."""
    by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
    numbered: Numbered = {}
    for group in groups:
        wanted: dict[tuple[int, ...], list[int]] = {}
        for number in group["params"]:
            shape = _shape(states.get(number))
            if shape is None:
                raise unnamed(f"it has {len(groups)} groups, and no state tells the shape of parameter {number}")
            wanted.setdefault(shape, []).append(number)
        for shape, numbers in wanted.items():
            alike = by_shape.pop(shape, [])
            if len(alike) != len(numbers):
                raise unnamed(
                    f"it has {len(groups)} groups, and parameters of shape {list(shape)} are in several, or are "
                    f"buffers: one group has {len(numbers)}, the model {len(alike)} that are in no group before"
                )
            numbered |= dict(zip(numbers, alike, strict=True))
    return numbered


def _shape(values: Any) -> tuple[int, ...] | None:
    """Return the shape that the states of a parameter have; None if there is no state that tells it."""
    tensors: Collection[Any] = values.values() if isinstance(values, Mapping) else ()
    shapes = {tuple(value.shape) for value in tensors if isinstance(value, torch.Tensor) and value.dim()}
    return shapes.pop() if len(shapes) == 1 else None
