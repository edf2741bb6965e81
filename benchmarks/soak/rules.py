"""The retention of a run, judged at every change of its folder by one who sees nothing else.

A step is committed while its commit object is there. The rules follow from the contract: saves of every interval, one
at a time; a checkpoint is deleted only after newer ones are durable, in the background, commit object first.
"""

from __future__ import annotations

from bcp.format.metadata import LEDGER_KEY, METADATA_KEY
from bcp.runs.folder import step_of
from benchmarks.soak.watch import Change

__all__ = ["KEEP", "SAVE_EVERY", "Retention"]

SAVE_EVERY = 10
"""Steps of an interval."""

KEEP = 3
"""Checkpoints that the run keeps."""

SWEEP_SECONDS = 10.0
"""Most seconds from a commit to the end of its deletions, on a busy machine."""

_TEMPORARY = ".bcp-tmp"
_RECEIPTS = "receipts/0"


def _save_of(path: str) -> str:
    """Return the id of the save that wrote a file; its name for any other file."""
    return path.rpartition("-")[2].partition(".")[0]


class Retention:
    """Takes the changes of a run's folder, and notes each one that the contract forbids.

    - Commits come in order: each step of the policy once, none left out.
    - Only the oldest checkpoint may be deleted, and only while ``keep`` newer ones are committed.
    - A committed checkpoint loses no file before its commit object. Files of a killed save of the same step are not its
      own: names of files end in the id of their save, and the save that wrote the last receipt has committed.
    - Without a commit object there are only the next step, and steps older than all committed ones.
    - Seconds after a commit there are ``keep`` checkpoints, unless rank 0 has ended; a later commit makes up for it.

    Attributes:
        committed: steps whose commit object is there.
        newest: the newest of all times; 0 before the first.
        wrong: all that was forbidden, in words.
        most: the largest number of checkpoints at one moment.
        commits: how many there were.
        deletions: how many commit objects were deleted.
        others: names in the folder that are no checkpoints.
        slowest: most seconds from a commit to the end of its deletions.
    """

    def __init__(self, *, keep: int = KEEP, every: int = SAVE_EVERY) -> None:
        """Watch over an empty folder."""
        self._keep, self._every = keep, every
        self._folders: set[int] = set()
        self._saves: dict[int, str] = {}
        self.others: set[str] = set()
        self._sweeps: list[tuple[float, set[int]]] = []
        self.committed: set[int] = set()
        self.newest = 0
        self.wrong: list[str] = []
        self.most = self.commits = self.deletions = 0
        self.slowest = 0.0

    def see(self, change: Change, now: float) -> int | None:
        """Take a change at a monotonic time; return the step that it commits, if it commits one."""
        name, _, rest = change.path.partition("/")
        step = step_of(name)
        committed = None
        if step is None:
            self._see_other(change)
        elif not rest:
            self._see_folder(step, made=change.made)
        elif rest == METADATA_KEY:
            if change.made:
                self._commit(step, now)
                committed = step
            else:
                self._uncommit(step)
        elif change.made and rest.startswith(_RECEIPTS):
            self._saves[step] = _save_of(rest)
        elif not change.made and step in self.committed and _save_of(rest) == self._saves.get(step):
            self._note(f"{change.path} has gone, and step {step} is still committed")
        self.look(now)
        return committed

    def look(self, now: float) -> None:
        """Judge how long the deletions after the last commit take."""
        going_on = []
        for since, doomed in self._sweeps:
            left = sorted(doomed & self._folders)
            if not left:
                self.slowest = max(self.slowest, now - since)
            elif now - since > SWEEP_SECONDS:
                self._note(f"{left} are still there {now - since:.1f} s after a commit")
            else:
                going_on.append((since, doomed))
        self._sweeps = going_on

    def deleter_ended(self) -> None:
        """Wait no longer for deletions: the process that makes them has ended."""
        self._sweeps.clear()

    def run_ended(self, last_step: int) -> None:
        """Judge the last state: the newest ``keep`` checkpoints, and no other folder."""
        kept = set(range(last_step, 0, -self._every)[: self._keep])
        if self.committed != kept or self._folders != kept:
            state = f"{sorted(self.committed)} are committed and {sorted(self._folders)} are there"
            self._note(f"at the end {state}, not {sorted(kept)}")
        if self.others != {LEDGER_KEY}:
            self._note(f"at the end there are {sorted(self.others)} beside the checkpoints")

    def _see_other(self, change: Change) -> None:
        (self.others.add if change.made else self.others.discard)(change.path)
        if change.path not in (LEDGER_KEY, f"{LEDGER_KEY}.new") and not change.path.endswith(_TEMPORARY):
            self._note(f"{change.path} has {'come' if change.made else 'gone'}")

    def _see_folder(self, step: int, *, made: bool) -> None:
        if not made:
            self._folders.discard(step)
            if step in self.committed:
                self._note(f"the folder of the committed step {step} has gone")
            return
        self._folders.add(step)
        if step != self.newest + self._every:
            self._note(f"step {step} is being saved, and {self.newest} is the newest")

    def _commit(self, step: int, now: float) -> None:
        if step != self.newest + self._every:
            self._note(f"step {step} was committed after {self.newest}")
        self.commits += 1
        self.newest = max(self.newest, step)
        self.committed.add(step)
        self.most = max(self.most, len(self.committed))
        self._sweeps.append((now, self._folders - set(sorted(self.committed)[-self._keep :])))

    def _uncommit(self, step: int) -> None:
        self.deletions += 1
        self.committed.discard(step)
        newer = sum(other > step for other in self.committed)
        if newer < self._keep or newer < len(self.committed):
            self._note(f"step {step} was deleted, and {sorted(self.committed)} are left")

    def _note(self, words: str) -> None:
        self.wrong.append(words)
