"""Saves and loads during which nothing may be told to other ranks by collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from layouts import coordinator_of
from watch import Seen, watched

import bcp

__all__ = ["load", "load_in_place", "save"]


def save(
    path: Path, states: Mapping[str, Any], ranks: int | None = None, options: bcp.SaveOptions | None = None
) -> Seen:
    """Save from the first ranks, or from all as users do; return what was seen meanwhile."""
    with watched() as seen:
        bcp.save(path, states, coordinator=_coordinator(ranks), options=options)
    assert not seen.collectives, seen
    return seen


def load(
    path: Path, states: Mapping[str, Any], ranks: int | None = None, options: bcp.LoadOptions | None = None
) -> Seen:
    """Load into the first ranks, or into all; return what was seen meanwhile."""
    with watched() as seen:
        bcp.load(path, states, coordinator=_coordinator(ranks), options=options)
    assert not seen.collectives, seen
    return seen


def load_in_place(
    path: Path,
    states: Mapping[str, Any],
    parameters: Iterable[torch.Tensor],
    ranks: int | None = None,
    options: bcp.LoadOptions | None = None,
) -> None:
    """Load, and check that the memory of those parameters stays where it is."""
    before = [(p, _memory(p)) for p in parameters]
    load(path, states, ranks, options)
    assert all(_memory(p) == at for p, at in before)


def _coordinator(ranks: int | None) -> Any:
    return None if ranks is None else coordinator_of(ranks)


def _memory(tensor: torch.Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()
