"""How a run comes back: the choice of a checkpoint, its load, and the random states after it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from torch.distributed import Store

from bcp._calls import load_call
from bcp._log import log
from bcp._messages.tiers import Settled
from bcp.backends import shown
from bcp.backends.place import Path
from bcp.errors import CheckpointError, CorruptError, InputError, MismatchError, UncommittedError
from bcp.events import LoadResult
from bcp.options import LoadOptions
from bcp.planners import Framework
from bcp.protocols import States
from bcp.runs.arguments import check_lazy
from bcp.runs.calls import Body, adrive, drive
from bcp.runs.candidates import Goal, Trust
from bcp.runs.keeper import ANY, Keeper
from bcp.runs.marking import MarkedRun
from bcp.runs.meetings import Meetings, meeting_place
from bcp.runs.names import whole_step
from bcp.runs.plans import Clock
from bcp.runs.resuming import Candidates, Choice, Load, Resumed, resume
from bcp.runs.roles import Role, Roles, roles_at
from bcp.runs.states import RunStates
from bcp.runs.tiered import MEMORY, Tiered
from bcp.runs.words import lost_metadata
from bcp.state.random_states import RngState
from bcp.tiers.near import READ_BYTES

__all__ = ["ResumableRun"]

ANSWER_SECONDS = 15.0
"""Seconds for the other ranks to answer an alarm: half of torchrun's notice."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The checkpoint that :meth:`ResumableRun.choose` has found.

    Attributes:
        goal: what it was asked for.
        found: the checkpoint, and the reasons against newer ones.
    """

    goal: Goal
    found: Resumed

    @property
    def candidates(self) -> Candidates:
        """The one checkpoint to load; none for a new run."""
        found = self.found
        steps, names = ((found.step,), (found.name,)) if found.name else ((), ())
        return Candidates(steps, found.passed_over, found.life, names)


class ResumableRun(MarkedRun):
    """The part of :class:`bcp.Run` before its first step.

    Attributes:
        resumed: the checkpoint that :meth:`resume` loaded, and the reasons against newer ones.
    """

    resumed: Resumed
    _run_id: str | None
    _framework: Framework
    _given_states: States
    _states: RunStates
    _load_options: LoadOptions
    _role: Role | None
    _clock: Clock
    _damaged: dict[str, str]
    _chosen: _Chosen | None = None
    _random: Mapping[str, Any] | None = None

    def _alarmed(self) -> None:
        """Watch over the end of the step."""
        raise NotImplementedError

    # -- choose ------------------------------------------------------------------------------------

    def choose(self, extra_states: MutableMapping[str, Any], *, trust: Trust = "any", step: int | None = None) -> int:
        """Choose the checkpoint that :meth:`resume` will load, and load some of its extra states now.

        For a trainer that has to know step and settings before it makes the models. The states of the run may be
        filled in between the two calls. :meth:`resume` then loads this checkpoint and no other. If it is damaged,
        :meth:`resume` raises its error on all ranks; another ``choose`` passes it over.

        Args:
            extra_states: keys of ``states["extra_states"]`` to load, as :func:`bcp.load` does: objects with
                ``load_state_dict`` get their state, other values are replaced.
            trust: as for :meth:`resume`.
            step: as for :meth:`resume`.

        Returns:
            The step of the checkpoint; 0 if there is none.

        Raises:
            RunTakenError: the folder belongs to another run.
            CorruptError: there are checkpoints, and all that were tried are damaged.
            StorageError: no checkpoint can be read, and one may be whole.
            MismatchError: the checkpoint lacks a key of ``extra_states``.
            NotACheckpointError: there is no checkpoint of ``step``.
            UncommittedError: the checkpoint of ``step`` is not committed.
            InputError: as for :meth:`resume`.

        Example::

            run = bcp.Run("ckpt/run-7", states := {})
            trainer = {"epoch": 0}
            step = run.choose(trainer)
            states |= {"model": make_model(trainer["epoch"]), "extra_states": trainer}
            assert run.resume() == step

        """
        return drive(self._choose(extra_states, trust, step), f"choose a checkpoint at {shown(self._url)}")

    async def achoose(
        self, extra_states: MutableMapping[str, Any], *, trust: Trust = "any", step: int | None = None
    ) -> int:
        """Do the same from a coroutine."""
        return await adrive(self._choose(extra_states, trust, step), f"choose a checkpoint at {shown(self._url)}")

    def _choose(self, extra_states: MutableMapping[str, Any], trust: Trust, step: int | None) -> Body[int]:
        self._refuse_if_resumed("choose")
        if not isinstance(extra_states, MutableMapping):
            raise InputError(f"choose({type(extra_states).__name__}): pass a dict of extra states to load")
        goal = _goal(trust, step, fresh=False)
        found = yield from self._first(goal, partial(self._read, extra_states), exactly=step is not None)
        self._chosen = _Chosen(goal, found)
        return found.step

    async def _read(self, extra_states: MutableMapping[str, Any], step: int, name: str) -> LoadResult:
        """Load some extra states of a checkpoint. Those that the caller has not asked for are dropped."""
        values: dict[str, Any] = dict(extra_states)
        result = await self._loaded(step, name, {"extra_states": values})
        for key, value in values.items():
            if key in extra_states and extra_states[key] is not value:
                extra_states[key] = value
        return result

    # -- resume ------------------------------------------------------------------------------------

    def resume(self, *, trust: Trust = "any", step: int | None = None, fresh: bool = False) -> int:
        """Load the newest committed checkpoint that loads, and return its step; 0 if there is none.

        Call it once, before the first step. From then on the run listens for signals. Every committed folder with the
        name of a step is tried, whoever wrote it: ``step-1000`` as well as ``step-00001000``, and links to folders.
        ``resumed`` and a log line say which checkpoint was chosen, and why others were passed over.

        Pass ``step`` to go back to an earlier checkpoint, whatever its mark. Newer checkpoints stay as they are until
        the run commits its next one, or has its next snapshot in memory. Then they are marked as suspect, so that a
        restart goes on from the new ones; verified ones are pinned besides. The policy deletes them as it deletes
        others. ``fresh`` goes back to the beginning in the same way.

        A save replaces an old checkpoint of its step. A checkpoint that is pinned, verified, or spared as below stays:
        the new one is saved into a folder beside it, with a warning.

        Args:
            trust: ``"any"``: all checkpoints but those that :meth:`mark` called suspect. ``"verified"``: only those
                that it called verified. If there is none, the run begins anew. Then no policy deletes, and no save
                replaces, a checkpoint from before until one of the new ones is verified.
            step: resume from this step and no other; None for the newest.
            fresh: begin anew, whatever is in the folder or was chosen; return 0. A restart of the job must not pass it
                again.

        Raises:
            RunTakenError: the folder belongs to another run.
            CorruptError: there are checkpoints, and all that were tried are damaged.
            StorageError: no checkpoint loads, and one that cannot be read may be whole. Or a host with files of a newer
                snapshot in memory does not answer.
            MismatchError: the states are not those of the checkpoint. Older checkpoints are not tried.
            NotACheckpointError: there is no checkpoint of ``step``.
            UncommittedError: the checkpoint of ``step`` is not committed.
            InputError: the run was resumed already, is closed, or ``step`` is not verified and ``trust`` asks for it.
                Or the arguments contradict each other, or those of :meth:`choose`.

        Example::

            run.resume(step=12_000)  # before the loss rose

        """
        return drive(self._resume(trust, step, fresh=fresh), f"resume the run at {shown(self._url)}")

    async def aresume(self, *, trust: Trust = "any", step: int | None = None, fresh: bool = False) -> int:
        """Do the same from a coroutine."""
        return await adrive(self._resume(trust, step, fresh=fresh), f"resume the run at {shown(self._url)}")

    def _resume(self, trust: Trust, step: int | None, *, fresh: bool) -> Body[int]:
        self._refuse_if_resumed("resume")
        try:
            return (yield from self._resumed(trust, step, fresh=fresh))
        except BaseException:
            if self._tiered is not None:
                yield partial(self._tiered.close, clear=False)  # another run of this process may try it again
            raise

    def _resumed(self, trust: Trust, step: int | None, *, fresh: bool) -> Body[int]:
        goal, began = _goal(trust, step, fresh=fresh), time.monotonic()
        chosen = None if fresh else self._chosen
        check_lazy(self._save_options, self._given_states)
        place = meeting_place(self._ranks.world_size)
        if chosen is None:
            self.resumed = yield from self._first(goal, self._load, exactly=step is not None)
        else:
            if goal not in (ANY, chosen.goal):
                raise InputError(
                    f"resume({goal}) after choose({chosen.goal}): resume() loads what choose() has found; pass the "
                    "arguments to choose()"
                )
            goal = chosen.goal
            self.resumed = yield from self._load_chosen(chosen)
        if self._keeper is not None:
            yield partial(self._keeper.resumed, self.resumed, goal)
        self.resumed = yield from self._settled(self.resumed)
        if self._keeper is not None:
            tell = log.warning if self.resumed.passed_over else log.info
            tell("run at %s: %s", shown(self._url), self.resumed)
        self._saver.resumed(self.resumed)
        self._begin_life(place, began)
        return self.resumed.step

    def _settled(self, resumed: Resumed) -> Body[Resumed]:
        """Give up what is in memory and was not loaded; see that storage gets what was."""
        tiers, keeper = self._tiered, self._keeper
        if tiers is None:
            return resumed
        found = tiers.found if resumed.name.startswith(MEMORY) else None

        async def give_up(uploads: Collection[tuple[str, str]]) -> Settled:
            keeper = _of(self._keeper)
            await keeper.uploads.end(uploads)
            folders, branch = await keeper.listed_again(resumed.step), await keeper.uploads.branch()
            is_durable = found is not None and keeper.has(found.step)
            return Settled(is_durable, branch or "", tuple(folders))

        settled: Settled = yield partial(tiers.settle, self._ranks, keep=found is not None, give_up=give_up)
        resumed = replace(resumed, folders=tuple(dict.fromkeys((*resumed.folders, *settled.folders))))
        if found is None:
            return resumed
        if keeper is not None and not settled.durable:
            self._saver.metrics[found.step] = found.metrics
            ended = partial(_adopted, tiers, keeper, found.step, found.place, found.operation)
            self._saves.drains.adopt(found.step, ended, self._saves.begin_keeping)
        if settled.durable:
            tiers.became_durable(found.step, found.operation)
        return replace(resumed, name=found.place, hosts=found.hosts, from_storage=settled.from_storage)

    def _load_chosen(self, chosen: _Chosen) -> Body[Resumed]:
        """Load the checkpoint that was chosen, and no other. One that is damaged is not chosen again."""
        found = chosen.found

        async def candidates() -> Candidates:
            return chosen.candidates

        try:
            yield partial(self._tried, candidates, self._load, exactly=True)
        except CheckpointError as error:
            self._damaged[found.name] = f"{type(error).__name__}: {error}"
            self._chosen = None
            raise
        return found

    def _first(self, goal: Goal, load: Load, *, exactly: bool) -> Body[Resumed]:
        """Load the first checkpoint that loads. Rank 0 takes the folder."""
        if self._ranks.rank == 0 and self._keeper is None:  # else an earlier call has failed, or chosen
            self._keeper = Keeper(self._folder(), self._keep, self._roles())
        if self._tiered is not None:
            yield partial(self._tiered.find, self._ranks, self._branch)
        list_them = partial(self._candidates, goal) if self._keeper else _unasked
        found: Resumed = yield partial(self._tried, list_them, load, exactly=exactly or self._role is not None)
        if self._damaged and not found.name and not goal.fresh:  # as if they had been tried now
            raise CorruptError(
                f"none of the checkpoints at {shown(self._url)} can be loaded, and the run does not begin anew by "
                f"itself: repair one, or pass fresh=True to resume(). {found}"
            )
        return found

    async def _branch(self) -> str | None:
        """Return the branch of the run; asked on rank 0."""
        return await _of(self._keeper).uploads.branch()

    async def _candidates(self, goal: Goal) -> Candidates:
        """List the checkpoints to try, on rank 0; each snapshot in memory before checkpoints that are not newer."""
        keeper = _of(self._keeper)
        listing = await keeper.candidates(self._run_id, goal, self._damaged)
        if self._tiered is None or goal != ANY:
            return listing
        steps, names, others = [*listing.steps], [*listing.names], [*listing.others]
        for snapshot in reversed(self._tiered.snapshots):
            name = f"{MEMORY}{snapshot.operation}"
            if name in self._damaged:
                others.append(Choice(snapshot.step, self._damaged[name], name))
            elif not await keeper.is_suspect(snapshot.step, snapshot.operation):
                place = next((place for place, step in enumerate(steps) if step <= snapshot.step), len(steps))
                steps.insert(place, snapshot.step)
                names.insert(place, name)
        return msgspec.structs.replace(listing, steps=tuple(steps), names=tuple(names), others=tuple(others))

    async def _tried(self, candidates: Callable[[], Awaitable[Candidates]], load: Load, *, exactly: bool) -> Resumed:
        """Load the first candidate that loads on every rank; see :func:`bcp.runs.resuming.resume`."""
        try:
            return await resume(
                self._ranks,
                f"resume the run at {shown(self._url)}",
                self._load_options.timeout,
                candidates,
                load,
                look=lambda: _of(self._keeper).look(),
                exactly=exactly,
            )
        except CorruptError as error:
            if self._role is not None and self._keeper is not None:
                await self._keeper.distrust(error)
            raise

    def _begin_life(self, place: Store | None, began: float) -> None:
        """Listen for signals, and count steps from the loaded one on."""
        step, life, ranks = self.resumed.step, self.resumed.life, self._ranks
        rank, size, waits = ranks.rank, ranks.world_size, ANSWER_SECONDS
        self._random = RngState().state_dict() if self.resumed.name else None
        self._meetings = Meetings(rank, size, place, life, self._preemption, timeout=waits, on_alarm=self._alarmed)
        self._clock.start(step, restart=time.monotonic() - began if step else 0.0)
        self._saves.step = step or None
        self._schedule.renew(ranks, step)

    def _roles(self) -> Roles | None:
        """Return what this role asks about the others; None if the run has no roles."""
        role, options = self._role, self._save_options
        if role is None:
            return None
        above = self._url.removesuffix(f"/{role.name}")
        return roles_at(role, above, options.storage_options, options.retries)

    async def _load(self, step: int, name: str) -> LoadResult:
        states = self._states.now()
        result = await self._loaded(step, name, states)
        self._states.take(states, tells=self._ranks.rank == 0)
        return result

    async def _loaded(self, step: int, name: str, states: States) -> LoadResult:
        options = replace(self._load_options, step=step)
        place: Path = f"{self._url}/{name}"
        found = None
        if self._tiered is not None and name.startswith(MEMORY):
            found = await self._tiered.open(name.removeprefix(MEMORY))
            read_bytes = max(options.read_bytes, READ_BYTES)
            options, place = replace(options, storage_options={}, record=False, read_bytes=read_bytes), found.storage
        call = load_call(place, states, self._framework, None, options, self._given)
        try:
            result = await call.run()
        except UncommittedError as error:
            if self._keeper is not None and self._keeper.has(step):
                raise UncommittedError(lost_metadata(f"{shown(self._url)}/{name}")) from error
            raise
        except (CorruptError, MismatchError) as error:
            error.add_note(f"in the load of {shown(self._url)}/{name}")
            if found is not None and self._tiered is not None:
                self._tiered.is_stale(found.operation, error)
            raise
        if found is not None and self._tiered is not None:
            self._tiered.loaded(found)
        return result

    def reapply_random_states(self) -> None:
        """Set the random states again as :meth:`resume` has set them, on this rank; nothing after a new start.

        For a trainer that draws random numbers between the resumption and its next step, as an iterator over a shuffled
        dataset does. Call it where the uninterrupted job would go on.

        Raises:
            InputError: :meth:`resume` was not called, or the run is closed.

        Example::

            step = run.resume()
            batches = iter(loader)  # draws a seed
            run.reapply_random_states()

        """
        _ = self._started
        if self._random is not None:
            RngState().load_state_dict(self._random)

    def _refuse_if_resumed(self, call: str) -> None:
        self._refuse_in_callback(call)
        if self._meetings is not None:
            raise InputError(f"{call}(): resume() was called already; make a new Run to resume again")
        self._refuse_if_closed()


def _goal(trust: Trust, step: int | None, *, fresh: bool) -> Goal:
    """Return what a caller asks for. Raises InputError for words and numbers that are none, or a contradiction."""
    if trust not in ("any", "verified"):
        raise InputError(f"trust={trust!r}: pass 'any' or 'verified'")
    if not isinstance(fresh, bool):
        raise InputError(f"fresh={fresh!r}: pass True or False")
    goal = Goal(trust, None if step is None else whole_step(step), fresh)
    if fresh and goal != Goal(fresh=True):
        raise InputError(f"resume({goal}): fresh=True loads no checkpoint; leave the others out")
    return goal


async def _adopted(tiers: Tiered, keeper: Keeper, step: int, place: str, operation: str) -> bool:
    """Wait until the snapshot that was loaded has ended; return whether it is durable."""
    is_durable = await keeper.uploads.ended(place, operation)
    if is_durable:
        tiers.became_durable(step, operation)
    return is_durable


async def _unasked() -> Candidates:
    raise AssertionError("only rank 0 lists checkpoints")


def _of(keeper: Keeper | None) -> Keeper:
    """Return the keeper, which rank 0 has."""
    assert keeper is not None  # noqa: S101 -- called on rank 0 only
    return keeper
