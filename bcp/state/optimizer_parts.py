"""Optimizers inside of optimizers: wrappers (SAM, Lookahead) and containers are read through.

Each part that keeps states is found by the attributes of the part around it. Names come from the parameters alone, so a
wrapped optimizer has the names of a bare one. States that a wrapper keeps of the same parameters are those of an
``outer`` parameter: ``state.<fqn>.outer.<key>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["OUTER", "is_optimizer", "is_zero", "optimizers_in", "parts_of"]

OUTER = ".outer"
"""Added to the name of a parameter for the states of a wrapper, once for each wrapper inside of that one."""

_METHODS = ("step", "zero_grad", "state_dict", "load_state_dict")


def optimizers_in(value: object) -> list[Any] | None:
    """Return the optimizers of ``value``, which is one, or a list or mapping of nothing else; None for others."""
    parts: list[Any] = list(value.values()) if isinstance(value, Mapping) else [value]
    parts = list(value) if isinstance(value, (list, tuple)) else parts
    return parts if parts and all(map(is_optimizer, parts)) else None


def is_optimizer(value: object) -> bool:
    """Whether a value is a torch optimizer, or an object of another class that wraps some and acts as one."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    if isinstance(value, (nn.Module, Mapping, list, tuple, type)) or not all(
        callable(getattr(value, method, None)) for method in _METHODS
    ):
        return False
    return any(isinstance(part, torch.optim.Optimizer) for part in parts_of(value))


def is_zero(optimizer: object) -> bool:
    """Whether an optimizer is torch's ZeRO-1, whose ``state_dict()`` has to gather first."""
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__)


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizer and all those inside of it, from the inside outwards."""
    parts: list[Any] = []
    _add_parts(optimizer, parts, set())
    return parts


def _add_parts(optimizer: Any, parts: list[Any], seen: set[int]) -> None:
    if id(optimizer) in seen:
        return
    seen.add(id(optimizer))
    for inner in _inside(optimizer):
        _add_parts(inner, parts, seen)
    parts.append(optimizer)


def _inside(optimizer: object) -> Iterator[Any]:
    """Yield the optimizers among the attributes of one, also those in a list or dict."""
    if is_zero(optimizer):
        return
    for value in list(getattr(optimizer, "__dict__", {}).values()):
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif type(value) in (list, tuple):
            yield from (part for part in value if isinstance(part, torch.optim.Optimizer))
        elif isinstance(value, dict):
            yield from (part for part in value.values() if isinstance(part, torch.optim.Optimizer))
        elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and _acts_as_one(value):
            yield value


def _acts_as_one(value: object) -> bool:
    """Whether an attribute is a wrapper that is no torch optimizer itself."""
    return all(callable(getattr(type(value), method, None)) for method in _METHODS)
