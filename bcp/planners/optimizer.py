"""Leaves of torch optimizers, named by the parameters they belong to.

Tensors of a parameter's state are ``state.<fqn>.<name>``; every hyper-parameter of its group is
``param_groups.<fqn>.<key>``, so that a load may group the parameters in another way than the save did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bcp.planners.leaves import Leaves
from bcp.planners.model import ParamNames
from bcp.planners.names import Path, dotted, walk

__all__ = ["OPTIMIZER", "Slot", "add_optimizers", "optimizers_in", "slots_of"]

OPTIMIZER = "optimizer"
"""The kind of everything here."""

_PER_PARAMETER = frozenset({"params", "param_names"})
"""What a group lists for each parameter, and are no hyper-parameters of all of them."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter in one optimizer.

    Attributes:
        fqn: its name.
        parameter: the parameter itself.
        group: the group it is in.
        state: the optimizer's states of all parameters; None where another rank keeps this one's (ZeRO-1).
        tied: its further names.
    """

    fqn: str
    parameter: torch.Tensor
    group: dict[str, Any]
    state: dict[torch.Tensor, dict[str, Any]] | None
    tied: Sequence[str] = ()

    @property
    def values(self) -> dict[str, Any]:
        """The states of this parameter that exist, by name."""
        return {} if self.state is None else self.state.get(self.parameter, {})

    @property
    def hyper(self) -> dict[str, Any]:
        """The hyper-parameters of its group."""
        return {key: value for key, value in self.group.items() if key not in _PER_PARAMETER}

    def leaves(self) -> Iterator[tuple[Path, Any]]:
        """Yield (path, leaf) of the states. A container without tensors is one leaf: nothing in it is placed."""
        for name, value in self.values.items():
            if isinstance(value, torch.Tensor):
                yield (name,), value
                continue
            parts = list(walk(value, f"the state of {self.fqn!r}", (name,)))
            if any(isinstance(leaf, torch.Tensor) for _, leaf in parts):
                yield from parts
            else:
                yield (name,), value


def optimizers_in(value: object) -> list[torch.optim.Optimizer] | None:
    """Return the optimizers if that is what ``value`` is: one, or a list or mapping of nothing else; or None."""
    parts: list[Any] = list(value.values()) if isinstance(value, Mapping) else [value]
    parts = list(value) if isinstance(value, (list, tuple)) else parts
    return parts if parts and all(isinstance(part, torch.optim.Optimizer) for part in parts) else None


def slots_of(optimizers: Sequence[torch.optim.Optimizer], names: ParamNames) -> Iterator[Slot]:
    """Yield every parameter of every group.

    ``ZeroRedundancyOptimizer`` keeps the states of this rank's parameters in an optimizer of its own, ``optim``.

    Raises:
        StateError: a parameter is not in the model.

    """
    for optimizer in optimizers:
        inner = getattr(optimizer, "optim", None)
        keeper = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
        kept = {id(parameter) for group in keeper.param_groups for parameter in group["params"]}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = keeper.state if id(parameter) in kept else None
                fqn, *tied = names(parameter)
                yield Slot(fqn, parameter, group, state, tied)


def add_optimizers(leaves: Leaves, optimizers: Sequence[torch.optim.Optimizer], names: ParamNames) -> None:
    """Take the states and hyper-parameters that exist.

    Raises:
        StateError: a parameter is not in the model, or is in two optimizers.

    """
    hypers: dict[int, dict[str, Any]] = {}
    for slot in slots_of(optimizers, names):
        if id(slot.group) not in hypers:
            hypers[id(slot.group)] = slot.hyper
        for key, value in hypers[id(slot.group)].items():
            leaves.add(OPTIMIZER, f"param_groups.{slot.fqn}.{key}", value)
        for path, value in slot.leaves():
            leaves.add(OPTIMIZER, f"state.{slot.fqn}.{dotted(path)}", value)
