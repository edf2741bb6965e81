"""torch.save and torch.load, which gives new tensors: they are copied into those that are there."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from benchmarks.speed.libraries import Library
from benchmarks.speed.state import State

__all__ = ["open_library"]


def open_library(state: State) -> Library:
    """Open it."""

    def save(path: Path) -> None:
        torch.save(state.tensors, path)

    def load(path: Path, *, mmap: bool) -> None:
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        for kind, named in state.tensors.items():
            for name, tensor in named.items():
                tensor.copy_(loaded[kind].pop(name))

    loads = {"load, copy": partial(load, mmap=False), "load(mmap=True), copy": partial(load, mmap=True)}
    return Library(saves={"save": save}, backgrounds={}, loads=loads)
