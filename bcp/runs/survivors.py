"""The end of a run whose other ranks have died: those that are left save what they hold, if it covers everything.

The paper's jobs lose the steps since their last checkpoint. Replicas on other hosts have these steps still.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bcp.backends import shown
from bcp.coordinators.process_group import end_gloo_groups
from bcp.errors import CoverageError, InputError, PeerError, StateError
from bcp.protocols import Coordinator
from bcp.runs.calls import Body, adrive, drive
from bcp.runs.candidates import Trust
from bcp.runs.keeper import End
from bcp.runs.resumable import ResumableRun
from bcp.runs.step_ends import StepEnds
from bcp.runs.tiered import Tiered
from bcp.runtime.threads import in_thread
from bcp.tiers.meeting import Meeting, close_coordinator
from bcp.tiers.saving import Aim

__all__ = ["SurvivingRun", "Survivors"]

PATIENCE_SECONDS = 12.0
"""Less than half of torchrun's notice: the save comes after it."""

SHOWN_RANKS = 8


@dataclass(frozen=True, slots=True)
class Survivors:
    """The ranks that were left of a job, and the snapshot that they have in memory.

    Attributes:
        step: of the snapshot: the last one that has ended.
        ranks: those that were left.
        path: where agents store its checkpoint; empty if memory or storage had the step before.
    """

    step: int
    ranks: tuple[int, ...]
    path: str

    def __str__(self) -> str:
        done = f"have saved step {self.step} in memory" if self.path else f"need not save step {self.step} again"
        return f"ranks {_some(self.ranks)} {done}"


