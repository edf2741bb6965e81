"""States and hyper-parameters that belong to some optimizers only: entries of one class do not fit into another.

A new optimizer has no states yet, and does not say which ones it will have. Those of ``torch.optim`` are known here.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch

__all__ = ["fitting_hypers", "fitting_states"]

_ADAM = frozenset({"exp_avg", "exp_avg_sq"})

_STATES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "ASGD": (frozenset({"eta", "mu", "ax"}), frozenset()),
    "Adadelta": (frozenset({"square_avg", "acc_delta"}), frozenset()),
    "Adafactor": (frozenset(), frozenset({"row_var", "col_var", "variance"})),
    "Adagrad": (frozenset({"sum"}), frozenset()),
    "Adam": (_ADAM, frozenset({"max_exp_avg_sq"})),
    "AdamW": (_ADAM, frozenset({"max_exp_avg_sq"})),
    "Adamax": (frozenset({"exp_avg", "exp_inf"}), frozenset()),
    "Muon": (frozenset({"momentum_buffer"}), frozenset()),
    "NAdam": (_ADAM | {"mu_product"}, frozenset()),
    "RAdam": (_ADAM, frozenset()),
    "RMSprop": (frozenset({"square_avg"}), frozenset({"momentum_buffer", "grad_avg"})),
    "Rprop": (frozenset({"prev", "step_size"}), frozenset()),
    "SGD": (frozenset(), frozenset({"momentum_buffer"})),
    "SparseAdam": (_ADAM, frozenset()),
}
"""By class of ``torch.optim``: the states of each parameter after a step, and those that depend on hyper-parameters.

Step counts are not among them: many optimizers have one.
"""

_FUSED = frozenset({"DeepSpeedCPUAdam", "FusedAdam"})
"""Classes of Apex, Transformer Engine and DeepSpeed with the states of Adam."""

_ALONE = frozenset({"col_var", "momentum_buffer", "row_var"})
"""States that tell of an optimizer of torch without any other beside them."""

_TELLING = frozenset(
    {"alpha", "beta2_decay", "betas", "centered", "dampening", "eps", "etas", "lambd", "lr_decay", "momentum"}
    | {"history_size", "line_search_fn", "max_eval", "max_iter", "momentum_decay", "nesterov", "ns_coefficients"}
    | {"ns_steps", "rho", "step_sizes", "t0", "tolerance_change", "tolerance_grad"}
)
"""Hyper-parameters without which an optimizer is of another kind. Others come and go with frameworks and versions."""


def fitting_states(optimizer: type[Any] | None, keys: Sequence[str]) -> list[str]:
    """Return the saved states of a parameter that an optimizer of that class can have; all if the class is unknown.

    States that are not all those of a class of ``torch.optim`` are somebody's own, and fit. Of the others all fit, or
    none: a step with a part of the states that it needs would fail.
    """
    name, saved = _kind(optimizer), frozenset(keys)
    if name is None:
        return list(keys)
    always, sometimes = _STATES[name]
    known = saved & (always | sometimes | _ALONE)
    for needed, more in _STATES.values():
        known |= saved & (needed | more) if len(needed) > 1 and needed <= saved else frozenset()
    fits = known <= always | sometimes and (always <= known or not known)
    return [key for key in keys if fits or key not in known | {"step"}]


def fitting_hypers(group: Collection[str], keys: Sequence[str]) -> list[str]:
    """Return the saved hyper-parameters that fit a group with these keys; all if the group has none."""
    return [key for key in keys if key not in _TELLING or key in group or not group]


def _kind(optimizer: type[Any] | None) -> str | None:
    """Return the class of ``torch.optim`` whose step it takes; None for others."""
    if optimizer is None:
        return None
    if optimizer.__name__ in _FUSED:
        return "Adam"
    for base in optimizer.__mro__:
        own = getattr(torch.optim, base.__name__, None)
        if base is own and base.__name__ in _STATES:
            same = inspect.unwrap(optimizer.step) is inspect.unwrap(base.step)
            return base.__name__ if same else None
    return None
