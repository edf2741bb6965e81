"""How modules are made and called: by trying small arguments, and by hand where that finds nothing."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from module_trial import Recipe, tensors_in
from torch import nn

ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    *((), (4,), (4, 4), (2, 4), (4, 4, 3), (1, 4), (4, 4, 4), ((4,),), (2,), (4, 2)),
    *((1, (2, 2)), ((4, 4), 2), (4, 2, 1, 8), (4, 4, [2], 1.0)),
)
"""Arguments that a class is tried with, in this order."""


def _inputs() -> Iterator[tuple[Callable[[], torch.Tensor], ...]]:
    shapes = [(2, 4), (2, 4, 6), (2, 4, 6, 6), (2, 4, 6, 6, 6), (2, 4, 4)]
    real = [partial(torch.randn, *shape) for shape in shapes]
    rows, numbers = partial(torch.randint, 0, 2, (2,)), partial(torch.randint, 0, 2, (2, 4))
    yield from ((one,) for one in real)
    yield (numbers,)
    yield from ((one, one) for one in real)
    yield (real[0], rows)
    yield (real[0], numbers)
    yield (real[0], real[0], lambda: rows() * 2 - 1)
    yield (real[0], real[0], real[0])
    yield (lambda: real[0]().sigmoid(), real[0])
    yield (lambda: torch.randn(2), lambda: torch.randn(2), lambda: rows() * 2 - 1)
    yield (lambda: real[0]().sigmoid(), lambda: numbers().float())
    yield (lambda: torch.randn(5, 2, 4).log_softmax(2), lambda: torch.ones(2, 3, dtype=torch.long))
    yield (real[2], lambda: torch.zeros(2, 4, 6, 6, dtype=torch.long))


INPUTS = tuple(_inputs())
"""Makers of the inputs that a module is tried with, in this order."""


def call_with(inputs: tuple[Callable[[], torch.Tensor], ...], module: nn.Module) -> Any:
    """Call a module with new inputs."""
    return module(*(make() for make in inputs))


def found(kind: Callable[..., nn.Module]) -> Recipe | None:
    """Find arguments of a class that make a module, and inputs that it takes; None if there are none."""
    for arguments, inputs in itertools.product(ARGUMENTS, INPUTS):
        torch.manual_seed(0)
        make = partial(kind, *arguments)
        try:
            if any(True for _ in tensors_in(call_with(inputs, make()))):
                return Recipe(make, partial(call_with, inputs))
        except Exception:  # noqa: BLE001, S112 -- the next ones are tried
            continue
    return None


def classes_of(module: ModuleType, base: type = nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the classes that a Python module exports."""
    for name, kind in sorted(vars(module).items()):
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base and not name.startswith("_"):
            yield name, kind


def pair(module: nn.Module) -> Any:
    """Call a module with two sequences."""
    return module(torch.randn(3, 2, 4), torch.randn(3, 2, 4))


def ctc(module: nn.Module) -> Any:
    """Call a loss of sequences."""
    lengths = torch.full((2,), 5), torch.full((2,), 3)
    return module(torch.randn(5, 2, 4).requires_grad_().log_softmax(2), torch.ones(2, 3, dtype=torch.long), *lengths)


def unpooled(dims: int, module: nn.Module) -> Any:
    """Call a module that undoes a pooling."""
    pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1](2, return_indices=True)
    return module(*pool(torch.randn(2, 4, *[6] * dims)))


def looked_up(name: str, module: Any) -> Any:
    """Add up the entries of a dict or list of parameters, or call the modules in it."""
    parts = module.values() if hasattr(module, "values") else module
    return [part(torch.randn(2, 4)) if name.startswith("Module") else part.sum() for part in parts]


BY_HAND: dict[str, Recipe] = {
    "AdaptiveLogSoftmaxWithLoss": Recipe(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2]), lambda module: module(torch.randn(2, 4), torch.tensor([1, 5]))
    ),
    "Bilinear": Recipe(lambda: nn.Bilinear(4, 4, 3), lambda module: module(torch.randn(2, 4), torch.randn(2, 4))),
    "CTCLoss": Recipe(nn.CTCLoss, ctc),
    "EmbeddingBag": Recipe(lambda: nn.EmbeddingBag(4, 4), lambda module: module(torch.randint(0, 4, (2, 4)))),
    "Fold": Recipe(lambda: nn.Fold((4, 4), (2, 2)), lambda module: module(torch.randn(2, 8, 9))),
    "GaussianNLLLoss": Recipe(
        nn.GaussianNLLLoss, lambda module: module(torch.randn(2, 4), torch.randn(2, 4), torch.ones(2, 4))
    ),
    "CosineEmbeddingLoss": Recipe(
        nn.CosineEmbeddingLoss, lambda module: module(torch.randn(2, 4), torch.randn(2, 4), torch.tensor([1, -1]))
    ),
    **{
        f"MaxUnpool{dims}d": Recipe(partial(getattr(nn, f"MaxUnpool{dims}d"), 2), partial(unpooled, dims))
        for dims in (1, 2, 3)
    },
    "ModuleDict": Recipe(lambda: nn.ModuleDict({"a": nn.Linear(4, 4)}), partial(looked_up, "ModuleDict")),
    "ModuleList": Recipe(lambda: nn.ModuleList([nn.Linear(4, 4)]), partial(looked_up, "ModuleList")),
    "MultiLabelMarginLoss": Recipe(
        nn.MultiLabelMarginLoss, lambda module: module(torch.randn(1, 4), torch.tensor([[3, 0, -1, 1]]))
    ),
    "MultiheadAttention": Recipe(
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True), lambda module: module(*[torch.randn(3, 2, 4)] * 3)
    ),
    "ParameterDict": Recipe(lambda: nn.ParameterDict({"a": torch.randn(4)}), partial(looked_up, "ParameterDict")),
    "ParameterList": Recipe(lambda: nn.ParameterList([torch.randn(4)]), partial(looked_up, "ParameterList")),
    "Sequential": Recipe(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
    "SyncBatchNorm": Recipe(lambda: nn.SyncBatchNorm(4).eval()),
    "Transformer": Recipe(lambda: nn.Transformer(4, 2, 1, 1, 8), pair),
    "TransformerDecoder": Recipe(lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 2), pair),
    "TransformerDecoderLayer": Recipe(lambda: nn.TransformerDecoderLayer(4, 2, 8), pair),
    "TransformerEncoder": Recipe(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2),
        lambda module: module(torch.randn(3, 2, 4)),
    ),
    "TransformerEncoderLayer": Recipe(
        lambda: nn.TransformerEncoderLayer(4, 2, 8), lambda module: module(torch.randn(3, 2, 4))
    ),
    "TripletMarginWithDistanceLoss": Recipe(
        nn.TripletMarginWithDistanceLoss, lambda module: module(*[torch.randn(2, 4) for _ in range(3)])
    ),
    "Unflatten": Recipe(lambda: nn.Unflatten(1, (2, 2))),
    "DataParallel": Recipe(lambda: nn.DataParallel(nn.Linear(4, 4))),
}
"""Classes of torch.nn for which no tried arguments will do."""

NOT_RUN = {
    "Container": "a name that torch kept, without a forward pass",
    "RNNBase": "the base of RNN, LSTM and GRU",
    "RNNCellBase": "the base of the cells",
}
"""Classes of torch.nn that cannot run, and why."""