class SurvivingRun(ResumableRun):
    """The part of :class:`bcp.Run` that saves when other ranks have died."""

    _ends: StepEnds | None = None
    _job_ranks: Coordinator | None = None
    _meeting_count = 0
    _is_left = False

    def save_survivors(self, *, patience: float = PATIENCE_SECONDS, end_groups: bool = True) -> Survivors:
        """Save the last step that has ended, into memory, by the ranks that are left when others have died.

        Call it on each of them after the error of a step or of a save, and inside of the run. It needs
        ``Tiers(survivors=True)``, and that :meth:`maybe_save` was called at the end of each step. The ranks meet at the
        agents, and save what they hold together. Agents make the snapshot durable, and the next start of the job goes
        on from it, on any ranks. The run is over then, and so is the process as a rule.

        All gloo groups of the process are ended first: ranks that wait for this one in a collective get an error, and
        come, too.

        Weights and optimizer are saved as they are, extra states and random states as they were at the end of the
        step. Random states of lost ranks are lost.

        Args:
            patience: seconds to wait for ranks that live and have not called this. Ranks that have died are not
                waited for. The save comes after it.
            end_groups: whether to end the gloo groups.

        Returns:
            The step, and the ranks that have saved it. A step that memory or storage has already is not saved again.

        Raises:
            CoverageError: the ranks do not hold all of a tensor; names it, the missing block, and who has not come.
            StateError: their states do not fit together, as in any save.
            InputError: the ranks have ended different steps, or the states of this one are not those at the end of the
                step: an optimizer step was torn. Or the run cannot do it.
            PeerError: the states of another rank are torn, or one more rank has died.
            StorageError: no agent answers, or there is no room in memory.

        Example::

            tiers = bcp.Tiers(survivors=True)
            with bcp.Run("gs://bucket/run-7", states, save=50, durable=1000, tiers=tiers) as run:
                try:
                    for step in range(run.resume() + 1, steps + 1):
                        train(step)
                        run.maybe_save(step)
                except (RuntimeError, bcp.PeerError):  # another rank has died
                    print(run.save_survivors())
                    raise

        """
        return drive(
            self._save_survivors(patience, end_groups=end_groups), f"save what is left of the run at {shown(self._url)}"
        )

    async def asave_survivors(self, *, patience: float = PATIENCE_SECONDS, end_groups: bool = True) -> Survivors:
        """Do the same from a coroutine."""
        return await adrive(
            self._save_survivors(patience, end_groups=end_groups), f"save what is left of the run at {shown(self._url)}"
        )

    def _save_survivors(self, patience: float, *, end_groups: bool) -> Body[Survivors]:
        self._refuse_in_callback("save_survivors")
        _, tiers, ends = self._started, self._tiered, self._ends
        if tiers is None or ends is None:
            raise InputError("save_survivors() needs a memory tier that knows of it: pass tiers=Tiers(survivors=True)")
        if not (isinstance(patience, int | float) and 0 < patience < float("inf")):
            raise InputError(f"save_survivors(patience={patience!r}): pass seconds, as 10.0")
        self._is_left = True
        if end_groups:
            yield partial(in_thread, end_gloo_groups)
        yield self._saves.give_up
        name = f"{self.resumed.life}-{self._meeting_count}"
        self._meeting_count += 1
        trouble = ends.trouble() if ends.step else "no step has ended yet"
        meeting: Meeting = yield partial(tiers.meet, name, ends.step, trouble, patience)
        _check(meeting, trouble)
        ranks = tiers.coordinator(meeting, getattr(self._given, "tls", None))
        try:
            return (yield from self._saved(tiers, ends, meeting, ranks))
        except CoverageError as error:
            raise CoverageError(
                f"{_alone(meeting)}: {error}. If a lost rank held it, the next start goes on from the newest snapshot "
                "before"
            ) from error
        except PeerError as error:
            words = f"{_alone(meeting)}: {error} ({_numbers(meeting)})"
            raise PeerError(meeting.ranks[error.rank], words) from error
        except StateError as error:
            error.add_note(_numbers(meeting))
            raise
        finally:
            yield partial(close_coordinator, ranks)

    def _saved(self, tiers: Tiered, ends: StepEnds, meeting: Meeting, ranks: Coordinator) -> Body[Survivors]:
        """Save, unless the step is in memory."""
        step = ends.step
        newest = yield partial(tiers.newest, ranks)
        if newest > step:
            raise InputError(
                f"the ranks that are left have ended step {step}, and step {newest} is in memory: call maybe_save() at "
                "the end of each step. Nothing was saved"
            )
        if newest == step or (step == self.resumed.step and not self.resumed.hosts):  # in memory, or in storage
            return Survivors(step, meeting.ranks, "")
        aim = Aim(step, self._saver.aside(step), branch=tiers.branch)
        metrics = self._saver.metrics.get(step)
        call = tiers.call(aim, ends.states(), self._framework, ranks, metrics, names=meeting.ranks)
        yield partial(call.run, None)
        return Survivors(step, meeting.ranks, f"{self._url}/{aim.place}")

    @property
    def _ranks(self) -> Coordinator:
        """The ranks of the job, whose process group may have ended by now."""
        return super()._ranks if self._job_ranks is None else self._job_ranks

    def _step_ended(self, step: int) -> None:
        """Look at the states at the end of a step, if survivors may save."""
        if self._ends is not None:
            self._ends.ended(step)

    def _resumed(self, trust: Trust, step: int | None, *, fresh: bool) -> Body[int]:
        if self._tiered is None or not self._tiered.survivors:
            return (yield from super()._resumed(trust, step, fresh=fresh))
        ends, self._job_ranks = StepEnds(self._states.now), self._ranks
        try:
            resumed = yield from super()._resumed(trust, step, fresh=fresh)
            ends.ended(resumed)
        except BaseException:
            ends.close()
            raise
        self._ends = ends
        return resumed

    def _close(self, end: End, again: str = "") -> Body[None]:
        """Close; a run that was left by ranks has not ended well, and its snapshots stay."""
        try:
            yield from super()._close("failed" if self._is_left else end, again)
        finally:
            if self._ends is not None:
                self._ends.close()


def _check(meeting: Meeting, trouble: str) -> None:
    """Refuse to save unless all survivors have states of one step."""
    steps: dict[int, list[int]] = {}
    for each in meeting.came:
        steps.setdefault(each.step, []).append(each.rank)
    if trouble:
        raise InputError(f"{trouble}. The next start goes on from the newest snapshot before")
    for each in meeting.came:
        if each.trouble:
            raise PeerError(each.rank, f"rank {each.rank} cannot save: {each.trouble}")
    if len(steps) > 1:
        told = "; ".join(f"step {step} on ranks {_some(ranks)}" for step, ranks in sorted(steps.items()))
        raise InputError(
            f"the ranks that are left have ended different steps: {told}. They hold no step together, so the next "
            "start goes on from the newest snapshot before"
        )


def _alone(meeting: Meeting) -> str:
    absent = f", without ranks {_some(meeting.absent)}" if meeting.absent else ""
    return f"ranks {_some(meeting.ranks)} save step {meeting.came[0].step} alone{absent}"


def _numbers(meeting: Meeting) -> str:
    return f"ranks 0, 1, ... in these words are ranks {_some(meeting.ranks)} of the job"


def _some(ranks: Sequence[int]) -> str:
    more = f", ... ({len(ranks)} ranks)" if len(ranks) > SHOWN_RANKS else ""
    return ", ".join(map(str, ranks[:SHOWN_RANKS])) + more
