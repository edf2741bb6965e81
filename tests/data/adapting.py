"""Saves and loads of adapters, as plain dicts stand for storage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any

from feeding import Checkpoint


def save(states: Sequence[Any]) -> Checkpoint:
    """What a save of all readers writes."""
    units: dict[str, Any] = {}
    for state in states:
        own = dict(state.unit_states())
        assert not units.keys() & own.keys()
        units |= own
    shared = [state.shared_state() for state in states]
    assert all(each == shared[0] for each in shared)
    return Checkpoint(shared[0], units)


def load(states: Sequence[Any], checkpoint: Checkpoint) -> None:
    """Let all readers load; each unit belongs to one."""
    taken: list[str] = []
    for state in states:
        wanted = state.wanted_units(checkpoint.shared, sorted(checkpoint.units))
        state.load_units(deepcopy(checkpoint.shared), {name: deepcopy(checkpoint.units[name]) for name in wanted})
        taken += wanted
    assert sorted(taken) == sorted(checkpoint.units)


def json_copy(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose state went through JSON: it is plain values."""
    return Checkpoint(json.loads(json.dumps(checkpoint.shared)), json.loads(json.dumps(checkpoint.units)))


def rounds(loaders: Sequence[Any], steps: int) -> list[Any]:
    """Return the samples that all readers read in some steps, in the order of the whole run."""
    return [sample for _ in range(steps) for loader in loaders if (sample := next(loader, None)) is not None]


def rest(loaders: Sequence[Any]) -> list[Any]:
    """Return the samples that all readers read until they end."""
    fed: list[Any] = []
    while new := rounds(loaders, 1):
        fed += new
    return fed


def chain(rng: Random, numbers: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Numbers of readers, and after how many steps each is followed: at a position that both divide, wherever it is."""
    readers = rng.choices(numbers, k=length)
    stages, position = [], 0
    for now, later in zip(readers, [*readers[1:], 1], strict=True):
        steps = rng.randint(0, 3)
        while (position + now * steps) % later:
            steps += 1
        position += now * steps
        stages.append((now, steps))
    return stages
