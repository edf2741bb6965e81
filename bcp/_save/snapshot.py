"""The snapshot of a save, from taking stock of the state until it may change again, and its staging memory."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, repeat
from operator import ne
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch.optim import Optimizer

from bcp._job import SaveJob
from bcp._save.local_state import LocalState, collect_local_state
from bcp.errors import InputError, StateChangedError, StateError
from bcp.events import PhaseEvent, emit
from bcp.options import SaveOptions
from bcp.pipeline import Budget
from bcp.plan.columns import Ints, concat, matrix, spread
from bcp.plan.shards import KINDS, TensorTable
from bcp.protocols import LocalShards, ObjectKey
from bcp.runtime.device import Fence, accelerators
from bcp.runtime.process import cached_property
from bcp.runtime.threads import in_thread
from bcp.stages.gather import host_copies
from bcp.stages.items import WriteItem
from bcp.stages.memcpy import move, stretch
from bcp.state.guard import StepHold, check_not_loading, check_unchanged, torch_optimizers, versions

__all__ = [
    "BLOCK_BYTES",
    "PARTS_IN_FLIGHT",
    "MemorySample",
    "OptimizerOwnedMemory",
    "Snapshot",
    "first_sizes",
    "pinned_nbytes",
    "rehearse",
    "staging_nbytes",
]

PARTS_IN_FLIGHT = 8
"""Parts of staging memory for a save that nobody's training waits behind: enough for every stage to have work."""


def staging_nbytes(items: Sequence[WriteItem], options: SaveOptions, *, returns_after_snapshot: bool) -> int:
    """Return the bytes of parts that may be in staging memory at once.

    A budget with room for all the data has room for the files' headers too. If training goes on once all is copied
    (``returns_after_snapshot``), no copy may wait for memory.
    """
    nbytes = sum(item.nbytes for item in items)
    if options.budget_bytes is None:
        steady = sum(item.nbytes for item in items if item.is_steady)
        few = PARTS_IN_FLIGHT * options.part_bytes
        return nbytes - steady + min(steady, few) if returns_after_snapshot else min(nbytes, few)
    data = nbytes - sum(len(item.header) for item in items)
    return nbytes if options.budget_bytes >= data else options.budget_bytes


def first_sizes(items: Sequence[WriteItem], options: SaveOptions) -> list[int]:
    """Return the bytes of the parts that a save of these can have in staging memory at once, if training goes on."""
    sizes = [item.nbytes for item in items]
    budget = staging_nbytes(items, options, returns_after_snapshot=True)
    return [nbytes for nbytes, until in zip(sizes, accumulate(sizes), strict=True) if until <= budget]


