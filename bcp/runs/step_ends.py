"""The ends of a run's steps on one rank: whether the states are still those of the last one, and some as they were.

An error ends a step in its middle. Weights and optimizer are then those at the end of the step before, unless an
optimizer's step has begun. The forward pass has drawn random numbers and taken samples meanwhile. So these small states
are copied at each end of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import nn

from bcp.errors import InputError
from bcp.protocols import States
from bcp.state.guard import torch_optimizers, version
from bcp.state.objects import collect
from bcp.state.random_states import undisturbed
from bcp.state.units import opaque_states, sharded_states

__all__ = ["StepEnds"]


class StepEnds:
    """What is known of the last step that has ended.

    Attributes:
        step: its number; -1 before the first.
    """

    def __init__(self, states: Callable[[], States]) -> None:
        """Watch the states from now on.

        Args:
            states: returns those of the run, as they are now.

        Raises:
            InputError: begun steps of an optimizer cannot be noticed, or a dataloader is sharded.

        """
        self._states, self.step, self._begun = states, -1, 0
        self._noted: dict[str, Any] = {}
        self._tensors: list[tuple[str, torch.Tensor, int]] = []
        now = states()
        if names := sorted(sharded_states(now)):
            raise InputError(
                f"Tiers(survivors=True) does not go with the sharded dataloader {names[0]!r}: it has given out samples "
                "of a step that does not end, and a lost reader's place is nowhere else. Leave survivors=True out"
            )
        try:
            optimizers = torch_optimizers(now["optimizer"])[0] if "optimizer" in now else []
        except InputError as error:
            raise InputError(
                "Tiers(survivors=True) has to notice each optimizer step that begins, and cannot: pass optimizers of "
                f"torch in states['optimizer'], not captured in CUDA graphs. In the words of lazy snapshots: {error}"
            ) from error
        self._hooks = [each.register_step_pre_hook(self._begins) for each in optimizers]

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._tensors, self._noted = [], [], {}

    def ended(self, step: int) -> None:
        """Note that a step has ended, the first time that its number is told."""
        if step <= self.step:
            return
        now = self._states()
        opaque = opaque_states(now)
        with undisturbed(*opaque.values()) as random_states:
            self._noted = {kind: deepcopy(collect(value, kind, random_states)) for kind, value in opaque.items()}
        self._tensors = [(name, tensor, version(tensor)) for name, tensor in _tensors(now.get("model"), "")]
        self.step, self._begun = step, 0

    def trouble(self) -> str:
        """Say why the states are not those at the end of the step; empty if they are."""
        if self._begun:
            return (
                f"{self._begun} optimizer steps have begun since the run was told that step {self.step} has ended, so "
                "that the states are of no step"
            )
        for name, tensor, before in self._tensors:
            if (count := version(tensor) - before) > 0:
                return f"{name!r} of the model was written to {count} times since step {self.step} has ended"
        return ""

    def states(self) -> dict[str, Any]:
        """Return the states at the end of the step."""
        return {**self._states(), **self._noted}

    def _begins(self, *_: object) -> None:
        self._begun += 1


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Find the tensors of a model: parameters and buffers, local parts of sharded ones."""
    if isinstance(value, nn.Module):
        for inner, tensor in chain(value.named_parameters(prefix=name), value.named_buffers(prefix=name)):
            yield inner, _local(tensor)
    elif isinstance(value, torch.Tensor):
        yield name, _local(value)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _tensors(child, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, child in enumerate(value):
            yield from _tensors(child, f"{name}.{number}" if name else str(number))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, which counts the writes; any other tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
