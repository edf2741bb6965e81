"""The ledger and the retention of a run: work of rank 0, beside training."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

from bcp._log import log
from bcp.errors import StorageError
from bcp.policies import Entry, KeepPolicy, doomed
from bcp.protocols import Unfinished
from bcp.runs.folder import Folder
from bcp.runs.ledger import Ledger
from bcp.runs.resuming import Candidates, Choice, Trust

__all__ = ["End", "Keeper", "reason_against"]

End = Literal["finished", "preempted", "failed"]

JUMP_SECONDS = 60.0
"""A host's clock that is further off was set: NTP slews smaller errors."""


class RunClock:
    """Unix seconds of one life of a job, which no change of the host's clock moves.

    Retention compares times of commits. If it followed a clock that is set forward, it would delete young checkpoints.
    """

    def __init__(self) -> None:
        self._start, self._steady = time.time(), _seconds_since_boot()
        self._complained = False

    def now(self) -> float:
        """Return the host's time at the start of the life, plus the seconds since; warn, once, if the host differs."""
        now = self._start + _seconds_since_boot() - self._steady
        ahead = time.time() - now
        if abs(ahead) > JUMP_SECONDS and not self._complained:
            self._complained = True
            log.warning(
                "the host's clock was set %s by %.0f s while the run was going on; the run counts its own seconds",
                "forward" if ahead > 0 else "back",
                abs(ahead),
            )
        return now

    def complain_of_future(self, newest: float) -> None:
        """Warn if the newest checkpoint was committed later than now, in Unix seconds."""
        if newest > self._start + JUMP_SECONDS:
            log.warning(
                "the newest checkpoint was committed %.0f s later than this host's time: the clock of one of the hosts "
                "is wrong. Policies of days keep checkpoints of the future",
                newest - self._start,
            )


