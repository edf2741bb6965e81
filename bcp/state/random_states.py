"""The random states of a process: read before anything else in a save, set after everything else in a load."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bcp.protocols import Stateful

__all__ = ["AddedRngState", "RngState", "asks_for_nothing", "set_tracked", "tracked", "undisturbed"]

_TRACKERS = {
    "megatron": "megatron.core.tensor_parallel.random",
    "deepspeed": "deepspeed.runtime.activation_checkpointing.checkpointing",
}
"""Modules with a ``get_cuda_rng_tracker()``."""


class RngState:
    """The random states of this process: Python's, numpy's, torch's CPU, accelerators, and trackers of frameworks.

    It may stand anywhere in ``extra_states`` or ``dataloader``. A save reads the random states before it calls any
    ``state_dict()``, and sets them again after the last one. So a save changes no random number of the training. A load
    sets them after all tensors, values and other owners of a state.

    Accelerators count if this process has used them. A load leaves out those that the process does not have. Trackers
    are those of Megatron-LM and DeepSpeed, which name states of a device for parts of a model; they count if the
    process has imported them.

    Each rank gets its own states. With more ranks than were saved, the others get *derived* streams: every generator
    is seeded from the state of the rank that they load instead, and from their own rank. No two ranks draw the same
    numbers, and loading again draws the same ones again. Derived ranks keep the trackers that their framework has
    seeded, which belong to the new layout.

    Example::

        extra = {"step": 0, "scheduler": scheduler, "rng": bcp.RngState()}
        bcp.save(path, {"model": model, "extra_states": extra})
        bcp.load(path, {"model": model, "extra_states": extra})  # torch.rand() now continues as after the save

    """

    def __repr__(self) -> str:
        return "RngState()"

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
        return states | {name: tracked(tracker) for name, tracker in _trackers()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all states, but for accelerators and trackers that are not here."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002 -- as above
        torch.set_rng_state(state["torch"])
        for device, module in _accelerators():
            for number, generator_state in enumerate(state.get(device, ())[: module.device_count()]):
                module.set_rng_state(generator_state, number)
        for name, tracker in _trackers():
            if name in state:
                set_tracked(tracker, state[name])

    def load_derived(self, state: Mapping[str, Any], rank: int) -> None:
        """Seed all generators from the state of another rank and the number of this one; leave trackers alone.

        Args:
            state: the result of :meth:`state_dict` on the other rank.
            rank: of this process.

        """
        base = _digest(state)
        random.seed(_seed(base, rank, "python"))
        seed = _seed(base, rank, "numpy")
        np.random.seed([seed >> 32, seed & 0xFFFFFFFF])  # noqa: NPY002 -- as above
        torch.default_generator.manual_seed(_seed(base, rank, "torch"))
        for device, module in _accelerators():
            for number, generator in enumerate(module.default_generators[: len(state.get(device, ()))]):
                generator.manual_seed(_seed(base, rank, f"{device}:{number}"))


class AddedRngState(RngState):
    """Random states that the caller did not ask for: a checkpoint without them loads, and leaves them as they are.

    Attributes:
        is_loaded: whether a load has set them.
    """

    def __init__(self) -> None:
        self.is_loaded = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set all states, and note it."""
        super().load_state_dict(state)
        self.is_loaded = True

    def load_derived(self, state: Mapping[str, Any], rank: int) -> None:
        """Seed all generators, and note it."""
        super().load_derived(state, rank)
        self.is_loaded = True


def asks_for_nothing(target: object) -> bool:
    """Return whether a mapping of extra states has only random states that a checkpoint need not have."""
    return isinstance(target, Mapping) and bool(target) and all(isinstance(v, AddedRngState) for v in target.values())


def _digest(state: Mapping[str, Any]) -> bytes:
    """Return a digest of the states that every process has."""
    bits = state["numpy"]["state"]
    values = [state["python"], *(np.asarray(bits[name]).tolist() for name in sorted(bits)), state["torch"].tolist()]
    return hashlib.sha256(repr(values).encode()).digest()


def _seed(base: bytes, rank: int, generator: str) -> int:
    return int.from_bytes(hashlib.sha256(base + f"{rank} {generator}".encode()).digest()[:8], "little") >> 1


def _trackers() -> Iterator[tuple[str, Any]]:
    """Yield name and tracker of the frameworks that this process has imported."""
    for name, module in _TRACKERS.items():
        if module in sys.modules:
            yield name, sys.modules[module].get_cuda_rng_tracker()


def tracked(tracker: Any) -> dict[str, torch.Tensor]:
    """Return the states of a framework's tracker; under CUDA graphs they are generators."""
    items = tracker.get_states().items()
    return {name: state.get_state() if isinstance(state, torch.Generator) else state for name, state in items}


def set_tracked(tracker: Any, saved: Mapping[str, torch.Tensor]) -> None:
    """Put tracked states back; generators are captured in graphs, and have to stay the same objects."""
    live = dict(tracker.get_states())
    for name, state in saved.items():
        if isinstance(live.get(name), torch.Generator):
            live[name].set_state(state)
        else:
            live[name] = state
    tracker.set_states(live)


def _accelerators() -> Iterator[tuple[str, Any]]:
    """Yield the type of the accelerators that are here, as in ``"cuda"``, and torch's module for it."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None and hasattr(module := torch.get_device_module(device), "get_rng_state_all"):
        yield device.type, module


@contextmanager
def undisturbed(*roots: Any) -> Iterator[Mapping[int, Any]]:
    """Read the state of every :class:`RngState` in some extra states, by id, and undo all that happens to it inside."""
    owners = {id(owner): owner for owner in _owners(roots)}
    states = {number: owner.state_dict() for number, owner in owners.items()}
    try:
        yield states
    finally:
        for number, owner in owners.items():
            owner.load_state_dict(states[number])


def _owners(roots: Iterable[Any]) -> Iterator[RngState]:
    """Find the owners of random states in containers, each of which is looked at once: it may contain itself."""
    seen: dict[int, Any] = {}
    waiting = [*roots]
    while waiting:
        value = waiting.pop()
        if isinstance(value, RngState):
            yield value
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen and not isinstance(value, Stateful):
            seen[id(value)] = value
            waiting += value.values() if isinstance(value, Mapping) else value
