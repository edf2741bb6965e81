"""safetensors: one flat file; load_file gives new tensors, which are copied into those that are there."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.speed.libraries import Library
from benchmarks.speed.state import State

__all__ = ["open_library"]


def open_library(state: State) -> Library:
    """Open it."""
    flat = {f"{kind}.{name}": tensor for kind, named in state.tensors.items() for name, tensor in named.items()}

    def save(path: Path) -> None:
        save_file(flat, path)

    def load(path: Path) -> None:
        loaded = load_file(path)
        for name, tensor in flat.items():
            tensor.copy_(loaded.pop(name))

    return Library(saves={"save_file": save}, backgrounds={}, loads={"load_file, copy": load})