def _seconds_since_boot() -> float:
    """Return seconds that go on while the machine is suspended, as those of ``time.monotonic()`` do not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Keeper:
    """Writes ``run.json`` and deletes checkpoints that the policy gives up. Exists on rank 0 only.

    Attributes:
        began: when this life of the job took the folder, in monotonic seconds.
    """

    def __init__(self, folder: Folder, keep: KeepPolicy) -> None:
        self._folder, self._keep = folder, keep
        self._distrusted: set[int] = set()
        self._unnoted: dict[int, tuple[float, Mapping[str, float]]] = {}
        self._complained = False
        self._clock = RunClock()
        self.began = time.monotonic()
        self._tidied = False

    @property
    def failures(self) -> int:
        """How many lives of the run have ended with a failure."""
        return 0 if self._folder.ledger is None else self._folder.ledger.failures

    @property
    def observed_hours(self) -> float:
        """Hours over which these failures were observed, up to now."""
        ledger = self._folder.ledger
        return 0.0 if ledger is None else ledger.observed(self.hours()).observed_hours

    async def candidates(self, run_id: str | None, trust: Trust) -> Candidates:
        """Take the folder for this life of the job, and return the checkpoints in it.

        Raises:
            RunTakenError: the folder belongs to another run.

        """
        ledger = await self._folder.take(run_id)
        self._clock = RunClock()
        self._clock.complain_of_future(max((entry.committed for entry in ledger.entries), default=0.0))
        self.began = time.monotonic()
        steps, others = [], []
        for entry in sorted(ledger.entries, key=lambda entry: -entry.step):
            reason = reason_against(entry, trust)
            if reason:
                others.append(Choice(entry.step, reason))
            else:
                steps.append(entry.step)
        known = {entry.step for entry in ledger.entries}
        uncommitted = [step for step in self._folder.listed.folders if step not in known]
        others += [Choice(step, "not committed, or partly deleted") for step in uncommitted]
        return Candidates(tuple(steps), tuple(others), ledger.owner)

    def distrust(self, steps: Iterable[int]) -> None:
        """Remember the checkpoints that the run was not resumed from, until they are saved again."""
        self._distrusted = set(steps)

    async def committed(self, step: int, metrics: Mapping[str, float], live: Collection[int]) -> None:
        """Enter a checkpoint into the ledger, then delete older ones that the policy gives up.

        Newer ones are left alone: the run may be saving one of these steps again. An entry that cannot be stored now is
        stored with the next one.

        The first one of a life also deletes the remains of killed writers of the ledger.

        Args:
            step: its step.
            metrics: its metrics, by name.
            live: the steps that this job is saving now; a held snapshot may be committed before an older save.

        Raises:
            RunTakenError: another job has taken the folder since.

        """
        now = self._clock.now()
        unfinished = None if self._tidied else await self._unfinished()
        self._unnoted[step] = (now, metrics)
        self._distrusted.discard(step)
        ledger = await self._note()
        self._complain_if_none(ledger, now)
        for old in doomed(ledger.entries, self._keep, now, self._distrusted):
            if old < step:
                await self._folder.remove(old)
        for old in await self._folder.leftovers(live):
            if old < step:
                log.info("remove the remains of step %d, which was never committed or is partly deleted", old)
                await self._folder.remove(old)
        if unfinished is not None:
            await self._folder.discard(unfinished)
            self._tidied = True

    async def doubt(self, step: int) -> None:
        """Take back the mark "verified" of a checkpoint that is about to be replaced: it was passed over.

        A job that is killed between the commit and the ledger leaves a new checkpoint with the old entry.
        """
        ledger = self._folder.ledger
        if ledger is not None and any(entry.step == step and entry.trust == "verified" for entry in ledger.entries):
            try:
                await self.change(lambda ledger: ledger.marked(step, "unknown"))
            except StorageError as error:  # the save goes on: other ranks have begun it
                log.warning("step %d, which is saved again, is still marked as verified", step, error=repr(error))

    async def _unfinished(self) -> Sequence[Unfinished] | None:
        """List interrupted writes of the ledger; None if storage fails: retention needs none of it."""
        try:
            return await self._folder.unfinished()
        except StorageError as error:
            log.warning("unfinished writes of the ledger were not listed", error=repr(error))
            return None

    async def _note(self, change: Callable[[Ledger], Ledger] = lambda ledger: ledger) -> Ledger:
        """Store the entries that are not stored yet, and a change."""
        unnoted = dict(self._unnoted)

        def note(ledger: Ledger) -> Ledger:
            for step, (committed, metrics) in unnoted.items():
                ledger = ledger.with_checkpoint(step, committed, metrics)
            return change(ledger.observed(self.hours()) if unnoted else ledger)

        ledger = await self._folder.change(note)
        for step in unnoted:
            self._unnoted.pop(step, None)
        return ledger

    def _complain_if_none(self, ledger: Ledger, now: float) -> None:
        """Warn, once, of a policy that keeps none of the checkpoints."""
        if self._complained or self._keep.kept(ledger.entries, now):
            return
        self._complained = True
        log.warning(
            "the policy %r keeps none of the checkpoints, so none is deleted; check its metric, steps or days",
            self._keep,
        )

    async def drop(self, step: int) -> None:
        """Delete the empty folders that a save has made which wrote nothing."""
        await self._folder.drop(step)

    async def change(self, change: Callable[[Ledger], Ledger]) -> None:
        """Change the ledger."""
        await self._note(change)

    async def close(self, end: End) -> None:
        """Record how this life of the job ended, so that the next one counts failures only; close the connections."""
        try:
            if self._folder.ledger is not None:
                await self._note(lambda ledger: ledger.observed(self.hours()).ended(end))
        finally:
            await self._folder.aclose()

    def hours(self) -> float:
        """Return the hours since this life took the folder."""
        return (time.monotonic() - self.began) / 3600


def reason_against(entry: Entry | None, trust: Trust) -> str:
    """Return why a checkpoint must not be tried, or "". A checkpoint without an entry was never marked."""
    if entry is not None and entry.trust == "suspect":
        return f"suspect: {entry.reason}" if entry.reason else "suspect"
    if trust == "verified" and (entry is None or entry.trust != "verified"):
        return "not verified"
    return ""
