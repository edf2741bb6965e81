"""A training job that comes back: resume, save when it is due, keep what is wanted, stop when it is asked to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from bcp._bridge import Background
from bcp._calls import Call, Framework, load_call, save_call
from bcp._log import log
from bcp._pending import Pending
from bcp.backends import resolve, shown
from bcp.coordinators import coordinator as coordinator_for
from bcp.errors import InputError
from bcp.events import LoadReport, SaveReport, ignore
from bcp.options import LoadOptions, SaveOptions
from bcp.planners.random_states import RngState
from bcp.policies import AnyOf, Costs, EverySteps, KeepPolicy, Latest, Moment, SavePolicy, doomed
from bcp.protocols import Coordinator, States
from bcp.runs.calls import Body, adrive, drive
from bcp.runs.folder import Folder, step_name
from bcp.runs.ledger import Ledger
from bcp.runs.meetings import Meetings
from bcp.runs.plans import Plan, next_plan
from bcp.runs.preemption import Preemption
from bcp.runs.resuming import Choice, Resumed, Trust
from bcp.runs.resuming import resume as resume_newest
from bcp.runs.saves import OnCommit, OnFailure, Saves

__all__ = ["Run"]

RANDOM_STATES = "bcp_random_states"
"""Key of the random states among the extra states, where the user passed none."""


@dataclass(slots=True)
class _Clock:
    """Where the training stands, on this rank."""

    began: float = field(default_factory=time.monotonic)
    first: int = 0
    step: int = 0

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step since the beginning or the resumption."""
        return (time.monotonic() - self.began) / max(1, self.step - self.first)


