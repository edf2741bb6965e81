"""One optimizer class is trained, saved, loaded, and compared with torch's own way."""

from __future__ import annotations

import copy
import io
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from alike import exactly_alike
from coverage_table import AS_TORCH, EXACT, NOT_TRIED, REFUSED, Outcome
from torch import distributed as dist
from torch import nn

import bcp

BEFORE, AFTER = 3, 2
"""Steps before the save, and after the load."""

CONTROL_FAILS = "torch's own state dict does not restore it"


def net() -> nn.Module:
    """Return a model with matrices that are large enough for quantized states."""
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def plainly(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Take a step after the gradients are there."""
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def with_closure(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Take a step that calls for the gradients itself."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    closure()
    optimizer.step(closure)


def twice(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Take a step whose gradients can be derived again."""
    optimizer.zero_grad()
    loss().backward(create_graph=True)
    optimizer.step()
    optimizer.zero_grad()  # ends the cycle of gradients and parameters


def in_training(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Take a step of an optimizer that has modes, as modules do."""
    optimizer.train()
    plainly(optimizer, loss)


def in_training_with_closure(optimizer: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Do so with a closure."""
    if hasattr(optimizer, "train"):
        optimizer.train()
    with_closure(optimizer, loss)


Step = Callable[[Any, Callable[[], torch.Tensor]], None]


@dataclass(frozen=True)
class Recipe:
    """How to make and step an optimizer."""

    make: Callable[..., Any]  # a class that takes parameters, or what ``of`` needs
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    params: Callable[[nn.Module], Any] = lambda model: list(model.parameters())
    step: Step = plainly
    group: bool = False  # whether a process group of one rank has to be there
    of: Callable[[nn.Module], Any] | None = None  # makes the optimizer of a model, instead of the four above

    def optimizer(self, model: nn.Module) -> Any:
        """Make one for a model."""
        return self.of(model) if self.of else self.make(self.params(model), **self.options)


@dataclass
class Pair:
    """A model and its optimizer."""

    model: nn.Module
    optimizer: Any

    @classmethod
    def of(cls, recipe: Recipe) -> Pair:
        """Make one; all are alike."""
        _seed(0)
        model = net()
        return cls(model, recipe.optimizer(model))

    def train(self, recipe: Recipe, first: int, steps: int) -> None:
        """Take some steps; step ``n`` sees the same data and random numbers in every pair."""
        for number in range(first, first + steps):
            _seed(number)
            inputs, wanted = torch.randn(16, 8), torch.randn(16, 4)
            recipe.step(self.optimizer, lambda: (self.model(inputs) - wanted).square().mean())  # noqa: B023 -- called at once

    def image(self) -> Any:
        """Return all that is compared, as independent copies."""
        if hasattr(self.optimizer, "consolidate_state_dict"):
            self.optimizer.consolidate_state_dict()
        return in_order(copy.deepcopy((dict(self.model.state_dict()), self.optimizer.state_dict())))


def in_order(value: Any) -> Any:
    """Return a value with the keys of all its mappings in one order, which a checkpoint does not keep."""
    if isinstance(value, Mapping):
        return {key: in_order(value[key]) for key in sorted(value, key=repr)}
    if isinstance(value, bytes) and value.startswith(b"\x80\x04"):
        return repr(pickle.loads(value))  # noqa: S301 -- heavyball pickles a function, with other bytes for equal ones
    return type(value)(map(in_order, value)) if type(value) in (list, tuple) else value


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 -- for optimizers that use it


@contextmanager
def _grouped(*, wanted: bool) -> Iterator[None]:
    """Run with a process group of this process alone, if it is wanted."""
    if not wanted:
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def tried(recipe: Recipe) -> Outcome:
    """Run the trial. Raises AssertionError if something was dropped silently."""
    with _grouped(wanted=recipe.group), tempfile.TemporaryDirectory() as folder:
        return _tried(recipe, Path(folder) / "ckpt")


def _tried(recipe: Recipe, path: Path) -> Outcome:
    pair = Pair.of(recipe)
    pair.train(recipe, 1, BEFORE)
    trial = Pair.of(recipe)
    control, complaint = _controlled(recipe, pair)
    try:
        bcp.save(path, {"model": pair.model, "optimizer": pair.optimizer})
    except bcp.BcpError as error:
        if [*path.rglob("*.safetensors")]:
            raise AssertionError("the save was refused after bytes were written") from error
        return Outcome(REFUSED, str(error))
    try:
        bcp.load(path, {"model": trial.model, "optimizer": trial.optimizer})
    except bcp.BcpError as error:
        if not complaint:
            raise AssertionError(f"bcp saved what it cannot load, and torch's control loads it: {error}") from error
        return Outcome(AS_TORCH, f"{complaint}; bcp's load refuses: {error}")
    return _compared(recipe, pair, trial, control, complaint)


def _controlled(recipe: Recipe, pair: Pair) -> tuple[Pair | None, str]:
    """Return a pair that took the state by torch's own way, or the reason why that failed."""
    control = Pair.of(recipe)
    try:
        file = io.BytesIO()
        torch.save((pair.model.state_dict(), pair.optimizer.state_dict()), file)
        file.seek(0)
        model, optimizer = torch.load(file, weights_only=False)
        control.model.load_state_dict(model)
        control.optimizer.load_state_dict(optimizer)
    except Exception as error:  # noqa: BLE001 -- other libraries' own errors
        return None, f"{CONTROL_FAILS}: {type(error).__name__}"
    return control, ""


def _compared(recipe: Recipe, pair: Pair, trial: Pair, control: Pair | None, complaint: str) -> Outcome:
    """Compare right after the load and after further steps."""
    loaded = [(before := pair.image()), trial.image(), control and control.image()]
    pair.train(recipe, BEFORE + 1, AFTER)
    trial.train(recipe, BEFORE + 1, AFTER)
    if control is not None:
        try:
            control.train(recipe, BEFORE + 1, AFTER)
        except Exception as error:  # noqa: BLE001 -- other libraries' own errors
            control, complaint = None, f"{CONTROL_FAILS}: the next step raises {type(error).__name__}"
    last = [pair.image(), trial.image(), control and control.image()]
    exact = bool(control) and exactly_alike(last[0], last[2])
    if exact:
        assert exactly_alike(loaded[1], loaded[2]), f"after the load: {difference(loaded[1], loaded[2])}"
        assert exactly_alike(last[1], last[2]), f"after further steps: {difference(last[1], last[2])}"
        return Outcome(EXACT)
    complaint = complaint or CONTROL_FAILS
    if exactly_alike(last[1], last[0]):
        return Outcome(EXACT, f"{complaint}; bcp does")
    assert control is not None, f"{complaint}; bcp's differs: {difference(last[1], last[0])}"
    assert exactly_alike(last[1], last[2]), f"{complaint}; bcp's differs: {difference(last[1], last[2])}"
    assert before is not None
    return Outcome(AS_TORCH, complaint)


def difference(one: Any, other: Any, path: str = "") -> str:
    """Name the first place where two nested values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            return f"{path}: keys {list(one)[:20]} and {list(other)[:20]}"
        pairs = [(key, one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = [(index, *both) for index, both in enumerate(zip(one, other, strict=True))]
    else:
        return f"{path}: {str(one)[:200]} ({type(one).__name__}) and {str(other)[:200]} ({type(other).__name__})"
    for key, first, second in pairs:
        if not exactly_alike(first, second):
            return difference(first, second, f"{path}/{key}")
    return f"{path}: {type(one).__name__} and {type(other).__name__}"


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of two dimensions; the others stay as they are."""
    return [parameter for parameter in model.parameters() if parameter.dim() > 1]


def halves(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: matrices for Muon, all else for Adam."""
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [{"params": matrices(model), "use_muon": True}, {"params": others, "use_muon": False}]


def candidates(kind: Any) -> Iterator[Recipe]:
    """Yield the usual ways to make and step an optimizer of a class, the most usual first."""
    rate = {"lr": 1e-2}
    adam = torch.optim.AdamW
    yield Recipe(kind)
    yield Recipe(kind, {})
    yield Recipe(kind, {**rate, "momentum": 0.9})
    yield Recipe(kind, step=in_training)
    yield Recipe(kind, step=with_closure)
    yield Recipe(kind, {}, step=with_closure)
    yield Recipe(kind, step=in_training_with_closure)
    yield Recipe(kind, step=twice)
    yield Recipe(kind, params=matrices)
    for options in ({}, rate):
        yield Recipe(kind, options, params=halves)
        yield Recipe(kind, options, params=halves, group=True)
        yield Recipe(kind, options, params=matrices, group=True)
        yield Recipe(kind, options, params=lambda model: list(model.named_parameters()))
        yield Recipe(kind, options, params=lambda model: model)
        yield Recipe(kind, {**options, "base_optimizer": adam}, step=with_closure)
        yield Recipe(kind, options, params=lambda model: adam(model.parameters(), lr=1e-2))
        yield Recipe(kind, options, params=lambda model: adam(model.parameters(), lr=1e-2), step=in_training)
        yield Recipe(kind, options, params=lambda model: adam(model.parameters(), lr=1e-2), step=with_closure)
        yield Recipe(kind, {**options, "num_data": 16})
        yield Recipe(kind, {**options, "num_iterations": 100})


def chosen(kind: Any) -> tuple[Recipe | None, str]:
    """Return the first candidate that trains, or None and the reason why the first one did not."""
    reason = ""
    for recipe in candidates(kind):
        try:
            with _grouped(wanted=recipe.group):
                pair = Pair.of(recipe)
                pair.train(recipe, 1, BEFORE)
                copy.deepcopy(pair.optimizer.state_dict())
        except Exception as error:  # noqa: BLE001 -- other libraries' own errors
            reason = reason or f"{type(error).__name__}: {error}"
        else:
            return recipe, ""
    return None, reason


def tried_if_possible(kind: Any) -> Outcome:
    """Run the trial of a class by the first way that works."""
    recipe, reason = chosen(kind)
    return Outcome(NOT_TRIED, reason) if recipe is None else tried(recipe)
