"""The checkpoints of a run in the order in which they are tried: the one list of ``latest`` and of a resumption.

Any committed folder with the name of a step is a candidate, whoever wrote it. Newer ones come first. A whole checkpoint
whose deletion has begun comes last: its bytes may go soon, but it may be the only one that is left.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from bcp.errors import CorruptError, InputError, StorageError
from bcp.policies.keep import Entry
from bcp.runs.folder import Folder
from bcp.runs.ledger import Ledger

__all__ = ["UNCOMMITTED", "Candidate", "Goal", "Trust", "candidates"]

Trust = Literal["any", "verified"]

UNCOMMITTED = "not committed, or partly deleted"


@dataclass(frozen=True, slots=True)
class Goal:
    """What a resumption was asked for, as by :meth:`bcp.Run.resume`.

    Attributes:
        trust: which marks a checkpoint needs.
        step: the only step to try; None for all.
        fresh: no checkpoint is to be tried.
    """

    trust: Trust = "any"
    step: int | None = None
    fresh: bool = False

    def __str__(self) -> str:
        words = [] if self.trust == "any" else [f"trust={self.trust!r}"]
        words += [] if self.step is None else [f"step={self.step}"]
        return ", ".join([*words, "fresh=True"] if self.fresh else words)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder with the name of a step.

    Attributes:
        step: the step.
        name: of the folder.
        reason: why the checkpoint must not be tried; empty if it is to be tried.
        is_marked: whether a mark, or the lack of one, is the reason.
        is_certain: whether storage has just said that the checkpoint is committed.
    """

    step: int
    name: str
    reason: str = ""
    is_marked: bool = False
    is_certain: bool = False


async def candidates(folder: Folder, ledger: Ledger | None, trust: Trust) -> AsyncGenerator[Candidate, None]:
    """Yield all folders of the last listing in the order in which they are tried.

    Storage is asked only about folders that are no entries of the ledger. A checkpoint that cannot be asked about is
    yielded as one to try.

    Args:
        folder: of the run; its steps were listed.
        ledger: with the marks; None if there is none that can be read.
        trust: as for :func:`bcp.latest`.

    """
    ledger = None if ledger is None else await folder.renewed(ledger)
    entries = {} if ledger is None else {entry.step: entry for entry in ledger.entries}
    leaving = {} if ledger is None else {removal.step: removal for removal in ledger.removing}
    last: list[Candidate] = []
    for step in folder.listed.folders:
        entry, is_first = entries.get(step), True
        removal = leaving.get(step) if entry is None else None
        names = folder.names_of(step)
        for name in names:
            if entry is not None and len(names) == 1:
                yield _judged(step, name, entry, trust, is_first=True)
                continue
            try:
                version = await folder.commit_of(name)
            except (StorageError, InputError, CorruptError):  # a load may know more, and says why it does not
                yield _judged(step, name, entry, trust, is_first=is_first)
                continue
            if not version:
                yield Candidate(step, name, UNCOMMITTED)
            elif removal is not None and version == removal.version:
                last.append(_judged(step, name, removal.entry, trust, is_first=True, is_certain=True))
            else:
                yield _judged(step, name, entry, trust, is_first=is_first, is_certain=True)
                is_first = False
    for candidate in last:
        yield candidate


def _judged(
    step: int, name: str, entry: Entry | None, trust: Trust, *, is_first: bool, is_certain: bool = False
) -> Candidate:
    """Compare a checkpoint with its marks. A step's mark of trust is that of the first committed folder alone."""
    reason = ""
    if entry is not None and entry.trust == "suspect":
        reason = f"suspect: {entry.reason}" if entry.reason else "suspect"
    elif trust == "verified" and (entry is None or entry.trust != "verified" or not is_first):
        reason = "not verified"
    return Candidate(step, name, reason, is_marked=bool(reason), is_certain=is_certain)
