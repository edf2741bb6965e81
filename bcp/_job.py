"""One call of the public API on one rank, as data; made in the caller's thread, at the moment of the call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from bcp.format.receipt import Receipt
from bcp.options import LoadOptions, SaveOptions
from bcp.protocols import Agreement, Backend, Planner, States, at_once_of
from bcp.runtime.device import Caller
from bcp.telemetry.watch import Watch

__all__ = ["Earlier", "Job", "LoadJob", "OnSnapshot", "Operation", "Permit", "SaveJob"]

OnSnapshot = Callable[[], None]
"""Called once the snapshot is safe, so that training may go on."""

Operation = AbstractAsyncContextManager[Agreement]
"""The place of one rank in the next operation of all ranks."""


def nobody_waits() -> None:
    """Be called when the snapshot is safe, though the caller waits for the end."""


class Permit(Protocol):
    """Says on rank 0 whether a save may go on, in a place that another job may have taken."""

    async def begin(self) -> None:
        """Be asked before any byte is written. An error ends the save on all ranks."""

    async def commit(self) -> None:
        """Be asked just before the commit. An error ends the save on all ranks, and its files go."""


class Earlier(Protocol):
    """The earlier checkpoints of a run, to which a save may refer.

    Attributes:
        receipt: what this rank has written in the newest of them; None if it is not in memory.
    """

    receipt: Receipt | None

    @property
    def compared(self) -> tuple[int, int]:
        """How many of this rank's blocks were equal in the last two saves, and how many were compared."""

    @property
    def is_new(self) -> Mapping[int, bool]:
        """For each file of this rank, by its kind, whether all of its blocks had changed in the last save."""

    async def base(self) -> str:
        """Return the folder of the newest checkpoint to refer to; "" for none. It is protected. On rank 0 only."""

    async def protects(self, steps: Collection[int]) -> bool:
        """Note that the save may refer to these steps; return whether all of them can be trusted. On rank 0 only."""

    async def gone(self, steps: Collection[int]) -> str:
        """Say which of the steps is not there any more; "" for none. On rank 0, before the commit and behind it."""

    async def folder(self, name: str) -> Backend:
        """Return storage over a folder of the run; it need not be closed."""

    def saved(self, receipt: Receipt, compared: tuple[int, int], is_new: Mapping[int, bool]) -> None:
        """Be told that a save of the run is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The common part of a save and a load.

    Attributes:
        path: what the caller said, made absolute; for messages.
        place: the same, and different for different backends of one type; means something in this process only.
        backend: storage under that path (and role).
        opened: closes the storage at the end, if it was opened for this call.
        states: the caller's states.
        planner: chooses who reads them.
        rank: this rank.
        world_size: how many ranks take part.
        operation: this rank's place in the next operation of all ranks.
        watch: follows it; started when the caller called.
        caller: where on this machine's accelerators the calling thread works.
        options: how to do it.
        beside: view of the backend that knows what is beside the path; None: the backend.
    """

    path: str
    place: str
    backend: Backend
    opened: AbstractAsyncContextManager[object]
    states: States
    planner: Callable[[], Planner]
    rank: int
    world_size: int
    operation: Operation
    watch: Watch
    caller: Caller
    options: SaveOptions | LoadOptions
    beside: Backend | None = None

    @property
    def io_workers(self) -> int:
        """How many parts or reads are under way at once."""
        return self.options.io_workers or at_once_of(self.backend)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob(Job):
    """One call of ``bcp.save`` on one rank.

    Attributes:
        options: how to save.
        on_snapshot: called once training may go on.
        returns_after_snapshot: whether anybody waits for that; else the caller waits for the end.
        permit: asked on rank 0 whether the save may go on; None: it may.
        metrics: numbers by name, which the commit carries; those of rank 0 count.
        folder: where the checkpoint lies among others of the same run, without a role.
        names: numbers of the ranks in the job, for messages, where some of its ranks save alone; None: as they count.
        steps: optimizers whose steps a lazy snapshot holds back, where they are no part of the states; else None.
        earlier: checkpoints to which the save may refer; None: it stores everything.
    """

    options: SaveOptions
    on_snapshot: OnSnapshot = nobody_waits
    returns_after_snapshot: bool = False
    permit: Permit | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    folder: str = ""
    names: Sequence[int] | None = None
    steps: object = None
    earlier: Earlier | None = None

    def telling(self, on_snapshot: OnSnapshot | None) -> SaveJob:
        """Return the job of a caller who goes on once ``on_snapshot`` was called; None: who waits for the end."""
        self.watch.background = on_snapshot is not None
        told = nobody_waits if on_snapshot is None else on_snapshot
        return replace(self, on_snapshot=told, returns_after_snapshot=on_snapshot is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob(Job):
    """One call of ``bcp.load`` on one rank.

    Attributes:
        options: how to load.
        exchange_device: where chunks are exchanged between ranks; None for host memory.
    """

    options: LoadOptions
    exchange_device: torch.device | None = None
