"""ByteCheckpoint's own release, synchronous with ``fast_saving`` or without; it gets the module and its optimizer."""

from __future__ import annotations

from pathlib import Path

import bytecheckpoint
from torch import distributed as dist

from benchmarks.speed.libraries import Library
from benchmarks.speed.state import State

__all__ = ["open_library"]


def open_library(state: State) -> Library:
    """Open it, in a gloo group of one rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    states = dict(state.states)
    optimizer = states["optimizer"]
    live = {parameter: dict(tensors) for parameter, tensors in optimizer.state.items()}

    def save(path: Path) -> None:
        bytecheckpoint.save(str(path), states, framework="ddp")

    def load(path: Path) -> None:
        bytecheckpoint.load(str(path), states, framework="ddp")
        optimizer.state.update(live)  # filled in place, then replaced by copies in the parameters' bf16

    return Library(saves={"save": save}, backgrounds={}, loads={"load": load})