class Run:
    """A training job with its checkpoints in one folder, from its first step over all restarts to its last.

    Example::

        run = bcp.Run("ckpt/run-7", {"model": model, "optimizer": optimizer}, save=100, keep=3)
        with run:
            for step in range(run.resume() + 1, steps + 1):
                train(step)
                run.maybe_save(step)
                if run.should_stop(step):
                    break

    Every method but :meth:`mark` is collective: all ranks call it, in the same order and for the same steps.
    """

    def __init__(
        self,
        url: str,
        states: States,
        *,
        save: SavePolicy | int = 1_000,
        keep: KeepPolicy | int = 3,
        run_id: str | None = None,
        preemption: Preemption | None = None,
        while_saving: Literal["wait", "skip"] = "wait",
        framework: Framework = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        on_commit: OnCommit = ignore,
        on_failure: OnFailure = ignore,
        coordinator: Coordinator | None = None,
    ) -> None:
        """Describe the run; touches no storage.

        Args:
            url: the run's folder: a directory or a URL. Its checkpoints are ``<url>/step-00001000/``.
            states: as for :func:`bcp.save`. Random states are added if there are none.
            save: when to save; a number is every so many steps.
            keep: which checkpoints to keep; a number is the newest so many.
            run_id: name of the job. A folder of another one is refused. None takes the folder's.
            preemption: signals and notices that end the run early; None for SIGTERM and SIGUSR1.
            while_saving: a save that is due while another runs waits for it, or is left out.
            framework: as for :func:`bcp.save`.
            save_options: how to save.
            load_options: how to load.
            on_commit: called with step and report in a thread, on every rank, once a checkpoint is durable.
            on_failure: called with step and error in a thread, when a save has failed.
            coordinator: as for :func:`bcp.save`.

        Raises:
            InputError: a policy or the states cannot be used.

        """
        self._url, self._framework = str(url), framework
        self._states = _with_random_states(states)
        self._save = AnyOf(EverySteps(save)) if isinstance(save, int) else save
        self._keep = Latest(keep) if isinstance(keep, int) else keep
        self._run_id, self._while_saving = run_id, while_saving
        self._save_options = save_options or SaveOptions()
        self._load_options = load_options or LoadOptions()
        self._given = coordinator
        self._preemption = preemption if preemption is not None else Preemption()
        self._saves = Saves(self._after, on_commit, on_failure)
        self._clock = _Clock()
        self._folder: Folder | None = None
        self._meetings: Meetings | None = None
        self._plan: Background[Plan] | None = None
        self._costs: Costs | None = None
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._stop_at: int | None = None
        self.resumed = Resumed()

    # -- resume ------------------------------------------------------------------------------------

    def resume(self, *, trust: Trust = "any") -> int:
        """Load the newest committed checkpoint that loads, and return its step; 0 if there is none.

        ``self.resumed`` says which one was chosen and why newer ones were passed over; a log line does, too.

        Args:
            trust: ``"any"``: all that :meth:`mark` has not called suspect. ``"verified"``: only those it has verified.

        Raises:
            RunTakenError: the folder belongs to another run.
            MismatchError: the states are not those of the checkpoint. Older ones are not tried.

        """
        return drive(self._resume(trust), f"resume the run at {shown(self._url)}")

    async def aresume(self, *, trust: Trust = "any") -> int:
        """Do the same from a coroutine."""
        return await adrive(self._resume(trust), f"resume the run at {shown(self._url)}")

    def _resume(self, trust: Trust) -> Body[int]:
        ranks = self._ranks
        self.resumed = yield lambda: resume_newest(
            ranks, shown(self._url), self._load_options.timeout, partial(self._candidates, trust), self._load
        )
        if ranks.rank == 0:
            log.info("run: %s", self.resumed)
        self._clock = _Clock(first=self.resumed.step, step=self.resumed.step)
        self._saves.step = self.resumed.step or None
        return self.resumed.step

    async def _candidates(self, trust: Trust) -> tuple[Sequence[int], Sequence[Choice]]:
        """Take the folder, and return the steps to try and those that are not to be tried. Rank 0 only."""
        folder = self._open_folder()
        ledger = await folder.take(self._run_id)
        steps, others = [], []
        marks = {entry.step: entry for entry in ledger.entries}
        found = await folder.steps()
        for step in sorted(found.committed, reverse=True):
            entry = marks.get(step)
            if entry is not None and entry.trust == "suspect":
                others.append(Choice(step, f"suspect: {entry.reason}"))
            elif trust == "verified" and (entry is None or entry.trust != "verified"):
                others.append(Choice(step, "not verified"))
            else:
                steps.append(step)
        others += [Choice(step, "not committed, or half deleted") for step in found.broken]
        return steps, others

    async def _load(self, step: int) -> LoadReport:
        options = replace(self._load_options, step=step)
        path = f"{self._url}/{step_name(step)}"
        call = load_call(path, self._states, self._framework, None, options, self._given)
        return await call.run()

    # -- save --------------------------------------------------------------------------------------

    def maybe_save(self, step: int, metrics: Mapping[str, float] | None = None) -> Pending[SaveReport] | None:
        """Save in the background if the policy says so, or if the run is about to stop.

        Args:
            step: the step that has ended; larger than the one before.
            metrics: values of the step for :class:`~bcp.policies.Best`, equal on all ranks.

        Raises:
            BcpError: the save before this one failed in the background.
            InputError: the step is not larger than the one before.

        """
        background = drive(self._maybe_save(step, metrics or {}), f"save step {step}")
        return None if background is None else Pending(background)

    async def amaybe_save(self, step: int, metrics: Mapping[str, float] | None = None) -> Pending[SaveReport] | None:
        """Do the same from a coroutine."""
        background = await adrive(self._maybe_save(step, metrics or {}), f"save step {step}")
        return None if background is None else Pending(background)

    def _maybe_save(self, step: int, metrics: Mapping[str, float]) -> Body[Background[SaveReport] | None]:
        if step <= self._clock.step:
            raise InputError(
                f"maybe_save({step}) after step {self._clock.step}: steps grow; after a resume, begin with the step "
                "behind the one that resume() returned"
            )
        self._clock.step = step
        self._raise_failure()
        stopping = self._stops(step)
        due = yield from self._is_due(step, stopping=stopping)
        if not due:
            return None
        if self._saves.running and self._while_saving == "skip" and not stopping:
            return None
        yield self._saves.ended
        self._raise_failure()
        self._metrics[step] = metrics
        background = self._saves.begin(step, self._call(step))
        yield background.astarted
        return background

    def _call(self, step: int) -> Call[SaveReport]:
        """Take this rank's place in the save; in the caller's thread."""
        path, options = f"{self._url}/{step_name(step)}", replace(self._save_options, step=step)
        return save_call(path, self._states, self._framework, None, options, self._given, background=True)

    def _is_due(self, step: int, *, stopping: bool) -> Body[bool]:
        """Ask the policy, or hear what rank 0 has planned."""
        if not getattr(self._save, "timed", False):
            return self._save.due(self._moment(step, 0.0, preempted=stopping))
        if self._plan is None:
            self._ask(step)
            return stopping
        plan = yield self._plan.result
        if step < plan.step:
            return stopping
        self._ask(step)
        return bool(plan.saves) or stopping

    def _ask(self, step: int) -> None:
        """Ask rank 0 in the background when the next save is due."""
        from bcp import _bridge  # noqa: PLC0415

        operation = self._ranks.begin(f"plan the save after step {step}", self._save_options.timeout)
        seconds, known = self._clock.step_seconds, max(1, step - self._clock.first)

        async def decide(_: Sequence[bytes]) -> bytes:
            return next_plan(step, known, seconds, lambda later: self._save.due(self._moment(step, later))).packed()

        async def asked(_: Callable[[], None]) -> Plan:
            async with operation as agreement:
                return Plan.unpacked(await agreement.decide("plan", b"", decide))

        self._plan = _bridge.start(asked, what=f"plan after step {step}")

    def _moment(self, step: int, later: float, *, preempted: bool = False) -> Moment:
        now = time.monotonic() - self._clock.began + later
        begun = self._saves.begun
        return Moment(
            step=step,
            seconds=now,
            last_step=self._saves.step,
            last_seconds=None if begun is None else begun - self._clock.began,
            preempted=preempted,
            saving=self._saves.running,
            costs=self._costs,
        )

    async def _after(self, step: int, report: SaveReport) -> None:
        """Write the checkpoint into the ledger and delete those that the policy gives up. Rank 0 does."""
        if self._ranks.rank:
            return
        folder = self._open_folder()
        metrics = self._metrics.pop(step, {})
        ledger = await folder.change(lambda ledger: ledger.with_checkpoint(step, time.time(), metrics))
        durable = {entry.step for entry in ledger.entries}
        for old in doomed(ledger.entries, self._keep, time.time(), durable):
            await folder.remove(old)
            await folder.change(lambda ledger, old=old: ledger.without(old))

    def _raise_failure(self) -> None:
        error = self._saves.failure()
        if error is not None:
            raise error

    # -- stop --------------------------------------------------------------------------------------

    def should_stop(self, step: int) -> bool:
        """Say whether training ends after this step, on all ranks alike; then the step's checkpoint is durable.

        It costs less than a microsecond until a rank is asked to stop.
        """
        return drive(self._should_stop(step), f"stop after step {step}")

    async def ashould_stop(self, step: int) -> bool:
        """Do the same from a coroutine."""
        return await adrive(self._should_stop(step), f"stop after step {step}")

    def _should_stop(self, step: int) -> Body[bool]:
        if not self._stops(step):
            return False
        yield self._saves.ended
        self._raise_failure()
        return True

    def _stops(self, step: int) -> bool:
        return self._meetings is not None and self._meetings.at(step)

    # -- trust -------------------------------------------------------------------------------------

    def mark(self, step: int, trust: Literal["verified", "suspect"], reason: str = "") -> None:
        """Write down beside the checkpoints whether one can be trusted. Rank 0 writes; the others do nothing.

        Raises:
            InputError: the run has no checkpoint of that step.

        """
        if self._ranks.rank == 0:
            folder = self._open_folder()
            change: Callable[[Ledger], Ledger] = lambda ledger: ledger.marked(step, trust, reason)  # noqa: E731
            drive(_one(partial(folder.change, change)), f"mark step {step}")

    # -- life --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the running save and the housekeeping; raise what went wrong."""
        drive(self._close(), f"close the run at {shown(self._url)}")

    async def aclose(self) -> None:
        """Do the same from a coroutine."""
        await adrive(self._close(), f"close the run at {shown(self._url)}")

    def _close(self) -> Body[None]:
        yield self._saves.ended
        yield self._saves.kept
        self._preemption.close()
        if self._meetings is not None:
            self._meetings.close()
        self._raise_failure()

    def __enter__(self) -> Self:
        """Listen for signals and notices."""
        self._meetings = Meetings(self._ranks.rank, self._ranks.world_size, self._preemption)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error of the block itself comes first."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:  # noqa: BLE001 -- the block's own error is on its way out
            error.add_note(f"The run failed to close as well: {failure!r}")

    async def __aenter__(self) -> Self:
        """Listen for signals and notices."""
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; an error of the block itself comes first."""
        try:
            await self.aclose()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"The run failed to close as well: {failure!r}")

    @property
    def _ranks(self) -> Coordinator:
        return coordinator_for(self._given)

    def _open_folder(self) -> Folder:
        if self._folder is None:
            options = self._save_options
            self._folder = Folder(resolve(self._url, options.storage_options, options.retries), shown(self._url))
        return self._folder


def _one(function: Callable[[], Any]) -> Body[Any]:
    return (yield function)


def _with_random_states(states: States) -> dict[str, Any]:
    """Return the states with random states among them."""
    extra = states.get("extra_states", {})
    if not isinstance(extra, Mapping):
        raise InputError(
            f"states['extra_states'] is a {type(extra).__name__}; a run needs a dict, to add random states"
        )
    if any(isinstance(value, RngState) for value in extra.values()):
        return dict(states)
    return {**states, "extra_states": {**extra, RANDOM_STATES: RngState()}}
