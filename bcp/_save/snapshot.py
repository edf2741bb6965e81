"""The snapshot of a save: from taking stock of the state until it may change again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import repeat
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim import Optimizer

from bcp._job import SaveJob
from bcp._save.held import Held, take_stock
from bcp._save.memory import staging_nbytes
from bcp._save.sample import Sample
from bcp._save.steady import Steady
from bcp.errors import InputError, StateError
from bcp.events import PhaseEvent, emit
from bcp.pipeline import Budget, in_thread
from bcp.plan.shards import KINDS, TensorTable
from bcp.planners.guard import check_not_loading, check_unchanged, versions
from bcp.planners.steps import StepHold, torch_optimizers
from bcp.protocols import LocalShards, ObjectKey
from bcp.stages.device import Fence, accelerators
from bcp.stages.gather import host_copies
from bcp.stages.items import WriteItem

__all__ = ["Snapshot", "rehearse"]

_CONSTANT = frozenset({bool, int, float, complex, str, bytes, type(None)})


class Snapshot:
    """Knows when the caller may go on, and keeps the state as it is until it is copied.

    An eager snapshot (paper sec. 4.2) lets the caller go on when everything is in host memory. A lazy one does so when
    stock is taken: parameters and optimizer states change in the optimizer's step only, so the next step is held back
    until they are copied. All else is copied before: buffers, which a forward pass may write to, parameters that none
    of the optimizers steps (frozen ones too: a codebook may learn in the forward pass), learning rates, and values.

    Attributes:
        seconds: from the call until the caller could go on.
        budget: the staging memory.
        devices: those that hold any of the tensors.
        fence: what copies from them wait for: what the caller had queued, and what was queued to take stock.
        pinned_nbytes: the most bytes of pinned memory that this process had meanwhile.
    """

    def __init__(self, job: SaveJob) -> None:
        """Begin with nothing held back."""
        self._job = job
        self._hold: StepHold | None = None
        self._check: Callable[[], None] = _nothing
        self.seconds = 0.0
        self.budget = Budget(1)
        self.devices: Sequence[int] = ()
        self.fence: Fence = {}
        self.pinned_nbytes = 0

    def __enter__(self) -> Self:
        """Do nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hold nothing back any more, however the save went."""
        self.release()

    def __repr__(self) -> str:
        """Show when the caller could go on."""
        return f"<Snapshot {self._job.options.snapshot}: {self.seconds:.3f} s, {self._hold}>"

    @property
    def step_wait_seconds(self) -> float:
        """How long optimizer steps have waited for a lazy snapshot."""
        return self._hold.waited_seconds if self._hold else 0.0

    def release(self) -> None:
        """Let optimizers step: everything is copied, or nothing more will be."""
        if self._hold is not None:
            self._hold.release()

    def take_stock(self) -> Held:
        """Find out what this rank holds; with a lazy snapshot, see to it that it stays so, and let the caller go on.

        Raises:
            StateError: a device has no memory for copies that have to be made there first.

        """
        try:
            held = self._taken_stock()
        except torch.OutOfMemoryError as error:
            raise StateError(
                f"rank {self._job.rank} has no device memory to make copies of what has no plain memory: {error}; free "
                "some (torch.cuda.empty_cache()), or pass contiguous tensors"
            ) from error
        if self._job.options.guard:
            check_not_loading(held.shards, self._job.rank)
            sample = Sample(held.shards, held.address)
            self._check = partial(_check, held.shards, versions(held.shards), sample, self._job.rank)
        if self._hold is not None:
            self._go_on()
        return held

    def _taken_stock(self) -> Held:
        held = take_stock(self._job)
        self.devices = accelerators(held.shards.tensors, held.address)
        self.fence = self._job.caller.fence(self.devices)
        if self._job.options.snapshot == "eager":
            return held
        with self._job.caller.streams_in_use():
            return self._hold_back(held)

    def lend(self, items: Sequence[WriteItem]) -> Budget:
        """Return the staging memory for parts: for all of them, where the caller waits for the copies."""
        nbytes = staging_nbytes(items, self._job.options, goes_on=self._job.goes_on)
        self.budget = Budget(max(nbytes, 1))
        self._lent = time.monotonic()
        return self.budget

    async def taken(self) -> None:
        """Take note that everything is copied.

        Raises:
            StateChangedError: something was written to meanwhile.

        """
        await in_thread(self._check)
        emit(PhaseEvent("snapshot", self._lent, time.monotonic()))
        if self._hold is None:
            self._go_on()
        else:
            self._hold.release()

    def _go_on(self) -> None:
        """Let the caller go on."""
        self.seconds = self._job.watch.seconds
        if self._job.goes_on:
            self._job.watch.blocking = self.seconds
        self._job.on_snapshot()

    def _hold_back(self, held: Held) -> Held:
        """Hold back what would change the shards, and copy what something else may change.

        To host memory: in the device's there may be no room for it twice.
        """
        optimizers, wrapped = _optimizers(self._job)
        self._hold = StepHold(optimizers)
        steady = Steady(self._job.states.get("model"), optimizers, wrapped=wrapped)
        shards, address = held.shards, held.address.copy()
        others, tensors = _not_states(shards.table.tensors), list(shards.tensors)
        rows = [at for at, row in enumerate(shards.table.tensor.tolist()) if row in others]
        now = [at for at in rows if tensors[at] not in steady]
        for at, copy in zip(now, host_copies([tensors[at] for at in now], self.fence), strict=True):
            tensors[at] = copy
            address[at] = copy.data_ptr() if address[at] else 0  # a copy's elements lie as those did
        kept = replace(shards, tensors=tensors, objects=_kept(shards.objects))
        return replace(held, shards=kept, address=address)


def rehearse(job: SaveJob) -> Held:
    """Find out what this rank holds, for a save to come; for lazy ones, notice from now on if a step is captured."""
    held = take_stock(job)
    if job.options.snapshot == "lazy":
        StepHold(_optimizers(job)[0]).release()
    return held


def _optimizers(job: SaveJob) -> tuple[list[Optimizer], bool]:
    """Return the optimizers whose steps are held back, and whether any was in a wrapper."""
    if "optimizer" not in job.states:
        raise InputError(
            "snapshot='lazy' holds back the optimizer's steps until everything is copied: pass "
            "states['optimizer'], or save with snapshot='eager'"
        )
    return torch_optimizers(job.states["optimizer"])


def _check(shards: LocalShards, before: list[int], sample: Sample, rank: int) -> None:
    """Compare with the state when stock was taken. Counted writes come first: that error says how many they are."""
    check_unchanged(shards, before, rank)
    sample.check(rank)


def _nothing() -> None:
    """Check nothing: the caller has said guard=False."""


def _not_states(tensors: TensorTable) -> set[int]:
    """Return which tensors are no states of an optimizer, which only its step changes; schedulers set rates."""
    models = (tensors.kind != KINDS.index("optimizer")).tolist()
    rates = map(str.startswith, tensors.fqn, repeat("param_groups."))
    return {row for row, (model, rate) in enumerate(zip(models, rates, strict=True)) if model or rate}


def _kept(values: Mapping[ObjectKey, Any]) -> Mapping[ObjectKey, Any]:
    """Copy what the caller may change of the values, each once: the parameters of a group have the same ones.

    What cannot be copied cannot be stored either, which is said, with its name, where that is done.
    """
    known = {id(value): value for value in values.values() if type(value) not in _CONSTANT}
    copies = {}
    for number, value in known.items():
        with suppress(Exception):
            copies[number] = deepcopy(value)
    if all(copy is known[number] for number, copy in copies.items()):  # as a rule: tuples of numbers
        return values
    return {key: copies.get(id(value), value) for key, value in values.items()}
