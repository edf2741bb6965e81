"""The checkpoints of a run as a list: steps, times, sizes, marks, and folders without a commit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from bcp.backends.objects.retry import in_turns
from bcp.errors import CorruptError, InputError, StorageError
from bcp.policies.keep import Entry
from bcp.runs.folder import Folder
from bcp.runs.latest import folder_of

__all__ = ["StepInfo", "list_steps"]


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One checkpoint of a run, or a folder that may become one, as :meth:`bcp.Run.list` returns it.

    Attributes:
        step: its step.
        path: for :func:`bcp.load` and :class:`bcp.Checkpoint`.
        is_committed: whether it can be loaded. If not, a save is under way, was interrupted, or is being deleted.
        committed: when it was committed, in UTC; None if it is not, or if the run's ledger does not know it.
        nbytes: bytes of all its files.
        metrics: numbers that the run has noted for the step.
        trust: ``"unknown"``, ``"verified"`` or ``"suspect"``.
        reason: of the mark.
        pinned: whether no policy may delete it.
    """

    step: int
    path: str
    is_committed: bool
    committed: datetime | None
    nbytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    trust: Literal["unknown", "verified", "suspect"] = "unknown"
    reason: str = ""
    pinned: bool = False


async def list_steps(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> list[StepInfo]:
    """List the checkpoints of a run, the oldest first; see :meth:`bcp.Run.list`. Nothing is written."""
    folder, place = folder_of(path, storage_options)
    try:
        await folder.steps()
        ledger = await folder.peek()
        entries = {} if ledger is None else {entry.step: entry for entry in ledger.entries}
        names = [(step, name) for step in folder.listed.folders for name in folder.names_of(step)]
        looks = await in_turns(partial(_look, folder, name) for _, name in names)
    finally:
        await folder.aclose()
    known: set[int] = set()
    steps = []
    for (step, name), (is_committed, nbytes) in zip(names, looks, strict=True):
        entry = entries.get(step) if is_committed and step not in known else None  # marks are of the first folder
        known |= {step} if is_committed else set()
        steps.append(_info(step, f"{place}/{name}", entry, nbytes, is_committed=is_committed))
    return steps[::-1]


async def _look(folder: Folder, name: str) -> tuple[bool, int]:
    """Return whether a folder has a checkpoint, and the bytes of its files. One that cannot be read has none."""
    try:
        return bool(await folder.commit_of(name)), await folder.nbytes_of(name)
    except (StorageError, InputError, CorruptError):
        return False, 0


def _info(step: int, path: str, entry: Entry | None, nbytes: int, *, is_committed: bool) -> StepInfo:
    if entry is None:
        return StepInfo(step, path, is_committed, None, nbytes)
    when = datetime.fromtimestamp(entry.committed, UTC)
    return StepInfo(
        step, path, is_committed, when, nbytes, entry.metrics, entry.trust, entry.reason, pinned=entry.pinned
    )
