"""The random states of a process: read before anything else in a save, set after everything else in a load."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bcp.protocols import Stateful

__all__ = ["RNGState", "undisturbed"]


class RNGState:
    """The global random states of this process: Python's, numpy's, torch's CPU and accelerators.

    It may stand anywhere in ``extra_states`` or ``dataloader``. A save reads the random states before it calls any
    ``state_dict()``, and sets them again after the last one, so that saving changes no random number of the training. A
    load sets them after all tensors, values and other owners of a state.

    Accelerators count if this process has used them. A load leaves out those that the process does not have. Each rank
    gets its own states; with more ranks than were saved, several ranks get the same ones.

    Example::

        extra = {"step": 0, "scheduler": scheduler, "rng": bcp.RNGState()}
        bcp.save(path, {"model": model, "extra_states": extra})
        bcp.load(path, {"model": model, "extra_states": extra})  # torch.rand() now continues as after the save

    """

    def __repr__(self) -> str:
        """Show the class: an object has nothing of its own."""
        return "RNGState()"

    def state_dict(self) -> dict[str, Any]:
        """Return all states, as plain values."""
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 -- the global state is what users draw from
            "torch": torch.get_rng_state(),
        }
        for device, module in _accelerators():
            if module.is_initialized():
                states[device] = module.get_rng_state_all()
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all states, but for accelerators that are not here."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002 -- as above
        torch.set_rng_state(state["torch"])
        for device, module in _accelerators():
            for number, each in enumerate(state.get(device, ())[: module.device_count()]):
                module.set_rng_state(each, number)


def _accelerators() -> Iterator[tuple[str, Any]]:
    """Yield the type of the accelerators that are here, as in ``"cuda"``, and torch's module for it."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None and hasattr(module := torch.get_device_module(device), "get_rng_state_all"):
        yield device.type, module


@contextmanager
def undisturbed(*roots: Any) -> Iterator[Mapping[int, Any]]:
    """Read the state of every :class:`RNGState` in some extra states, by id, and undo all that happens to it inside."""
    found = {id(owner): owner for owner in _owners(roots)}
    states = {number: owner.state_dict() for number, owner in found.items()}
    try:
        yield states
    finally:
        for number, owner in found.items():
            owner.load_state_dict(states[number])


def _owners(roots: Iterable[Any]) -> Iterator[RNGState]:
    """Find the owners of random states in containers, each of which is looked at once: it may contain itself."""
    seen: dict[int, Any] = {}
    waiting = [*roots]
    while waiting:
        value = waiting.pop()
        if isinstance(value, RNGState):
            yield value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen and not isinstance(value, Stateful):
            seen[id(value)] = value
            waiting += value.values() if isinstance(value, Mapping) else value
