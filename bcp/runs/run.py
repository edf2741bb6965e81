"""A training job that comes back: resume, save when a save is due, keep some checkpoints, stop in time."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

from bcp._log import log
from bcp._messages.running import Durable
from bcp._pending import Pending
from bcp.errors import InputError
from bcp.events import SaveResult
from bcp.options import LoadOptions, SaveOptions, with_overrides
from bcp.planners import Framework
from bcp.policies.keep import KeepPolicy, as_keep_policy
from bcp.policies.save import Costs, SavePolicy, as_save_policy
from bcp.protocols import Coordinator, States
from bcp.runs.arguments import below, check_arguments, check_lazy, place_of, with_launch
from bcp.runs.bases import Since, bases
from bcp.runs.calls import Body, adrive, drive
from bcp.runs.ledger import numbers
from bcp.runs.names import whole_step
from bcp.runs.plans import Clock, agreed, told
from bcp.runs.preemption import Preemption
from bcp.runs.resuming import Resumed
from bcp.runs.roles import Role
from bcp.runs.saver import Saver
from bcp.runs.saves import OnCommit, OnFailure, Saves, Standby, Watchdog, nothing
from bcp.runs.schedule import Schedule
from bcp.runs.states import RunStates
from bcp.runs.survivors import SurvivingRun
from bcp.runs.tiered import tiered
from bcp.runtime.bridge import Background
from bcp.runtime.threads import in_thread
from bcp.tiers.options import Tiers

__all__ = ["Run"]


class Run(SurvivingRun):
    """A training job with its checkpoints in one folder, from its first step over all restarts to its last.

    The run resumes from the newest intact checkpoint, saves in the background by policy, and deletes checkpoints by
    policy. After a signal it ends training on all ranks at one step. The folder holds ``step-00001000/`` and so on, and
    a ledger ``run.json``.

    All ranks make the same calls in the same order, for the same steps. :meth:`stop` is the exception: one rank is
    enough.

    Attributes:
        resumed: the checkpoint that :meth:`resume` loaded, and the reasons against newer ones.

    Example::

        with bcp.Run("ckpt/run-7", {"model": model, "optimizer": optimizer}, save=100, keep=3) as run:
            for step in range(run.resume() + 1, steps + 1):
                train(step)
                run.maybe_save(step)
                if run.should_stop(step):
                    break

    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        states: States,
        *,
        save: SavePolicy | int | None = 1_000,
        keep: KeepPolicy | int = 3,
        run_id: str | None = None,
        preemption: Preemption | None = None,
        while_saving: Literal["wait", "skip"] = "wait",
        standby_steps: int | None = None,
        tolerate: int = 0,
        framework: Framework = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        on_commit: OnCommit = nothing,
        on_failure: OnFailure = nothing,
        role: Role | None = None,
        tiers: Tiers | None = None,
        durable: SavePolicy | int | None = None,
        since: Since | None = None,
        coordinator: Coordinator | None = None,
    ) -> None:
        """Describe the run; touches no storage.

        Args:
            path: the run's folder: a directory or a URL.
            states: as for :func:`bcp.save`. Random states are added unless there are some; they are loaded last. The
                mapping is read at each save and load, so :meth:`resume` is early enough to fill it in.
            save: when to save (:mod:`bcp.policies`); a number is every so many steps. None leaves it to :meth:`save`.
            keep: which checkpoints to keep; a number is the newest so many.
            run_id: name of the job. A folder of another job is refused. None accepts the name in the folder.
            preemption: signals and notices that end training early. None: SIGTERM and SIGUSR1.
            while_saving: a save that is due while another one runs waits for it, or is put off until it has ended.
            standby_steps: keep a snapshot of every so many steps in host memory. It is written if a stop signal comes
                and no step ends. It takes one more copy of the state in host memory; None for none.
            tolerate: so many failed saves in a row are logged, not raised.
            framework: as for :func:`bcp.save`.
            save_options: how to save.
            load_options: how to load.
            on_commit: called with step and result in a thread, on every rank, once a checkpoint is durable.
            on_failure: called with step and error in a thread, when a save has failed.
            role: of this world of ranks, if the run has several, as an actor and a critic. It saves below
                ``path/NAME``, and a step counts once all roles have committed it.
            tiers: keep the snapshots in the memory of the hosts, where they outlive this process. Agents make the
                checkpoints durable. None: this process writes to storage.
            durable: which of the saves agents make durable, besides the last one; a number is every so many steps.
                Others stay in memory. None: all of them. If ``save`` is a policy, :meth:`save` asks for a durable one
                whatever this says. For ``tiers`` alone.
            since: ``"auto"``: a save stores the blocks that have changed since the checkpoint before, and refers to
                earlier checkpoints for the others, as for frozen parameters. Each checkpoint stays whole for readers,
                and no policy deletes one that another needs. Not with ``tiers``, nor with codecs. None: every save
                stores everything.
            coordinator: as for :func:`bcp.save`.

        Raises:
            InputError: a policy, a number or the states cannot be used; or roles save by a policy that reads a clock;
                or an argument does not go with ``tiers``.

        """
        check_arguments(
            while_saving, standby_steps, tolerate, preemption, framework, on_commit=on_commit, on_failure=on_failure
        )
        self._url, self._framework, self._given = place_of(path), framework, coordinator
        self._given_states, self._states, self._pid = states, RunStates(states), os.getpid()
        self._keep = as_keep_policy(keep)
        self._run_id, self._standby_steps, self._has_policy = run_id, standby_steps, save is not None
        self._role = role
        self._save_options = with_overrides(SaveOptions, save_options, {})
        if role is not None:
            self._url, self._save_options = below(self._url, role), with_launch(self._save_options, role, save)
        self._load_options = with_overrides(LoadOptions, load_options, {})
        if states:  # else the caller fills them in before resume()
            check_lazy(self._save_options, states)
        self._tiered = tiered(tiers, durable, self._url, self._save_options, standby_steps=standby_steps, role=role)
        self._preemption = preemption if preemption is not None else Preemption()
        self._saves = Saves(
            self._housekeeping, on_commit, on_failure, tolerate, lambda: self._ranks.rank == 0, self._look
        )
        self._standby = Standby()
        self._clock = Clock()
        self._schedule = Schedule(
            None if save is None else as_save_policy(save),
            while_saving,
            self._save_options.timeout,
            self._clock,
            self._saves,
            lambda: self.costs,
        )
        self._saver = Saver(
            self._url,
            self._states,
            framework,
            coordinator,
            self._save_options,
            self._saves,
            self._standby,
            lambda: self._keeper,
            self._tiered,
            bases(since, self._url, self._save_options, lambda: self._keeper, tiers=tiers),
        )
        self._last: int | None = None
        self.resumed = Resumed()
        self._damaged = {}

    # -- save --------------------------------------------------------------------------------------

    def maybe_save(self, step: int, metrics: Mapping[str, float] | None = None) -> Pending[SaveResult] | None:
        """Save in the background if the policy says so, or if the run is about to stop.

        Args:
            step: the step that has ended; larger than the one before.
            metrics: values of the step for :class:`~bcp.policies.Best`, equal on all ranks. They are looked at if a
                save begins.

        Returns:
            The save, which need not be waited for; None if none has begun.

        Raises:
            BcpError: the save before this one failed in the background.
            RunTakenError: another job has taken the folder since.
            InputError: the step is not larger than the one before, a metric is no number, :meth:`resume` was not
                called, or the run is closed.

        """
        return drive(self._maybe_save(step, metrics), f"save step {step}")

    async def amaybe_save(self, step: int, metrics: Mapping[str, float] | None = None) -> Pending[SaveResult] | None:
        """Do the same from a coroutine."""
        return await adrive(self._maybe_save(step, metrics), f"save step {step}")

    def _maybe_save(self, step: int, metrics: Mapping[str, float] | None) -> Body[Pending[SaveResult] | None]:
        step = whole_step(step)
        self._refuse_in_callback("maybe_save")
        self._step_ended(step)
        self._saves.raise_failure()
        stopping = yield from self._at(step)
        if step <= self._clock.step:
            raise InputError(
                f"maybe_save({step}) after step {self._clock.step}: a step is saved once, and steps grow; after a "
                f"resume the next step is {self._clock.step + 1}"
            )
        self._clock.step = step
        if stopping or (yield from self._schedule.due(self._ranks, step)):
            return (yield from self._begun(step, metrics, stopping=stopping, asked=False))
        if self._standby_steps is not None and step % self._standby_steps == 0:
            yield from self._saver.hold(step)
        self._schedule.renew(self._ranks, step)
        return None

    def _begun(
        self, step: int, metrics: Mapping[str, float] | None, *, stopping: bool, asked: bool
    ) -> Body[Pending[SaveResult] | None]:
        """Begin a save, the last one if the run stops; None if there is no time for it, or the step is saved.

        One that the caller has asked for, besides those of the policy, is to be durable.
        """
        self._saver.metrics[step] = numbers(metrics or {})  # a copy: the caller may use the dict again
        if stopping:
            background = yield from self._save_last(step)
        else:
            self._schedule.forget()
            background = yield from self._saver.save(step, durable=asked)
            self._schedule.renew(self._ranks, step)
        return None if background is None else Pending(background)

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> Pending[SaveResult] | None:
        """Save in the background, whatever the policy says: for a trainer that decides by itself.

        It takes the place of :meth:`maybe_save`, or follows it for the same step. After :meth:`stopping` has said that
        the run stops, it is the last save.

        Args:
            step: the step that has ended.
            metrics: as for :meth:`maybe_save`.

        Returns:
            The save, which need not be waited for. None if the step is being saved already, or if the notice of a stop
            is too short for one more save. A snapshot of the step that was to stay in memory becomes durable.

        Raises:
            BcpError: the save before this one failed in the background.
            RunTakenError: another job has taken the folder since.
            InputError: a later step has ended already, a metric is no number, :meth:`resume` was not called, or the
                run is closed.

        Example::

            if step % 500 == 0 or trainer.has_best_loss:
                run.save(step, {"loss": loss})

        """
        return drive(self._save(step, metrics), f"save step {step}")

    async def asave(self, step: int, metrics: Mapping[str, float] | None = None) -> Pending[SaveResult] | None:
        """Do the same from a coroutine."""
        return await adrive(self._save(step, metrics), f"save step {step}")

    def _save(self, step: int, metrics: Mapping[str, float] | None) -> Body[Pending[SaveResult] | None]:
        step = whole_step(step)
        self._refuse_in_callback("save")
        self._step_ended(step)
        self._saves.raise_failure()
        stopping = yield from self._at(step)
        if step < max(self._clock.step, 1):
            raise InputError(
                f"save({step}) after step {self._clock.step}: pass the step that has ended last, from 1 on"
            )
        self._clock.step = step
        if step == self._saves.step:
            background = yield from self._promoted()
            return None if background is None else Pending(background)
        return (yield from self._begun(step, metrics, stopping=stopping, asked=self._has_policy))

    def _promoted(self) -> Body[Background[SaveResult] | None]:
        """Let the newest snapshot become durable if it was to stay in memory. All ranks have begun the same saves."""
        if self._tiered is None:
            return None
        yield self._saves.ended
        self._saves.raise_failure()
        staying = self._saves.drains.staying
        if staying is None or staying.step != self._saves.step:  # the save of this step has failed, or is in storage
            return None
        self._saves.outcomes.begun(staying.step)
        promoted: Background[SaveResult] | None = yield partial(self._saves.drains.promote, self._tiered)
        return promoted

    def committed(self) -> Sequence[int]:
        """Return the steps that have become durable since the last call, oldest first; the same on all ranks.

        For a trainer that tells others of a checkpoint in its own loop: writes a tracker file, or reports to a driver.
        ``on_commit`` is called earlier, in a thread, and on each rank at another time.

        The ranks agree only while a save is on its way that no call has returned; else it costs nothing. After
        :meth:`close` it returns the last ones. A save that failed is never among them.

        Raises:
            InputError: :meth:`resume` was not called.

        Example::

            for done in run.committed():
                if rank == 0:
                    tracker.write_text(str(done))

        """
        return drive(self._committed(), "learn which steps are durable")

    async def acommitted(self) -> Sequence[int]:
        """Do the same from a coroutine."""
        return await adrive(self._committed(), "learn which steps are durable")

    def _committed(self) -> Body[Sequence[int]]:
        self._refuse_in_callback("committed")
        if self._is_over:  # all saves have ended, with the same outcome on all ranks
            return self._saves.outcomes.taken(self._saves.outcomes.told())
        _ = self._started
        outcomes = self._saves.outcomes
        if not outcomes.awaited:
            return ()

        async def answer() -> bytes:
            return outcomes.told().encode()

        name = f"learn which steps are durable after step {self._clock.step}"
        told_by_0 = yield partial(told, self._ranks, name, self._patience, answer)
        return outcomes.taken(Durable.decode(told_by_0, sender=0))

    @property
    def costs(self) -> Costs:
        """The measurements of the run, as for :meth:`bcp.policies.Tuned.explain`. Rank 0 alone knows of failures."""
        keeper = self._keeper
        return Costs(
            stall=self._saves.stall,
            durable=self._saves.durable,
            step=self._clock.step_seconds,
            failures=0 if keeper is None else keeper.failures,
            observed_hours=0.0 if keeper is None else keeper.observed_hours,
            restart=self._clock.restart,
        )

    async def _housekeeping(self, step: int) -> None:
        metrics = self._saver.metrics.pop(step, {})
        if self._keeper is not None:
            begun = self._saves.step
            live = {step, *self._saves.drains.steps}
            if begun is not None and self._saves.running:
                live.add(begun)
            await self._keeper.committed(step, metrics, live)

    async def _look(self) -> None:
        if self._tiered is not None:
            await self._tiered.look(self._clock.step)
        if self._keeper is not None:
            await self._keeper.kept()

    # -- stop --------------------------------------------------------------------------------------

    def should_stop(self, step: int) -> bool:
        """Return whether training ends after this step, on all ranks alike; then its checkpoint is durable.

        With ``tiers`` it is in the memory of the hosts then, and :meth:`close` waits until agents have made it durable.

        It costs less than a microsecond until a rank is asked to stop. The answer for a step never changes: a signal
        that comes after it was given ends training at a later step. ``standby_steps`` covers the time until then.
        Nothing is saved if no step was made yet.

        Raises:
            BcpError: the last save failed; ``tolerate`` does not cover the last save.
            InputError: a later step has ended already, or the run is closed.

        """
        return drive(self._should_stop(step), f"stop after step {step}")

    async def ashould_stop(self, step: int) -> bool:
        """Do the same from a coroutine."""
        return await adrive(self._should_stop(step), f"stop after step {step}")

    def stopping(self, step: int) -> bool:
        """Return whether training ends after this step, on all ranks alike; nothing is saved.

        For a trainer that still has to evaluate or to log before its last save: it calls :meth:`save` then, and
        :meth:`close` waits for it. :meth:`should_stop` does all of this in one call.

        Raises:
            InputError: a later step has ended already, or the run is closed.

        Example::

            if run.stopping(step):
                trainer.log()
                run.save(step)
                break

        """
        return drive(self._stopping(step, "stopping"), f"stop after step {step}")

    async def astopping(self, step: int) -> bool:
        """Do the same from a coroutine."""
        return await adrive(self._stopping(step, "stopping"), f"stop after step {step}")

    def _stopping(self, step: int, call: str) -> Body[bool]:
        step = whole_step(step)
        self._refuse_in_callback(call)
        self._step_ended(step)
        if step < self._clock.step:
            raise InputError(f"{call}({step}) after step {self._clock.step}: pass the step that has ended last")
        return (yield from self._at(step))

    def stop(self, reason: str = "stop() was called") -> None:
        """Ask all ranks to stop at the next step that they can agree on; from any thread, on any rank.

        Raises:
            InputError: :meth:`resume` was not called.

        """
        if self._meetings is None:
            self._refuse_if_closed()
        if not self._closed:
            self._started.alarm(reason)

    def _should_stop(self, step: int) -> Body[bool]:
        if not (yield from self._stopping(step, "should_stop")):
            return False
        step = whole_step(step)
        if self._last is None:
            self._clock.step = step
            yield from self._save_last(step)
        yield self._saves.ended
        self._saves.raise_failure(last=True)
        return True

    def _at(self, step: int) -> Body[bool]:
        """Return whether this step is the last one."""
        meetings = self._started
        if meetings.reason is None:
            return meetings.at(step)
        stops = bool((yield partial(in_thread, meetings.at, step)))  # it may wait for the other ranks
        self._stops = self._stops or stops
        return stops

    def _save_last(self, step: int) -> Body[Background[SaveResult] | None]:
        """Save for the last time, or let a running save be the last one if the notice is too short for another."""
        self._last = step
        if step in (0, self._saves.step):
            return None
        fits = yield partial(agreed, self._ranks, f"last save at step {step}", self._patience, self._fits)
        if self._watchdog is not None:
            self._watchdog.step_ended()  # on all ranks: one that hangs needs the standby snapshots of all
        if not fits:
            tell = log.warning if self._ranks.rank == 0 else log.info
            tell("the notice is too short for a save of step %d; step %s is the last", step, self._saves.step)
            return None
        return (yield from self._saver.save(step, durable=True))

    def _fits(self) -> bool:
        """Return whether the notice buys another save beside the running one. Rank 0 answers for all."""
        return self._saves.fits(self._started.deadline)

    def _alarmed(self) -> None:
        """Watch over the end of the step; called in a thread when a stop signal is heard."""
        if self._standby_steps is not None and self._meetings is not None:
            meetings = self._meetings
            self._watchdog = Watchdog(self._standby.release, lambda: meetings.deadline, self._saves.durable)
