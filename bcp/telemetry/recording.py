"""One save or load of all ranks as data: it is stored with a checkpoint, and reports are made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

__all__ = ["EVENTS", "FailureRecord", "RankRecord", "Recording"]

EVENTS = pa.schema(
    [
        ("rank", pa.int32()),
        ("kind", pa.string()),  # phase, budget, stage, request
        ("name", pa.string()),  # of the phase or stage; the verb of a request; empty for budget
        ("item", pa.string()),  # name of the part; a request's key; empty for a phase
        ("nbytes", pa.int64()),
        ("start", pa.float64()),  # seconds since Recording.time
        ("seconds", pa.float32()),
        ("waited", pa.float32()),  # seconds in the stage's queue; else 0
        ("attempt", pa.int32()),  # of a request; else 1
        ("status", pa.string()),  # ok, again, failed
        ("said", pa.string()),  # the error; else empty
    ]
)
"""Columns of :attr:`Recording.events`: a row for each phase, wait for the budget, stage of an item, and request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Figures and place of one rank.

    Attributes:
        rank: its number.
        host: name of its host.
        local_rank: its number on that host.
        coordinates: its place in the parallel topology, as in ``{"pp": 0, "dp": 3, "tp": 1}``; empty if unknown.
        started: ``time.time()`` at its call, in seconds.
        figures: the fields of its :class:`~bcp.events.SaveResult` or :class:`~bcp.events.LoadResult` that are numbers.
    """

    rank: int
    host: str
    local_rank: int
    coordinates: Mapping[str, int] = field(default_factory=dict)
    started: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """The end of a save or load that failed, as one rank saw it.

    Attributes:
        rank: the rank that tells.
        host: name of its host.
        guilty: the rank that is to blame; None if that is not known.
        time: ``time.time()`` of the end, in seconds.
        phase: the phase that failed.
        stage: the stage that failed; empty if none did.
        item: the item that it worked on.
        tensors: names of some tensors in that item.
        file: key of the object that storage could not read or write; empty if storage is not to blame.
        attempt: number of the last attempt of that request; 0 without one.
        errors: type and message of the error, of its cause, and so on.
        notes: the notes of these errors.
    """

    rank: int
    host: str
    time: float
    guilty: int | None = None
    phase: str = ""
    stage: str = ""
    item: str = ""
    tensors: Sequence[str] = ()
    file: str = ""
    attempt: int = 0
    errors: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One save or load.

    Attributes:
        kind: which of the two.
        path: where the checkpoint is.
        operation: id of the save; of the one that was loaded, for a load.
        step: the training step, if it is known.
        run: name of the run, if it has one.
        background: whether training went on meanwhile.
        version: bcp's.
        world_size: how many ranks took part.
        time: ``time.time()`` of the first rank's call, in seconds.
        ranks: the ranks whose records are here: all of them, unless it failed.
        events: all their events, with the columns of :data:`EVENTS`, in no order.
        dropped: how many more events there were.
        failures: how it failed; empty if it did not.
        probed: bytes a second that the storage was found to write or read, if it was probed; else None.
        more: further facts of the operation.
    """

    kind: Literal["save", "load"]
    path: str
    operation: str
    step: int | None
    run: str
    background: bool
    version: str
    world_size: int
    time: float
    ranks: Sequence[RankRecord]
    events: pa.Table
    dropped: int = 0
    failures: Sequence[FailureRecord] = ()
    probed: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
