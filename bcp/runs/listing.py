"""The checkpoints of a run as a list: steps, times, sizes, marks, and folders without a commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from bcp.backends.objects.retry import in_turns
from bcp.errors import CorruptError, InputError
from bcp.policies.keep import Entry
from bcp.runs.folder import Folder

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
        cold_nbytes: bytes of those of its files that lie in a cold place, after :func:`bcp.cool`.
        metrics: numbers that the run has noted for the step.
        trust: ``"unknown"``, ``"verified"`` or ``"suspect"``.
        reason: of the mark, against a folder that cannot be a checkpoint, or against a cold place that is not there.
        pinned: whether no policy may delete it.
        refers: steps whose checkpoints have some of its blocks (``Run(since="auto")``).
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
    cold_nbytes: int = 0
    refers: tuple[int, ...] = ()


async def list_steps(folder: Folder, place: str) -> list[StepInfo]:
    """List the checkpoints of a run, the oldest first; see :meth:`bcp.Run.list`. Nothing is written.

    Args:
        folder: of the run.
        place: its path, for the paths of checkpoints.

    Raises:
        FormatVersionError: a newer bcp has written the ledger.
        StorageError: storage failed.

    """
    await folder.steps()
    ledger = await folder.peek()
    entries = {} if ledger is None else {entry.step: entry for entry in ledger.entries}
    names = [(step, name) for step in folder.listed.folders for name in folder.names_of(step)]
    infos = await in_turns(partial(_look, folder, step, name, f"{place}/{name}") for step, name in names)
    marked: set[int] = set()
    steps = []
    for info in infos:
        is_first = info.is_committed and info.step not in marked  # marks are of the first folder
        steps.append(_marked(info, entries[info.step]) if is_first and info.step in entries else info)
        marked |= {info.step} if is_first else set()
    return steps[::-1]


async def _look(folder: Folder, step: int, name: str, path: str) -> StepInfo:
    """Ask storage about a folder. A link out of the run is no checkpoint of it, and says so."""
    try:
        is_committed = bool(await folder.commit_of(name))
        nbytes, cold_nbytes, complaint = await folder.nbytes_of(name)
        return StepInfo(step, path, is_committed, None, nbytes, reason=complaint, cold_nbytes=cold_nbytes)
    except (InputError, CorruptError) as error:
        return StepInfo(step, path, is_committed=False, committed=None, nbytes=0, reason=str(error))


def _marked(info: StepInfo, entry: Entry) -> StepInfo:
    """Return what the ledger adds."""
    return replace(
        info,
        committed=datetime.fromtimestamp(entry.committed, UTC),
        metrics=entry.metrics,
        trust=entry.trust,
        reason="; ".join(filter(None, [entry.reason, info.reason])),
        pinned=entry.pinned,
        refers=entry.refers,
    )
