"""One module is trained, saved, loaded into another one, and compared with torch's own way."""

from __future__ import annotations

import copy
import io
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from alike import exactly_alike
from coverage_table import AS_TORCH, EXACT, NOT_TRIED, REFUSED, Outcome
from optimizer_trial import CONTROL_FAILS, difference, in_order
from torch import nn
from torch.nn.parameter import is_lazy

import bcp
from bcp.state.nested import leaves_of

BEFORE, AFTER = 2, 2
"""Steps before the save, and after the load."""

_PLAIN = (bool, int, float, str, torch.Tensor)


@dataclass(frozen=True)
class Recipe:
    """How to make and call a module."""

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module], Any] = lambda module: module(torch.randn(2, 4))

    def made(self, seed: int) -> nn.Module:
        """Make one; other seeds make other values."""
        seeded(seed)
        return self.make()

    def run(self, module: nn.Module, first: int, steps: int) -> list[Any]:
        """Take some steps; step ``n`` sees the same data and random numbers in every module. Return the outputs."""
        outputs = []
        for number in range(first, first + steps):
            seeded(number)
            tensors = list(tensors_in(self.call(module)))
            outputs.append([tensor.detach().clone() for tensor in tensors])
            losses = [tensor.float().square().mean() for tensor in tensors if tensor.requires_grad]
            if losses:
                torch.stack(losses).sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.01 * parameter.grad)
                        parameter.grad = None
        return outputs


def seeded(number: int) -> None:
    """Seed everything that modules draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 -- for modules that use it


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's output, which may be nested."""
    yield from (tensor.dequantize() if tensor.is_quantized else tensor for tensor in leaves_of(value))


def image(module: nn.Module) -> Any:
    """Return all that is compared, as independent copies: entries, buffers, and plain attributes of every part."""
    attributes = {
        f"{path}:{name}": value.detach() if isinstance(value, torch.Tensor) else value
        for path, part in module.named_modules()
        for name, value in part.__dict__.items()
        if isinstance(value, _PLAIN) and not name.startswith("_")
    }
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    entries = {name: plain(value) for name, value in module.state_dict().items()}
    return in_order(copy.deepcopy((entries, {name: plain(tensor) for name, tensor in tensors.items()}, attributes)))


def plain(value: Any) -> Any:
    """Return quantized tensors as plain ones, at every depth, and a word for those without values."""
    if isinstance(value, torch.Tensor) and is_lazy(value):
        return "uninitialized"
    if isinstance(value, torch.Tensor):
        return (value.int_repr(), value.dequantize()) if value.is_quantized else value.detach()
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def tried(recipe: Recipe) -> Outcome:
    """Run the trial. Raises AssertionError if something was dropped silently."""
    try:
        source = recipe.made(1)
        recipe.run(source, 1, BEFORE)
    except Exception as error:  # noqa: BLE001 -- other libraries' own errors
        return Outcome(NOT_TRIED, f"{type(error).__name__}: {str(error)[:200]}")
    with tempfile.TemporaryDirectory() as folder:
        return _tried(recipe, source, Path(folder) / "ckpt")


def _tried(recipe: Recipe, source: nn.Module, path: Path) -> Outcome:
    try:
        bcp.save(path, {"model": source})
    except bcp.BcpError as error:
        if [*path.rglob("*.safetensors")]:
            raise AssertionError("the save was refused after bytes were written") from error
        return Outcome(REFUSED, f"at the save: {error}")
    trial, control = recipe.made(2), recipe.made(2)
    before = image(trial)
    control_state, complaint = _controlled(source, control)
    try:
        bcp.load(path, {"model": trial})
    except bcp.BcpError as error:
        if not exactly_alike(before, image(trial)):
            raise AssertionError("the load was refused after something was written") from error
        return Outcome(REFUSED, f"at the load: {error}{f' ({complaint})' if complaint else ''}")
    return _compared(recipe, source, trial, control_state, complaint)


def _controlled(source: nn.Module, control: nn.Module) -> tuple[nn.Module | None, str]:
    """Return a module that took the state by torch's own way, or the reason why that failed."""
    try:
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        control.load_state_dict(torch.load(file, weights_only=False))
    except Exception as error:  # noqa: BLE001 -- other libraries' own errors
        return None, f"{CONTROL_FAILS}: {type(error).__name__}"
    return control, ""


def _compared(
    recipe: Recipe, source: nn.Module, trial: nn.Module, control: nn.Module | None, complaint: str
) -> Outcome:
    """Compare right after the load and after further steps."""
    modules = [module for module in (source, trial, control) if module is not None]
    loaded = [image(module) for module in modules]
    outputs = [recipe.run(module, BEFORE + 1, AFTER) for module in modules]
    after = [(image(module), output) for module, output in zip(modules, outputs, strict=True)]
    if exactly_alike(after[1], after[0]):
        assert control is None or exactly_alike(loaded[1], loaded[2]), difference(loaded[1], loaded[2])
        return Outcome(EXACT, f"{complaint}; bcp does" if complaint else "")
    assert control is not None, f"{complaint}; bcp's differs: {difference(after[1], after[0])}"
    assert exactly_alike(loaded[1], loaded[2]), f"after the load: {difference(loaded[1], loaded[2])}"
    assert exactly_alike(after[1], after[2]), f"after further steps: {difference(after[1], after[2])}"
    return Outcome(AS_TORCH, f"{CONTROL_FAILS}: {_place(difference(after[2], after[0]))} differs")


def _place(text: str) -> str:
    """Return the name in the first words of a difference, without the values."""
    return text.partition(": ")[0].rpartition("/")[2].lstrip(":")
