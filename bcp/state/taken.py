"""Targets of values at several places, and tensors in memory of other targets: each place gets its own value.

The values of a checkpoint are separate. Values that were loaded into one object, or into one memory, would replace each
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from bcp.state.dtensor import local_tensor
from bcp.state.hooks import is_sharded_tensor
from bcp.state.load_path import storages
from bcp.state.optimizer_parts import optimizers_in, parts_of
from bcp.state.values import same_value

__all__ = ["Taken"]

_NONE: Mapping[str, Any] = {}


class Taken:
    """The targets that have their values already, in one load."""

    def __init__(self, states: Mapping[str, Any] = _NONE) -> None:
        """Take the states of the load: the tensors of its model and its optimizer are in place."""
        self._states = states
        self._first: dict[int, tuple[Any, Any]] = {}  # by ``id``: the target, and its first value
        self._tensors: dict[object, list[torch.Tensor]] | None = None  # by storage

    def takes_another(self, target: Any, loaded: Any) -> bool:
        """Whether a target took another value at another place; the first value is noted."""
        _, first = self._first.setdefault(id(target), (target, loaded))
        return first is not loaded and not same_value((first,), (loaded,))  # as values: of any layout

    def fill(self, target: torch.Tensor, loaded: torch.Tensor) -> bool:
        """Copy a value into a plain tensor. Return False, with nothing changed, if it would change another target."""
        if self._tensors is None:
            self._tensors = defaultdict(list)
            for tensor in _tensors_of(self._states):
                for key in storages(tensor):
                    self._tensors[key].append(tensor)
        beside = [local_tensor(tensor).detach() for key in storages(target) for tensor in self._tensors[key]]
        values = [tensor.clone() for tensor in beside]
        old = target.detach().clone() if beside else target
        with torch.no_grad():
            target.copy_(loaded)
            if not all(map(same_value, beside, values)):
                target.copy_(old)
                return False
        for key in storages(target):
            self._tensors[key].append(target)
        return True


def _tensors_of(states: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of the model and the optimizer, except those without memory that others could share."""
    optimizer = states.get("optimizer")
    optimizers = optimizers_in(optimizer) or []
    held = [states.get("model"), None if optimizers else optimizer]
    for part in (part for each in optimizers for part in parts_of(each)):
        held += [getattr(part, "param_groups", None), getattr(part, "state", None)]
    for tensor in _found(held):
        if not is_sharded_tensor(tensor):
            yield tensor


def _found(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of modules and of nested containers."""
    if isinstance(value, nn.Module):
        for part in value.modules():
            held = (*part._parameters.values(), *part._buffers.values())  # noqa: SLF001 -- Megatron's buffers is a list
            yield from (tensor for tensor in held if tensor is not None)
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _found(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _found(child)
