"""The snapshot of a save: from taking stock of the state until it may change again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch.optim import Optimizer

from bcp._job import SaveJob
from bcp._save.held import Held, take_stock
from bcp.errors import InputError
from bcp.pipeline import Budget
from bcp.plan.shards import KINDS
from bcp.planners.guard import check_unchanged, versions
from bcp.planners.steps import StepHold, torch_optimizers
from bcp.protocols import LocalShards
from bcp.stages.device import cuda_devices, on_side_stream

__all__ = ["Snapshot"]

PARTS_IN_FLIGHT = 8
"""Parts of staging memory for a save that nobody's training waits behind: enough for every stage to have work."""

_CONSTANT = (bool, int, float, complex, str, bytes, type(None))


class Snapshot:
    """Knows when the caller may go on, and keeps the state as it is until it is copied.

    An eager snapshot (paper sec. 4.2) lets the caller go on when everything is in host memory. A lazy one does so when
    stock is taken: parameters and optimizer states change in the optimizer's step only, so the next step is held back
    until they are copied. All else is copied before: buffers, which a forward pass may write to, parameters that none
    of the optimizers has, and values.

    Attributes:
        seconds: from the call until the caller could go on.
        budget: the staging memory.
    """

    def __init__(self, job: SaveJob) -> None:
        """Begin with nothing held back."""
        self._job = job
        self._hold: StepHold | None = None
        self._check: Callable[[], None] = _nothing
        self.seconds = 0.0
        self.budget = Budget(1)

    def __enter__(self) -> Self:
        """Do nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hold nothing back any more, however the save went."""
        if self._hold is not None:
            self._hold.release()

    def __repr__(self) -> str:
        """Show when the caller could go on."""
        return f"<Snapshot {self._job.options.snapshot}: {self.seconds:.3f} s, {self._hold}>"

    @property
    def step_wait_seconds(self) -> float:
        """How long optimizer steps have waited for a lazy snapshot."""
        return self._hold.waited_seconds if self._hold else 0.0

    def take_stock(self) -> Held:
        """Find out what this rank holds; with a lazy snapshot, see to it that it stays so, and let the caller go on."""
        held = take_stock(self._job)
        if self._job.options.snapshot == "lazy":
            held = replace(held, shards=self._hold_back(held.shards))
        if self._job.options.guard:
            self._check = partial(check_unchanged, held.shards, versions(held.shards), self._job.rank)
        if self._hold is not None:
            self._go_on()
        return held

    def lend(self, nbytes: int) -> Budget:
        """Return the staging memory for parts of that many bytes: for all, where the caller waits for the copies."""
        options = self._job.options
        enough = nbytes if self._job.goes_on else min(nbytes, PARTS_IN_FLIGHT * options.part_bytes)
        self.budget = Budget(max(options.budget_bytes or enough, 1))
        return self.budget

    def taken(self) -> None:
        """Take note that everything is copied.

        Raises:
            StateChangedError: something was written to meanwhile.

        """
        self._check()
        if self._hold is None:
            self._go_on()
        else:
            self._hold.release()

    def _go_on(self) -> None:
        """Let the caller go on."""
        self.seconds = self._job.clock.seconds
        self._job.on_snapshot()

    def _hold_back(self, shards: LocalShards) -> LocalShards:
        """Hold back what would change the shards, and copy what something else may change."""
        states = self._job.states
        if "optimizer" not in states:
            raise InputError(
                "snapshot='lazy' holds back the optimizer's steps until everything is copied: pass "
                "states['optimizer'], or save with snapshot='eager'"
            )
        optimizers, wrapped = torch_optimizers(states["optimizer"])
        self._hold = StepHold(optimizers)
        steady = _steady(states, optimizers, wrapped=wrapped)
        kinds = shards.table.tensors.kind[shards.table.tensor].tolist()
        later = [
            kind == KINDS.index("optimizer") or _memory(tensor) in steady
            for kind, tensor in zip(kinds, shards.tensors, strict=True)
        ]
        now = [tensor for tensor, wait in zip(shards.tensors, later, strict=True) if not wait]
        with on_side_stream(cuda_devices(now), self._job.fence):
            tensors = [t if wait else t.detach().clone() for t, wait in zip(shards.tensors, later, strict=True)]
        objects = {key: v if isinstance(v, _CONSTANT) else deepcopy(v) for key, v in shards.objects.items()}
        return replace(shards, tensors=tensors, objects=objects)


def _nothing() -> None:
    """Check nothing: the caller has said guard=False."""


def _steady(states: Mapping[str, object], optimizers: Sequence[Optimizer], *, wrapped: bool) -> set[int]:
    """Return the memory of parameters that nothing but a step of these optimizers changes."""
    steady = {_memory(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    for module in _modules(states.get("model")):
        for parameter in module.parameters():
            if wrapped or not parameter.requires_grad:  # wrappers step copies of their own and write them back then
                steady |= {_memory(parameter), _memory(getattr(parameter, "ds_tensor", parameter))}
    return steady


def _modules(given: object) -> Iterator[torch.nn.Module]:
    """Walk through the models that were passed."""
    if isinstance(given, torch.nn.Module):
        yield given
    elif isinstance(given, (Mapping, list, tuple)):
        for one in given.values() if isinstance(given, Mapping) else given:
            yield from _modules(one)


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of the memory behind a tensor, a DTensor's local one."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()
