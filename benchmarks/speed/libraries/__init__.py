"""The libraries that are compared: how each is told to save and to load the same state, in its own best way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.speed.state import State
from benchmarks.speed.train import Background

__all__ = [
    "BCP_ASYNC",
    "BCP_LAZY",
    "BCP_LOAD",
    "BCP_SAVE",
    "DCP_PROCESS",
    "LIBRARIES",
    "Facts",
    "Library",
    "Listed",
    "missing",
    "open_library",
]

BCP_SAVE, BCP_ASYNC, BCP_LAZY, BCP_LOAD = "save", "async", "async, lazy", "load"
DCP_PROCESS = "async, process"
"""Ways that goals name."""

Facts = Mapping[str, float]
"""What a library says about a save or a load, as its memory budget, besides what is measured."""


def _nothing() -> None:
    """Close nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One library, ready to save and load one state, each in one or more ways, by name.

    Attributes:
        saves: save to a path; return when the library calls it saved.
        backgrounds: begin to save to a path.
        loads: load from a path, into the tensors of the state.
        close: let go of everything.
    """

    saves: Mapping[str, Callable[[Path], Facts | None]]
    backgrounds: Mapping[str, Callable[[Path], Background]]
    loads: Mapping[str, Callable[[Path], Facts | None]]
    close: Callable[[], object] = _nothing


@dataclass(frozen=True, slots=True)
class Listed:
    """A library that may take part.

    Attributes:
        module: the one in this package that opens it.
        needs: what has to be installed.
        rounds: a share of all rounds, as large as figures of goals need.
        brief: its ways where there is no time for all of them; empty: all.
        note: why it may not be installed.
    """

    module: str
    needs: str
    rounds: float = 1.0
    brief: tuple[str, ...] = ()
    ranks: bool = False
    note: str = ""


LIBRARIES: dict[str, Listed] = {
    "bcp": Listed("bcp", "bcp"),
    "DCP": Listed("dcp", "torch", rounds=0.6, brief=("save, 2 threads", "async, thread, kept stager", "load")),
    "torch_checkpointing": Listed("torch_checkpointing", "torch_checkpointing", rounds=0.6),
    "torch.save": Listed("torch_save", "torch", rounds=0.4),
    "safetensors": Listed("safetensors", "safetensors", rounds=0.4),
    "torchsnapshot": Listed("torchsnapshot", "torchsnapshot", rounds=0.1),
    "bytecheckpoint": Listed("bytecheckpoint", "bytecheckpoint", rounds=0.1, note="; it asks for torch<=2.5.0"),
}


def missing(name: str) -> str:
    """Say why a library cannot take part; an empty string where it can."""
    listed = LIBRARIES[name]
    return "" if find_spec(listed.needs) else f"not installed{listed.note}"


def open_library(name: str, state: State) -> Library:
    """Open a library for a state; imports it."""
    opened: Library = import_module(f"{__name__}.{LIBRARIES[name].module}").open_library(state)
    return opened
