"""Every module class of torch.nn, parametrizations and hooks, and modules of the packages of the extra ``sweep``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hooked_modules
import module_packages as packages
import torch
from coverage_table import NOT_TRIED, Key, Outcome, Section
from module_recipes import BY_HAND, NOT_RUN, classes_of, found
from module_trial import Recipe, tried
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Symmetric(nn.Module):
    """A parametrization of one's own with an inverse."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


def parametrized() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield layers under parametrizations, old and new, and pruned ones."""
    for name in ("orthogonal", "spectral_norm", "weight_norm"):
        yield f"parametrizations.{name}", lambda name=name: getattr(parametrizations, name)(nn.Linear(4, 4))
    for name in ("weight_norm", "spectral_norm"):
        yield f"{name}, old", lambda name=name: getattr(nn.utils, name)(nn.Linear(4, 4))
    yield "register_parametrization", _symmetric
    yield "remove_parametrizations", lambda: parametrize.remove_parametrizations(_symmetric(), "weight")
    methods: dict[str, dict[str, Any]] = {
        "identity": {},
        "random_unstructured": {"amount": 3},
        "l1_unstructured": {"amount": 3},
        "random_structured": {"amount": 1, "dim": 0},
        "ln_structured": {"amount": 1, "n": 2, "dim": 0},
    }
    for name, options in methods.items():
        yield (
            f"prune.{name}",
            lambda name=name, options=options: getattr(prune, name)(nn.Linear(4, 4), "weight", **options),
        )
    yield "prune.remove", lambda: prune.remove(prune.l1_unstructured(nn.Linear(4, 4), "weight", 3), "weight")


def _symmetric() -> Any:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def averaged() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield averages of models."""
    model: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # noqa: E731 -- used thrice
    yield "AveragedModel", lambda: _averaged(model())
    yield "AveragedModel, use_buffers", lambda: _averaged(model(), use_buffers=True)
    yield "AveragedModel, EMA", lambda: _averaged(model(), multi_avg_fn=get_ema_multi_avg_fn(0.9))


def _averaged(model: nn.Module, **options: Any) -> nn.Module:
    average = AveragedModel(model, **options)
    average.update_parameters(model)
    return average


def wrapped() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield modules that torch wraps or makes of others."""
    yield "torch.compile", lambda: torch.compile(nn.Linear(4, 4), backend="eager")  # type: ignore[return-value]  # a module
    yield "torch.fx.symbolic_trace", lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    yield "torch.jit.script", lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def _initialized(recipe: Recipe) -> nn.Module:
    module = recipe.make()
    recipe.call(module)
    return module


def _cases() -> dict[Key, Callable[[], Outcome]]:
    """Return the cases by group and name."""
    cases: dict[Key, Callable[[], Outcome]] = {}
    for name, kind in classes_of(nn):
        cases["torch.nn", name] = partial(_of_class, name, kind)
        if name.startswith("Lazy"):
            cases["torch.nn", f"{name}, initialized"] = partial(_of_lazy, kind)
    groups = {"parametrized and pruned": parametrized, "averages": averaged, "compiled and traced": wrapped}
    for group, pairs in groups.items():
        for name, make in pairs():
            cases[group, name] = partial(tried, Recipe(make))
    for kind in (*hooked_modules.TAKEN, *hooked_modules.REFUSED):
        cases["hooks and overrides (of the tests)", kind.__name__] = partial(tried, Recipe(kind, _call_hooked))
    for group, named in PACKAGES.items():
        for name, make_recipe in named():
            cases[group, name] = partial(_of_package, make_recipe)
    return cases


PACKAGES = {
    "torch.ao": packages.torch_ao,
    "bitsandbytes": packages.bitsandbytes,
    "torchao": packages.torchao,
    "transformers": packages.transformers,
    "peft": packages.peft,
    "torchmetrics": packages.torchmetrics,
}


def _call_hooked(module: nn.Module) -> Any:
    return module(torch.randn(2, 4)) if type(module).forward is not nn.Module.forward else ()


def _of_class(name: str, kind: Any) -> Outcome:
    """Try a class of torch.nn."""
    if name in NOT_RUN:
        return Outcome(NOT_TRIED, NOT_RUN[name])
    recipe = BY_HAND.get(name) or found(kind)
    assert recipe, f"no arguments and inputs were found for {name}; add it to BY_HAND"
    return tried(recipe)


def _of_lazy(kind: Any) -> Outcome:
    """Try a lazy class of torch.nn; both modules have seen an input."""
    recipe = found(kind)
    assert recipe, f"no arguments and inputs were found for {kind.__name__}"
    return tried(Recipe(partial(_initialized, recipe), recipe.call))


def _of_package(make: Callable[[], Recipe]) -> Outcome:
    return tried(make())


SECTION = Section(
    title="Modules",
    intro=(
        "Each module runs twice, trains if it has something to train, is saved, and loads into a module of the same\n"
        "class with other values. Both run twice more. Then outputs, `state_dict()`, all buffers and plain attributes\n"
        "are compared bit by bit, beside a control that torch's own strict `load_state_dict()` restored."
    ),
    column="module",
    cases=_cases(),
)