_MOST_PINNED = 16 << 30
_HOST_PART = 4
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def pinned_nbytes(options: SaveOptions) -> int:
    """Return how many bytes of page-locked memory this process may have for saves.

    The default is 16 GiB, and at most a quarter of the host's memory for all ranks of the host together. Locked memory
    can be neither swapped nor given to the page cache, and eight ranks of 60 GB would lock 480 GB.
    """
    if options.pinned_bytes is not None:
        return options.pinned_bytes
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or torch.accelerator.device_count() or 1
    return min(_MOST_PINNED, _host_nbytes() // _HOST_PART // ranks)


@cache
def _host_nbytes() -> int:
    """Return how much memory this host has, or the container that this process is in."""
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such file, or "max"
        nbytes = min(nbytes, int(_CGROUP_LIMIT.read_text()))
    return nbytes


BLOCK_BYTES = 64
"""One block is a cache line; reading less of it costs as much."""

MOST_BLOCKS = 8192
"""Blocks of one sample, shared evenly by the tensors. Reading so many from 2 GiB takes 1.4 ms in one thread."""

FEWEST, MOST = 2, 64
"""Blocks of one tensor. 20,000 tensors of two blocks each take 5.6 ms."""

ELEMENTS = 8
"""Elements of a tensor that is not contiguous, in place of one block."""

SHOWN = 5  # names in an error message


class MemorySample:
    """Blocks of every tensor of a snapshot in host memory, as they were at one moment.

    Up to ``MOST`` blocks lie at equal distances between the first and the last byte of a tensor; a small tensor is
    sampled whole. A write to all elements of a tensor is seen, as that of an optimizer step. A write that misses every
    block is not seen, and neither is one that stores the bits that are there already.

    Device memory is not sampled: reading it would compete with training for the device.
    """

    def __init__(self, shards: LocalShards, address: Ints) -> None:
        """Read the sample; ``address``, int64[n]: first byte of each tensor that is contiguous host memory, else 0."""
        self._shards = shards
        few = min(max(MOST_BLOCKS // max(len(address), 1), FEWEST), MOST)
        pieces = [_blocks(address, shards.table.nbytes, few), _elements(shards.tensors, address, few * ELEMENTS)]
        self._row, self._block_address, self._nbytes = (concat(list(columns)) for columns in zip(*pieces, strict=True))
        self._rows = np.unique(self._row).tolist()
        known = zip(self._rows, address[self._rows].tolist(), strict=True)
        self._pointers = [pointer or shards.tensors[row].data_ptr() for row, pointer in known]
        self._begin = np.cumsum(self._nbytes) - self._nbytes
        self._data = self._read()

    def __repr__(self) -> str:
        return f"<MemorySample: {len(self._data)} bytes of {len(self._rows)} tensors>"

    def check(self, rank: int) -> None:
        """Read the same blocks again, and compare them.

        Raises StateChangedError, which names the first few tensors, if any has other bytes now, or other memory.
        """
        now = list(map(torch.Tensor.data_ptr, map(self._shards.tensors.__getitem__, self._rows)))
        if now != self._pointers:
            moved = [row for row, differs in zip(self._rows, map(ne, now, self._pointers), strict=True) if differs]
            raise StateChangedError(
                f"the memory of {self._names(moved)} was replaced on rank {rank} while its snapshot was being taken "
                "(moved to shared memory, or resized); do that before the save, or after the snapshot"
            )
        differs = np.flatnonzero(self._read() != self._data)
        if not len(differs):
            return
        pieces = np.searchsorted(self._begin, differs, side="right") - 1
        raise StateChangedError(
            f"{self._names(np.unique(self._row[pieces]).tolist())} changed on rank {rank} while its snapshot was being "
            "taken, by a write that torch does not count (through .data, numpy or a raw pointer); write after the "
            "snapshot: with snapshot='lazy' pass every optimizer in states['optimizer'], whose steps are then held "
            "back, or save with snapshot='eager'. guard=False takes the snapshot unchecked"
        )

    def _read(self) -> np.ndarray:
        data = np.empty(int(self._nbytes.sum()), np.uint8)
        move(data.ctypes.data + self._begin, self._block_address, self._nbytes)
        return data

    def _names(self, rows: Sequence[int]) -> str:
        metas = list(map(self._shards.table.meta, rows[:SHOWN]))
        more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        return ", ".join(f"{meta.kind} tensor {meta.fqn!r}" for meta in metas) + more


def _blocks(address: Ints, nbytes: Ints, few: int) -> tuple[Ints, Ints, Ints]:
    """Return row, address and length of the blocks of contiguous tensors."""
    rows = np.flatnonzero((address > 0) & (nbytes > 0))
    size = nbytes[rows]
    indices, number = spread(count := np.minimum(-(-size // BLOCK_BYTES), few))
    length = np.minimum(size, BLOCK_BYTES)
    offset = (size - length)[indices] * number // np.maximum(count - 1, 1)[indices]
    return rows[indices], address[rows][indices] + offset, length[indices]


def _elements(tensors: Sequence[torch.Tensor], address: Ints, few: int) -> tuple[Ints, Ints, Ints]:
    """Return row, address and length of single elements of all other tensors in host memory.

    Bytes between the elements may belong to others.
    """
    rows = np.array([row for row in np.flatnonzero(address == 0).tolist() if _in_host_memory(tensors[row])], np.int64)
    host_tensors = list(map(tensors.__getitem__, rows.tolist()))
    width = max((tensor.dim() for tensor in host_tensors), default=0)
    length, stride = (
        matrix([t.shape for t in host_tensors], width, 1),
        matrix([t.stride() for t in host_tensors], width, 0),
    )
    total, size = length.prod(axis=1), np.array([tensor.itemsize for tensor in host_tensors], np.int64)
    indices, number = spread(count := np.minimum(total, few))
    element, offset = (total - 1)[indices] * number // np.maximum(count - 1, 1)[indices], np.zeros_like(indices)
    for dim in reversed(range(width)):
        element, index = np.divmod(element, length[indices, dim])
        offset += index * stride[indices, dim]
    base = np.array([tensor.data_ptr() for tensor in host_tensors], np.int64)
    return rows[indices], base[indices] + offset * size[indices], size[indices]


def _in_host_memory(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.numel() > 0
    )


class OptimizerOwnedMemory:
    """Address ranges of parameters that only a step of some optimizers modifies.

    Frozen parameters are excluded: no step changes them, but a forward pass may. Wrappers (Megatron-LM's, DeepSpeed's)
    may let their optimizers step copies, and write all parameters of the model that need gradients from these. A
    wrapper is assumed to do so if its optimizer steps anything but whole parameters of the model, or nothing. ZeRO-3,
    for example, fills its groups in a step, and keeps the local memory in ``ds_tensor``.

    Address ranges are compared, not storages: another optimizer may step a part of a storage, as with FSDP1.
    """

    def __init__(self, model: object, optimizers: Sequence[Optimizer], *, wrapped: bool) -> None:
        stepped = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
        own = [stretch(p) for p in stepped if p.requires_grad or wrapped]  # masters of wrappers need no gradients
        parameters = list(_parameters(model)) if wrapped else []
        if wrapped and (not own or set(own) - {stretch(parameter) for parameter in parameters}):
            own += [stretch(part) for p in parameters if p.requires_grad for part in (p, getattr(p, "ds_tensor", p))]
        self._exactly = set(own)

    def __repr__(self) -> str:
        starts, stops = self._joined
        return f"<OptimizerOwnedMemory: {sum(stops) - sum(starts)} bytes in {len(starts)} stretches>"

    def __contains__(self, tensor: torch.Tensor) -> bool:
        address_range = start, stop = stretch(tensor)
        if address_range in self._exactly:  # as a rule; looking it up in order takes as long again as all of the rest
            return start < stop
        starts, stops = self._joined
        index = bisect_right(starts, start) - 1
        return index >= 0 and start < stop <= stops[index]

    @cached_property
    def _joined(self) -> tuple[list[int], list[int]]:
        """Starts and stops in order, of stretches that do not touch."""
        starts: list[int] = []
        stops: list[int] = []
        for start, stop in sorted(self._exactly):
            if stops and start <= stops[-1]:
                stops[-1] = max(stop, stops[-1])
            else:
                starts.append(start)
                stops.append(stop)
        return starts, stops


def _parameters(model: object) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of the modules that were passed."""
    if isinstance(model, torch.nn.Module):
        yield from model.parameters()
    elif isinstance(model, (Mapping, list, tuple)):
        for part in model.values() if isinstance(model, Mapping) else model:
            yield from _parameters(part)


_CONSTANT = frozenset({bool, int, float, complex, str, bytes, type(None)})


class Snapshot:
    """Knows when the caller may go on, and keeps the state as it is until it is copied.

    An eager snapshot (paper sec. 4.2) lets the caller go on when everything is in host memory. A lazy one does so when
    stock is taken: parameters and optimizer states change in the optimizer's step only, so the next step is held back
    until they are copied. All else is copied before: buffers, which a forward pass may write to, parameters that none
    of the optimizers steps (frozen ones too: a codebook may learn in the forward pass), learning rates, and values.
    """

    def __init__(self, job: SaveJob) -> None:
        self._job = job
        self._hold: StepHold | None = None
        self._check: Callable[[], None] = _nothing
        self.seconds = 0.0  # from the call until the caller could go on
        self.budget = Budget(1)  # the staging memory
        self.devices: Sequence[int] = ()  # indices of the devices that hold any of the tensors
        self.fence: Fence = {}  # the work that copies wait for: queued by the caller, or by the collection itself
        self.pinned_nbytes = 0  # the most bytes of pinned memory that this process had meanwhile
        self._lent = 0.0  # since when the copies are under way

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Snapshot {self._job.options.snapshot}: {self.seconds:.3f} s, {self._hold}>"

    @property
    def step_wait_seconds(self) -> float:
        """How long optimizer steps have waited for a lazy snapshot."""
        return self._hold.waited_seconds if self._hold else 0.0

    def release(self) -> None:
        """Let optimizers step: everything is copied, or nothing more will be."""
        if self._hold is not None:
            self._hold.release()

    def take_stock(self) -> LocalState:
        """Collect the local state. A lazy snapshot also blocks changes to it, and lets the caller go on.

        Raises StateError if a device has no memory for copies that have to be made there first.
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
            sample = MemorySample(held.shards, held.address)
            self._check = partial(_check, held.shards, versions(held.shards), sample, self._job.rank)
        if self._hold is not None:
            self._go_on()
        return held

    def _taken_stock(self) -> LocalState:
        held = collect_local_state(self._job)
        self.devices = accelerators(held.shards.tensors, held.address)
        self.fence = self._job.caller.fence(self.devices)
        if self._job.options.snapshot == "eager":
            return held
        with self._job.caller.streams_in_use():
            return self._hold_back(held)

    def lend(self, items: Sequence[WriteItem]) -> Budget:
        """Return the staging memory for parts: for all of them, where the caller waits for the copies."""
        nbytes = staging_nbytes(items, self._job.options, returns_after_snapshot=self._job.returns_after_snapshot)
        self.budget = Budget(max(nbytes, 1))
        self._lent = time.monotonic()
        return self.budget

    async def taken(self) -> None:
        """Take note that everything is copied, and let the caller go on.

        Raises StateChangedError if a tensor was written to meanwhile.
        """
        await self.copied()
        self.let_go_on()

    async def copied(self) -> None:
        """Take note that everything is copied, and let optimizers step.

        Raises StateChangedError if a tensor was written to meanwhile.
        """
        await in_thread(self._check)
        emit(PhaseEvent("snapshot", self._lent, time.monotonic()))
        self.release()

    def let_go_on(self) -> None:
        """Let the caller of an eager snapshot go on; that of a lazy one has done so."""
        if self._hold is None:
            self._go_on()

    def _go_on(self) -> None:
        """Let the caller go on."""
        self.seconds = self._job.watch.seconds
        if self._job.returns_after_snapshot:
            self._job.watch.blocking = self.seconds
        self._job.on_snapshot()

    def _hold_back(self, held: LocalState) -> LocalState:
        """Block optimizer steps, and copy every tensor that something else may modify.

        To host memory: in the device's there may be no room for it twice.
        """
        optimizers, wrapped = _optimizers(self._job)
        self._hold = StepHold(optimizers)
        steady = OptimizerOwnedMemory(self._job.states.get("model"), optimizers, wrapped=wrapped)
        shards, address = held.shards, held.address.copy()
        others, tensors = _not_states(shards.table.tensors), list(shards.tensors)
        rows = [row for row, tensor in enumerate(shards.table.tensor.tolist()) if tensor in others]
        now = [row for row in rows if tensors[row] not in steady]
        for row, copy in zip(now, host_copies([tensors[row] for row in now], self.fence), strict=True):
            tensors[row] = copy
            address[row] = copy.data_ptr() if address[row] else 0  # a copy's elements lie as those did
        kept = replace(shards, tensors=tensors, objects=_kept(shards.objects))
        return replace(held, shards=kept, address=address)


def rehearse(job: SaveJob) -> LocalState:
    """Collect the local state for a save to come. For lazy saves, notice captured steps from now on."""
    held = collect_local_state(job)
    if job.options.snapshot == "lazy":
        StepHold(_optimizers(job)[0]).release()
    return held


def _optimizers(job: SaveJob) -> tuple[list[Optimizer], bool]:
    """Return the optimizers whose steps are held back, and whether any was in a wrapper."""
    if job.steps is not None:
        return torch_optimizers(job.steps)
    if "optimizer" not in job.states:
        raise InputError(
            "snapshot='lazy' holds back the optimizer's steps until everything is copied: pass "
            "states['optimizer'], or save with snapshot='eager'"
        )
    return torch_optimizers(job.states["optimizer"])


def _check(shards: LocalShards, before: list[int], sample: MemorySample, rank: int) -> None:
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
    """Copy the values that the caller may change, each once: the parameters of a group have the same ones.

    A value that cannot be copied cannot be stored either; storing it raises an error with its name.
    """
    known = {id(value): value for value in values.values() if type(value) not in _CONSTANT}
    copies = {}
    for number, value in known.items():
        with suppress(Exception):
            copies[number] = deepcopy(value)
    if all(copy is known[number] for number, copy in copies.items()):  # as a rule: tuples of numbers
        return values
    return {key: copies.get(id(value), value) for key, value in values.items()}
