"""Every optimizer class of the packages of the extra ``sweep``, of torch.optim and torch.distributed.optim.

Classes are found by introspection. A class without a recipe in ``optimizer_recipes.py`` is made of parameters alone.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import optimizer_recipes as recipes
import optimizer_stand_ins as stand_ins
import torch
from coverage_table import NOT_TRIED, Key, Outcome, Section
from optimizer_trial import tried, tried_if_possible

PACKAGES = (
    ("torch.optim", "torch.optim"),
    ("torch.distributed.optim", "torch.distributed.optim"),
    ("adabelief-pytorch", "adabelief_pytorch"),
    ("adam-mini", "adam_mini"),
    ("adan-pytorch", "adan_pytorch"),
    ("apollo-torch", "apollo_torch"),
    ("bitsandbytes", "bitsandbytes.optim"),
    ("came-pytorch", "came_pytorch"),
    ("dadaptation", "dadaptation"),
    ("galore-torch", "galore_torch"),
    ("grokadamw", "grokadamw"),
    ("heavyball", "heavyball"),
    ("lion-pytorch", "lion_pytorch"),
    ("lomo-optim", "lomo_optim"),
    ("muon-optimizer", "muon"),
    ("prodigy-plus-schedule-free", "prodigyplus"),
    ("prodigyopt", "prodigyopt"),
    ("pytorch-optimizer", "pytorch_optimizer"),
    ("schedulefree", "schedulefree"),
    ("torch-optimi", "optimi"),
    ("torch-optimizer", "torch_optimizer"),
    ("torchao", "torchao.optim"),
    ("transformers", "transformers.optimization"),
)
"""(Name on PyPI, module with the classes)."""


def classes_of(module: str) -> Iterator[tuple[str, type[Any]]]:
    """Yield the optimizer classes that a module exports, of its own package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = vars(importlib.import_module(module))
    root = module.partition(".")[0]
    if root == "heavyball":
        importlib.import_module("heavyball.utils").compile_mode = None  # minutes of compilation for each class
    for name, kind in sorted(exported.items()):
        if not inspect.isclass(kind) or kind is torch.optim.Optimizer or kind.__module__.partition(".")[0] != root:
            continue
        if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
            continue
        if issubclass(kind, torch.optim.Optimizer) or all(
            hasattr(kind, method) for method in ("step", "zero_grad", "state_dict", "load_state_dict")
        ):
            yield name, kind


def _cases() -> dict[Key, Callable[[], Outcome]]:
    """Return the cases by package and class."""
    cases: dict[Key, Callable[[], Outcome]] = {}
    for package, module in PACKAGES:
        for name, kind in classes_of(module):
            key = (package, name)
            if reason := recipes.NOT_TRIED.get(key):
                cases[key] = partial(Outcome, NOT_TRIED, reason)
            elif recipe := recipes.RECIPES.get(key):
                cases[key] = partial(tried, recipe)
            else:
                cases[key] = partial(tried_if_possible, kind)
    for name, make in stand_ins.STAND_INS.items():
        cases["stand-ins of the tests", name] = partial(tried, make)
    return cases


SECTION = Section(
    title="Optimizers",
    intro=(
        "Each optimizer steps three times, is saved, and loads into a fresh one of the same class. Both step twice\n"
        "more. Then weights and `state_dict()` are compared bit by bit, beside a control that torch's own\n"
        "`state_dict()` and `load_state_dict()` restored. The stand-ins are small classes that keep state in unusual\n"
        "places."
    ),
    column="class",
    cases=_cases(),
)
