"""The ledger and the retention of a run: work of rank 0, beside training."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from bcp._job import Permit
from bcp._log import log
from bcp.errors import (
    BcpError,
    CorruptError,
    FormatVersionError,
    InputError,
    NotACheckpointError,
    RunTakenError,
    StorageError,
    UncommittedError,
)
from bcp.policies.keep import Best, Entry, KeepPolicy, doomed
from bcp.protocols import Unfinished
from bcp.runs.candidates import UNCOMMITTED, Candidate, Goal, candidates
from bcp.runs.clock import RunClock
from bcp.runs.folder import Folder
from bcp.runs.ledger import Ledger, Saving
from bcp.runs.references import StoredReferences
from bcp.runs.resuming import Candidates, Choice, Resumed
from bcp.runs.roles import Roles, has_roles
from bcp.runs.uploads import Uploads

__all__ = ["End", "Keeper"]

End = Literal["finished", "preempted", "failed"]

SHOWN = 10
"""Steps in a message."""

ANY = Goal()
"""The newest checkpoint, whatever its trust."""


class Keeper:
    """Writes ``run.json`` and deletes checkpoints that the policy gives up. Exists on rank 0 only.

    Attributes:
        began: when this life of the job took the folder, in monotonic seconds.
        uploads: of agents, as storage shows them.
    """

    def __init__(self, folder: Folder, keep: KeepPolicy, roles: Roles | None = None) -> None:
        self._folder, self._keep, self._roles = folder, keep, roles
        self.uploads = Uploads(folder)
        self._distrusted: set[int] = set()
        self._there: set[int] = set()
        self._tried: set[int] = set()
        self._untouched: set[int] = set()
        self._left_behind: set[int] = set()
        self._staying: dict[int, tuple[str, str]] = {}
        self._went_back = ""
        self._about: dict[int, frozenset[str]] = {}
        self._own: set[int] = set()
        self._replaced: set[int] = set()
        self._unnoted: dict[int, tuple[float, Mapping[str, float]]] = {}
        self._refers: dict[int, tuple[int, ...]] = {}
        self._stored = StoredReferences(folder)
        self._complained = self._has_told = False
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

    async def candidates(
        self, run_id: str | None, goal: Goal = ANY, damaged: Mapping[str, str] | None = None
    ) -> Candidates:
        """Take the folder for this life of the job, and return the checkpoints to try.

        Args:
            run_id: as for :class:`bcp.Run`.
            goal: as for :meth:`bcp.Run.resume`.
            damaged: folders that this job has found damaged, with the reasons.

        Raises:
            RunTakenError: the folder belongs to another run.
            NotACheckpointError: there is no checkpoint of the goal's step; the folder was not taken.
            UncommittedError: that checkpoint was never committed, or is partly deleted.
            InputError: the marks are against that step, or roles meet in the folder and this run has none.
            CorruptError: of several roles, one has lost what the others go on from.

        """
        step = goal.step
        if step is not None and step not in await self._folder.steps():
            there = _steps_there(self._folder)
            raise NotACheckpointError(f"{self._folder.url} has no checkpoint of step {step}; {there}")
        if self._roles is not None:
            await self._roles.refuse(goal, self._folder)
        elif names := await self._folder.roles():
            raise InputError(has_roles(self._folder.url, names))
        ledger = await self._folder.take(run_id)
        self._clock = RunClock()
        self._clock.complain_of_future(max((entry.committed for entry in ledger.entries), default=0.0))
        self.began = time.monotonic()
        listing = [candidate async for candidate in candidates(self._folder, ledger, goal.trust)]
        self._there = {candidate.step for candidate in listing if candidate.reason != UNCOMMITTED}
        _tell_of_twins(listing)
        known = damaged or {}
        listing = [
            replace(each, reason=known[each.name], is_marked=False) if each.name in known else each for each in listing
        ]
        if step is not None:
            listing = _only(goal, step, listing)
        if goal.fresh:
            listing = [replace(each, reason=each.reason or _asked(goal)) for each in listing]
        if self._roles is not None:
            listing = await self._roles.agreed(goal, self._folder, listing)
        tried = [candidate for candidate in listing if not candidate.reason]
        others = [Choice(candidate.step, candidate.reason, candidate.name) for candidate in listing if candidate.reason]
        steps, names = [candidate.step for candidate in tried], [candidate.name for candidate in tried]
        self._tried = set(steps)
        return Candidates(tuple(steps), tuple(others), ledger.owner, tuple(names))

    async def look(self) -> None:
        """Ask storage for the list of checkpoints.

        Raises:
            StorageError: storage failed.

        """
        await self._folder.steps()

    async def resumed(self, resumed: Resumed, goal: Goal) -> None:
        """Remember how the run came back, until the checkpoints that it was not resumed from are saved again.

        A checkpoint whose deletion had begun stays: the run was resumed from it. If none of the checkpoints was
        trusted enough, none of them is deleted before a new one is verified. If the caller has asked for a step, or to
        begin anew, newer checkpoints are left behind with the next commit.

        Args:
            resumed: the outcome.
            goal: what the caller has asked for.

        """
        self._distrusted = {choice.step for choice in resumed.passed_over} - {resumed.step}
        if resumed.name:
            await self._folder.change(lambda ledger: ledger.staying(resumed.step, self._clock.now()))
        elif goal.trust == "verified" and not goal.fresh:
            self._untouched = self._there
        if goal.step is not None or goal.fresh:
            token = secrets.token_hex(4)
            await self._folder.change(lambda ledger: replace(ledger, branch=token))
        if goal.step is not None or goal.fresh or self._roles is not None:
            self._left_behind = {newer for newer in self._there if newer > resumed.step}
            self._went_back = f"the run went back to step {resumed.step}" if resumed.name else "the run began anew"

    async def distrust(self, error: CorruptError) -> None:
        """Mark the checkpoint that a role has tried as suspect, for it did not load: no role takes its step again."""

        def marked(ledger: Ledger) -> Ledger:
            for step in self._tried:
                ledger = ledger.marked(step, "suspect", f"it did not load: {error}")
            return ledger

        try:
            await self._note(marked)
        except (StorageError, InputError) as failure:
            error.add_note(f"Steps {sorted(self._tried)} could not be marked as suspect: {failure}")

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
        await self._add_references(step)
        self._unnoted[step] = (now, metrics)
        self._own.add(step)
        for steps in (self._distrusted, self._left_behind):
            steps.discard(step)
        ledger = await self._note(partial(self._after_commit, step))
        self._left_behind = set()
        if (entry := ledger.entry(step)) is not None:
            self._stored.note(step, entry.refers)
        self._complain_if_none(ledger, now)
        untouched = self._untouched_now(ledger)
        gone = await self._given_up(ledger, now)
        leaving = [old for old in gone if old < step and old not in untouched]
        if leaving:
            staying = {entry.step for entry in ledger.entries}.difference(leaving)
            needed = await self._stored.needed(leaving, staying)
            leaving = [old for old in leaving if old not in needed]
        await self._remove(reversed(leaving) if ledger.referred() else leaving)  # a step goes before those it refers to
        left = [old for old in await self._folder.leftovers(live) if old < step and old not in untouched]
        for old in left:
            log.info("remove the remains of step %d, which was never committed or is partly deleted", old)
        await self._remove(left)
        if unfinished is not None:
            await self._folder.discard(unfinished)
            self._tidied = True

    async def _given_up(self, ledger: Ledger, now: float) -> Collection[int]:
        """Return the steps that the policy gives up. Of several roles it sees whole steps only."""
        needed = {base for saving in ledger.saving for base in saving.refers}
        if self._roles is None:
            return doomed(ledger.entries, self._keep, now, self._distrusted, needed)
        try:
            whole = await self._roles.whole(ledger.entries, self._folder)
        except BcpError as error:
            log.warning("no checkpoint is deleted now, for another role's cannot be read: %s", error)
            return ()
        gone = {*whole.broken, *doomed(whole.entries, self._keep, now, self._distrusted | {*whole.doubted}, needed)}
        stays = {entry.step for entry in ledger.entries} - gone
        return sorted(gone - ledger.referred(stays))

    async def _remove(self, steps: Iterable[int]) -> None:
        """Delete checkpoints, but not behind the back of a link that stays.

        A checkpoint that cannot be deleted now is tried again at the next commit, and keeps no other.
        """
        leaving, check = list(steps), None if self._roles is None else self._roles.check
        try:
            led_to = await self._folder.led_to(leaving)
        except StorageError as error:
            log.warning("no checkpoint was deleted; the next commit tries it again: %s", error)
            return
        for step in leaving:
            if step in led_to:
                log.info("step %d is not deleted: the link of another step leads to it", step)
                continue
            try:
                await self._folder.remove(step, spare_pinned=True, check=check)
            except RunTakenError:
                raise
            except BcpError as error:
                log.warning("step %d was not deleted; the next commit tries it again: %s", step, error)

    def _untouched_now(self, ledger: Ledger) -> set[int]:
        """Return the steps from before that have to stay: all of them, until a checkpoint of this life is verified."""
        if any(entry.trust == "verified" and entry.step in self._own for entry in ledger.entries):
            self._untouched = set()
        return self._untouched

    def _after_commit(self, step: int, ledger: Ledger) -> Ledger:
        """Leave newer checkpoints behind, and forget older saves: they have failed, or were noted before."""
        failed = [saving.step for saving in ledger.saving if saving.step < step]
        return self._leave_behind(ledger.settled(failed) if failed else ledger)

    async def protects(self, step: int, refers: Collection[int]) -> bool:
        """Note that a save of a step may refer to other steps, so that they stay; return whether it may.

        It may not if one of them is suspect, or if its deletion has begun.

        Raises:
            RunTakenError: another job has taken the folder since.
            StorageError: storage failed.

        """
        wanted = tuple(sorted(refers))

        def noted(ledger: Ledger) -> Ledger:
            unfit = {entry.step for entry in ledger.entries if entry.trust == "suspect"} | self._distrusted
            unfit |= {removal.step for removal in ledger.removing}
            return ledger if unfit.intersection(wanted) else ledger.beginning(step, wanted)

        ledger = await self._note(noted)
        return Saving(step, wanted) in ledger.saving

    async def _add_references(self, step: int) -> None:
        """Add those of older folders of a step, which stay beside the one that was saved now."""
        entry = self._entry(step)
        if entry is None or not entry.refers:
            return
        try:
            await self._folder.steps()
            found = await self._folder.refers_of(step)
        except StorageError as error:
            log.warning("it is not known to which steps older folders refer", step=step, error=repr(error))
            found = None
        self._refers[step] = (*self._refers.get(step, ()), *entry.refers) if found is None else found

    def will_refer(self, step: int, refers: Collection[int]) -> None:
        """Be told to which steps a save refers that is about to be committed."""
        self._refers[step] = tuple(sorted(refers))

    def _leave_behind(self, ledger: Ledger) -> Ledger:
        """Mark checkpoints after the step that the caller went back to, so that a restart does not take them.

        A verified one is pinned besides: the mark protects it no more.
        """
        for entry in ledger.entries:
            if entry.step in self._left_behind and entry.trust != "suspect":
                if entry.trust == "verified":
                    ledger = ledger.pinned(entry.step)
                ledger = ledger.marked(entry.step, "suspect", self._went_back, sorted(self._about.get(entry.step, ())))
        return ledger

    async def has_to_stay(self, step: int, *, by_agents: bool) -> bool:
        """Say whether a save has to leave the step's checkpoint as it is, and write into a folder beside it.

        It has to if the checkpoint is pinned or verified, or if no policy may delete it. A pin of another job counts
        from the moment when it is stored.

        Args:
            step: the step.
            by_agents: the save is one by agents, which replace only what they can read.

        """
        with suppress(RunTakenError, FormatVersionError):  # the save raises it
            await self.check_owner()
            await self._tell_apart(step)
        ledger, entry = self._folder.ledger, self._entry(step)
        if by_agents and not await self.uploads.can_replace(step):
            self._staying[step] = "is damaged", "a newer step is committed"
            return True
        if ledger is None or entry is None or step in self._own:
            return False
        if entry.pinned or entry.trust == "verified":
            why = "is pinned" if entry.pinned else "is verified"
            self._staying[step] = why, f"run.pin({step}, pinned=False) was called"
        elif step in ledger.referred():
            self._staying[step] = "has blocks that later steps refer to", "these steps are deleted"
        elif step in self._untouched_now(ledger):
            self._staying[step] = "is from before", "a checkpoint of this life is verified"
        return step in self._staying

    async def _tell_apart(self, step: int) -> None:
        """Note which checkpoints of a step are suspect, before another one takes their place.

        Without this a new one, which the job had no time to note, would be passed over for the mark of an old one.
        """
        entry = self._entry(step)
        is_suspect = entry is not None and entry.trust == "suspect" and not entry.about
        if step in self._own or not (is_suspect or step in self._left_behind):
            return
        self._about[step] = about = await self._folder.operations_of(step) or frozenset()
        if entry is not None and is_suspect and about:
            marked = partial(_marked_about, step, about)
            try:
                await self.change(marked)
            except StorageError as error:  # the save goes on: other ranks have begun it
                log.warning("the mark of step %d, which is saved again, is about both", step, error=repr(error))

    def permit(self, step: int, name: str) -> Permit:
        """Return what a save of this step into this folder is asked for before its bytes, and before its commit."""
        return _Permit(self, step, name)

    async def begin(self, step: int, name: str) -> None:
        """Make way for a save. The run's folder is the run's: a checkpoint in the folder of the save is replaced.

        Raises:
            RunTakenError: another job has taken the folder since.
            StorageError: storage failed.

        """
        await self.check_owner()
        is_known = step in self._distrusted | self._own
        is_there = is_known or self.has(step)
        if await self._folder.unlink(name):
            is_there = True
            log.warning("the link %s was removed, for the run saves this step; its target stays", name)
        elif not is_known and await self._folder.commit_of(name):
            is_there = True
            log.warning("somebody else has saved step %d since the run was resumed; the run replaces it", step)
        if step in self._staying:
            self._tell_of_staying(step, name)
        (self._replaced.add if is_there else self._replaced.discard)(step)
        await self._doubt(step)

    async def replaced_by(self, step: int, name: str) -> str:
        """Make way for a save into memory, as :meth:`begin` does; return the operation that it replaces, "" for none.

        Raises:
            RunTakenError: another job has taken the folder since.
            StorageError: storage failed.

        """
        await self.begin(step, name)
        try:
            return (await self._folder.read_commit(name)).operation
        except FileNotFoundError:
            return ""

    async def listed_again(self, step: int) -> Sequence[str]:
        """List the folders of all steps once more: an agent may have committed meanwhile.

        Args:
            step: that the run has come back from.

        """
        await self._folder.steps()
        listed = self._folder.listed.folders
        if self._went_back:
            self._left_behind |= {newer for newer in listed if newer > step}
        return [name for each in listed for name in self._folder.names_of(each)]

    async def is_suspect(self, step: int, operation: str) -> bool:
        """Whether a save is marked as suspect: the mark of a step may be about another save of it."""
        entry = self._entry(step)
        if entry is None or entry.trust != "suspect":
            return False
        about = entry.about or await self._folder.operations_of(step)
        return about is None or operation in about

    async def best(self, policy: Best) -> str:
        """Return the name of the folder with the best checkpoint that is not suspect; "" if there is none.

        Marks that others have stored count.

        Raises:
            FormatVersionError: a newer bcp has written the ledger.
            StorageError: storage failed.

        """
        ledger = await self._folder.peek() or self._folder.ledger
        await self._folder.steps()
        entries: Sequence[Entry] = () if ledger is None else ledger.entries
        if self._roles is not None:
            whole = await self._roles.whole(entries, self._folder)
            entries = [entry for entry in whole.entries if entry.step not in whole.doubted]
        for step in policy.ranked([entry for entry in entries if entry.trust != "suspect"]):
            for name in self._folder.names_of(step):
                if await self._folder.commit_of(name):
                    return name
        return ""

    def has(self, step: int) -> bool:
        """Say whether the ledger has a checkpoint of a step."""
        return self._entry(step) is not None

    def _entry(self, step: int) -> Entry | None:
        return None if self._folder.ledger is None else self._folder.ledger.entry(step)

    def _tell_of_staying(self, step: int, name: str) -> None:
        """Say that a checkpoint stays beside the new one: the first time as a warning."""
        tell = log.info if self._has_told else log.warning
        self._has_told = True
        why, until = self._staying[step]
        tell(
            "step %d has a checkpoint that %s, so %s stays. The run saves the step into %s, which is resumed from "
            "first. The policy may delete both once %s. Later steps are told as information",
            step,
            why,
            self._folder.names_of(step)[0],
            name,
            until,
        )

    async def check_owner(self) -> None:
        """Read whether this job still has the folder. A ledger that cannot be read is told: no other job has it.

        Raises:
            RunTakenError: another job has taken the folder since.

        """
        try:
            await self._folder.check_owner()
            if self._roles is not None:
                await self._roles.check()
        except StorageError as error:
            log.warning("the run's ledger could not be read before a save, which goes on: %s", error)

    async def kept(self) -> None:
        """Look behind a snapshot in memory, whose checkpoint may be long in coming: a restart goes on from it.

        So newer checkpoints are left behind now, where the run went back, and not with the next commit.

        Raises:
            RunTakenError: another job has taken the folder since.
            StorageError: storage failed; the next call tries it again.

        """
        await self.check_owner()
        if self._left_behind:
            await self._note(self._leave_behind)
            self._left_behind = set()

    async def _doubt(self, step: int) -> None:
        """Take back the mark "verified" of a step that is about to be saved again; pin an old checkpoint that stays.

        A job that is killed between the commit and the ledger leaves a new checkpoint with the old entry.
        """
        if self.has(step):
            try:
                await self.change(lambda ledger: ledger.doubted(step, stays=step in self._staying))
            except StorageError as error:  # the save goes on: other ranks have begun it
                if self._roles is not None:  # else they would take the new checkpoint for the old one
                    raise
                log.warning("step %d, which is saved again, is still marked as verified", step, error=repr(error))

    async def _unfinished(self) -> Sequence[Unfinished] | None:
        """List interrupted writes of the ledger; None if storage fails: retention needs none of it."""
        try:
            return await self._folder.unfinished()
        except StorageError as error:
            log.warning("unfinished writes of the ledger were not listed", error=repr(error))
            return None

    async def _note(self, change: Callable[[Ledger], Ledger] = lambda ledger: ledger) -> Ledger:
        """Store the entries that are not stored yet, and a change.

        Another job may have marked a checkpoint since its commit. The mark stays, unless the save replaced another
        checkpoint of the step: the mark may be about that one.
        """
        unnoted, launch = dict(self._unnoted), None if self._roles is None else self._roles.launch

        def note(ledger: Ledger) -> Ledger:
            for step, (committed, metrics) in unnoted.items():
                marked = None if step in self._replaced else ledger.entry(step)
                ledger = ledger.with_checkpoint(step, committed, metrics, launch, self._refers.get(step, ()))
                if marked is not None and not marked.about:
                    ledger = ledger.marked(step, marked.trust, marked.reason)
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

    async def drop(self, name: str) -> None:
        """Delete the empty folders that a save has made which wrote nothing."""
        await self._folder.drop(name)

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
            if self._roles is not None:
                await self._roles.aclose()

    def hours(self) -> float:
        """Return the hours since this life took the folder."""
        return (time.monotonic() - self.began) / 3600


class _Permit:
    """Asks the keeper whether the job still has the folder."""

    def __init__(self, keeper: Keeper, step: int, name: str) -> None:
        self._keeper, self._step, self._name = keeper, step, name

    async def begin(self) -> None:
        await self._keeper.begin(self._step, self._name)

    async def commit(self) -> None:
        await self._keeper.check_owner()


def _marked_about(step: int, about: frozenset[str], ledger: Ledger) -> Ledger:
    """Say which checkpoints the mark of a step is about, if it is still as suspect."""
    entry = ledger.entry(step)
    if entry is None or entry.trust != "suspect":
        return ledger
    return ledger.marked(step, "suspect", entry.reason, sorted(about))


def _tell_of_twins(listing: Sequence[Candidate]) -> None:
    """Warn of steps that two committed folders have."""
    committed: dict[int, list[str]] = {}
    for candidate in listing:
        if candidate.reason != UNCOMMITTED:
            committed.setdefault(candidate.step, []).append(candidate.name)
    for step, names in committed.items():
        if len(names) > 1:
            others = ", ".join(names[1:])
            log.warning("step %d has several folders: %s is tried first, and %s after it", step, names[0], others)


def _only(goal: Goal, step: int, listing: Sequence[Candidate]) -> list[Candidate]:
    """Return the folders of one step to try, and newer ones as passed over. Who asks for a step may try a suspect one.

    Raises InputError or UncommittedError if no folder of the step is to be tried.
    """
    chosen = [candidate for candidate in listing if candidate.step == step]
    if goal.trust == "any":
        for candidate in chosen:
            if candidate.is_marked:
                log.warning("step %d is resumed from, though it is marked as %s", step, candidate.reason)
        chosen = [replace(candidate, reason="") if candidate.is_marked else candidate for candidate in chosen]
    if all(candidate.reason for candidate in chosen):
        reason = "; ".join(f"{candidate.name} is {candidate.reason}" for candidate in chosen)
        message = f"the run cannot be resumed from step {step}: {reason}. Pass another step, or none"
        raise InputError(message) if any(candidate.is_marked for candidate in chosen) else UncommittedError(message)
    newer = [candidate for candidate in listing if candidate.step > step]
    return chosen + [replace(candidate, reason=candidate.reason or _asked(Goal(step=step))) for candidate in newer]


def _asked(goal: Goal) -> str:
    return f"resume({goal}) was asked for"


def _steps_there(folder: Folder) -> str:
    steps = folder.listed.folders
    more = f" and {len(steps) - SHOWN} older ones" if len(steps) > SHOWN else ""
    return f"it has {', '.join(map(str, steps[:SHOWN]))}{more}" if steps else "it has none"
