"""torchsnapshot, as it comes; superseded by DCP, says its README."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torchsnapshot import Snapshot

from benchmarks.speed.libraries import Library
from benchmarks.speed.state import State
from benchmarks.speed.train import Background

__all__ = ["open_library"]


@dataclass(frozen=True, slots=True)
class Live:
    """Tensors that are loaded in place, so that there is nothing left to do once they are."""

    tensors: dict[str, Tensor]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors themselves."""
        return self.tensors

    def load_state_dict(self, loaded: dict[str, Tensor]) -> None:
        """Do nothing: ``loaded`` are the same tensors."""


def open_library(state: State) -> Library:
    """Open it."""
    live = {kind: Live(named) for kind, named in state.tensors.items()}

    def save(path: Path) -> None:
        Snapshot.take(str(path), live)

    def background(path: Path) -> Background:
        return Background(Snapshot.async_take(str(path), live).wait)

    def load(path: Path) -> None:
        Snapshot(str(path)).restore(live)

    return Library(saves={"take": save}, backgrounds={"async_take": background}, loads={"restore": load})
