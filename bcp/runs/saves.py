"""The saves of a run in the background, one after the other, and its standby snapshot.

The standby snapshot is a save whose upload waits until a step end fails to come.

After a stop signal, training may hang in an evaluation, a compilation or a collective until the process is killed. A
run with ``standby_steps=`` keeps a recent snapshot in host memory for this case. It is a whole save, divided and
staged, whose parts wait before the stage ``upload``. The next save drops it. The watchdog releases it when the notice
is nearly over and no step has ended.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import anyio

from bcp._calls import SaveCall
from bcp._log import log
from bcp.errors import BcpError, ExistsError, InputError, PeerError, RunTakenError
from bcp.events import SaveResult
from bcp.options import Graph, SaveOptions
from bcp.pipeline import Stage
from bcp.runs.drains import Drains
from bcp.runs.outcomes import Outcomes
from bcp.runtime import bridge as _bridge
from bcp.runtime.bridge import Background
from bcp.runtime.event_loop import words_of
from bcp.runtime.process import process_lock
from bcp.runtime.threads import in_thread
from bcp.tiers.saving import NoRoomError

__all__ = ["OnCommit", "OnFailure", "Saves", "Standby", "Watchdog", "nothing"]

T = TypeVar("T")
OnCommit = Callable[[int, SaveResult], object]
OnFailure = Callable[[int, BaseException], object]

TELL_SECONDS = 10.0
"""Between two lines about a save that the end of a run waits for."""


def nothing(_step: int, _outcome: object) -> None:
    """Do nothing, in the place of a callback."""


_telling: ContextVar[tuple[Saves, ...]] = ContextVar("bcp callbacks around", default=())
"""Those whose callbacks this code is called by."""


class Saves:
    """Begins saves, records their outcome, and does the housekeeping after each commit.

    Attributes:
        step: the step of the newest save that has begun; None before the first.
        begun: when it began, in monotonic seconds.
        stall: seconds for which the newest committed save held training back.
        durable: seconds from its call to its commit.
        drains: the snapshots that agents make durable.
        outcomes: the saves whose outcome the trainer has not asked for.
    """

    def __init__(
        self,
        housekeeping: Callable[[int], Awaitable[None]],
        on_commit: OnCommit,
        on_failure: OnFailure,
        tolerate: int,
        is_first: Callable[[], bool],
        look: Callable[[], Awaitable[None]],
    ) -> None:
        """Remember the callbacks.

        Args:
            housekeeping: awaited on bcp's loop after each commit.
            on_commit: the user's; called in a thread.
            on_failure: the user's; called in a thread.
            tolerate: so many failed saves in a row are only logged.
            is_first: whether this is rank 0, which warns of common events for all ranks.
            look: behind a snapshot in memory; sees whether the job still has the run's folder, and an agent.

        """
        self._is_first, self._look_behind = is_first, look
        self._housekeeping, self._on_commit, self._on_failure = housekeeping, on_commit, on_failure
        self._tolerate, self._failed_in_a_row = tolerate, 0
        self._tolerated: BaseException | None = None
        self._newest: Background[SaveResult] | None = None
        self._keeping: set[Background[None]] = set()
        self._looking: Background[None] | None = None
        self.drains = Drains(self.committed, self.failed)
        self._order = anyio.Lock()
        self._taken: RunTakenError | None = None
        self.outcomes = Outcomes()
        self.step: int | None = None
        self.begun: float | None = None
        self.stall = self.durable = 0.0

    @property
    def running(self) -> bool:
        """Whether the newest save still needs this process."""
        return self._newest is not None and not self._newest.done() and not self._newest.handed_over

    def fits(self, deadline: float | None) -> bool:
        """Return whether another save can be durable after the running one before ``deadline``.

        The deadline is a ``time.monotonic()``; None for none. True where nothing is lost by trying.
        """
        if deadline is None or not self.running or not self.durable or self.begun is None:
            return True
        now = time.monotonic()
        return max(now, self.begun + self.durable) + self.durable < deadline

    def begin(self, step: int, call: SaveCall[SaveResult]) -> Background[SaveResult]:
        """Begin a save. The one before it has ended, and its outcome was taken."""
        self.step, self.begun, self._tolerated = step, time.monotonic(), None
        self.outcomes.begun(step)
        self._newest = _bridge.start(partial(self._save, step, call), name=call.name)
        self._newest.progress = call.progress
        return self._newest

    def begin_kept(
        self,
        step: int,
        call: SaveCall[SaveResult],
        durable: Callable[[SaveResult], Awaitable[SaveResult]],
        *,
        stays: bool,
    ) -> Background[SaveResult]:
        """Begin a save into memory, which agents make durable. The one before it has its snapshot there.

        It fails with a :class:`~bcp.tiers.saving.NoRoomError` on all ranks if the step is to be saved to storage
        instead, by :meth:`begin`.

        Args:
            step: of the save.
            call: ends when all ranks have their snapshots in memory.
            durable: waits until the checkpoint is durable.
            stays: in memory, so that nobody waits for that.

        """
        self.step, self.begun, self._tolerated = step, time.monotonic(), None
        if not stays:
            self.outcomes.begun(step)
        keep = partial(self._keep_and_drain, step, call, durable, stays)
        save = _bridge.start_handed_over(keep, name=f"save of step {step}")
        save.progress = call.progress
        self._newest = save
        if not stays:
            self.drains.begin(step, save)
        return save

    def raise_failure(self, *, last: bool = False) -> None:
        """Raise the error of the newest save, once. Errors of a tolerated number of saves in a row are logged.

        An :class:`InputError` is raised always: the next save would fail with it as well. A snapshot in memory that has
        not become durable ends no training: its step is told to ``on_failure``.

        Args:
            last: no save follows, so that no error is tolerated, and one that was logged is raised.

        """
        if self._taken is not None:
            raise self._taken
        if last and self._tolerated is not None:
            tolerated, self._tolerated = self._tolerated, None
            raise tolerated
        if self._newest is None or self.running:
            return
        if self._newest.handed_over:
            self._failed_in_a_row = 0
            return
        error, self._newest = self._newest.exception(), None
        if error is None:
            self._failed_in_a_row = 0
            return
        if last:
            raise error
        if isinstance(error, ExistsError):  # a job that was displaced meanwhile was quicker by some milliseconds
            self.warn("step %s was saved by another job, and is not saved again: %s", self.step, error)
            return
        self._failed_in_a_row += 1
        if self._failed_in_a_row > self._tolerate or isinstance(error, InputError):
            raise error
        self._tolerated = error
        self.warn(
            "the save of step %s failed, %d of %d tolerated in a row; training goes on",
            self.step,
            self._failed_in_a_row,
            self._tolerate,
            exc_info=error,
            is_own=not isinstance(error, PeerError),
        )

    async def ended(self) -> None:
        """Wait until the newest save needs this process no more, or has failed. An interrupt ends only the waiting."""
        if self._newest is not None:
            await self._newest.settled()

    async def ended_at_last(self, again: str) -> None:
        """Do the same at the end of a run; tell what is waited for.

        Args:
            again: what a further interrupt does, for one that was interrupted: it is told at once. "" for any other
                end, which tells after some seconds.

        """
        newest, waits = self._newest, 0.0 if again else TELL_SECONDS
        while newest is not None and self.running:
            with anyio.move_on_after(waits):
                await newest.settled()
                return
            advice = "" if waits else f". {again}"
            self.warn("waiting until step %s is durable: %s%s", self.step, words_of(newest), advice)
            waits = TELL_SECONDS

    async def give_up(self) -> None:
        """Cancel the newest save, and wait until its files are removed."""
        if self._newest is not None and self.running:
            self.warn("the save of step %s is given up; its files are removed", self.step)
            self._newest.cancel()
            await self._newest.ended()

    async def kept(self) -> None:
        """Wait until the housekeeping after all ended saves is done."""
        for keeping in list(self._keeping):
            await keeping.ended()

    async def between_keepings(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work on the folder while no housekeeping is under way."""
        async with self._order:
            return await work()

    async def _save(self, step: int, call: SaveCall[SaveResult], started: Callable[[], None]) -> SaveResult:
        """Save, begin the housekeeping, and call the callbacks."""
        try:
            result = await call.run(started)
        except BaseException as error:
            if isinstance(error, RunTakenError):
                self._taken = error
            await self.failed(step, error)
            raise
        self.stall, self.durable = result.blocking_seconds + result.step_wait_seconds, result.seconds
        self.drains.stored(step)
        await self.committed(step, result)
        return result

    async def _keep_and_drain(
        self,
        step: int,
        call: SaveCall[SaveResult],
        durable: Callable[[SaveResult], Awaitable[SaveResult]],
        stays: bool,  # noqa: FBT001 -- for partial
        started: Callable[[], None],
        handed_over: Callable[[], None],
    ) -> SaveResult:
        """Keep a snapshot in memory, hand it over to agents, and see it become durable."""
        try:
            kept = await call.run(started)
        except NoRoomError:  # the trainer's thread, which waits, begins the other save
            raise
        except BaseException as error:
            await self.failed(step, error)
            raise
        self.stall, self.durable = kept.blocking_seconds + kept.step_wait_seconds, kept.seconds
        drained = self.drains.kept(step, kept, durable, stays=stays)
        handed_over()
        if self._looking is None or self._looking.done():  # one look at a time: storage may be silent
            self._looking = _bridge.start(lambda _: self._look(), name="look whose the run is", daemon=True)
        return kept if stays else await drained()

    async def _look(self) -> None:
        """Look behind a snapshot. If the job has the run's folder no more, the trainer's next call raises the error."""
        try:
            await self._look_behind()
        except RunTakenError as error:
            self._taken = error
        except BcpError as error:
            log.warning("the run's ledger cannot be read, and training goes on: %s", error)

    def stop(self) -> None:
        """Wait for agents no more, and look no more: the run is over."""
        self.drains.stop()
        if self._looking is not None:
            self._looking.cancel()

    async def failed(self, step: int, error: BaseException) -> None:
        """Call the user's callback for a failed save."""
        self.outcomes.ended(step, is_durable=False)
        with anyio.CancelScope(shield=True):
            await self._tell(self._on_failure, step, error)

    async def committed(self, step: int, result: SaveResult) -> None:
        """Begin the housekeeping after a commit, and call the user's callback."""
        self.outcomes.ended(step, is_durable=True)
        self.begin_keeping(step)
        await self._tell(self._on_commit, step, result)

    def begin_keeping(self, step: int) -> None:
        """Begin the housekeeping after a commit."""
        keeping = _bridge.start(lambda _: self._keep(step), name=f"housekeeping after step {step}")
        self._keeping = {background for background in self._keeping if not background.done()} | {keeping}

    async def _keep(self, step: int) -> None:
        """Do the housekeeping, one commit after the other. Its failure costs no checkpoint, so training goes on."""
        async with self._order:
            try:
                await self._housekeeping(step)
            except RunTakenError as error:  # this job must end: two jobs would delete each other's checkpoints
                self._taken = error
            except Exception as error:  # noqa: BLE001 -- see above
                log.error("the housekeeping after step %d failed; the next commit repeats it", step, exc_info=error)

    @property
    def is_telling(self) -> bool:
        """Whether this code is called by a callback of one of the saves."""
        return self in _telling.get()

    def warn(self, words: str, *values: object, is_own: bool = False, exc_info: BaseException | None = None) -> None:
        """Log a warning on rank 0, and on the rank of the cause; other ranks, which say the same, log it as info."""
        tell = log.warning if is_own or self._is_first() else log.info
        tell(words, *values, exc_info=exc_info)

    async def _tell(self, callback: Callable[..., object], *values: object) -> None:
        """Call a user's callback in a thread; log its own error."""
        token = _telling.set((*_telling.get(), self))
        try:
            await in_thread(callback, *values)
        except Exception as error:  # noqa: BLE001 -- a callback must not fail a committed save
            log.error("the callback %r failed", callback, exc_info=error)
        finally:
            _telling.reset(token)


PARTS_HELD = 1 << 16
"""Parts that may wait at once: 2 TiB of them per rank."""
RESERVE = 0.5
"""Share of the notice that is kept for a standby upload, unless saves are known to take longer."""


LOOK_SECONDS = 0.25
"""Between two looks at the deadline after a stop signal."""


class Standby:
    """At most one save that is held back before its upload."""

    def __init__(self) -> None:
        self._gate: Future[None] = Future()
        self._held: Background[SaveResult] | None = None
        self._lock = process_lock()
        self.step: int | None = None
        self.released = False

    def options(self, options: SaveOptions) -> SaveOptions:
        """Return the options of a save that waits before its upload."""
        gate: Future[None] = Future()
        gate.set_running_or_notify_cancel()  # cancelling one waiter must not cancel the others
        self._gate = gate

        async def hold(part: Any) -> Any:
            await asyncio.wrap_future(gate)
            return part

        def edit(graph: Graph) -> Graph:
            return options.edit(graph).before("upload", Stage("hold", hold, workers=PARTS_HELD))

        return replace(options, edit=edit, record=False, budget_bytes=None)

    @property
    def holds(self) -> bool:
        """Whether there is a snapshot that was not given up; the same on all ranks at one step."""
        return self._held is not None

    def begin(self, step: int, call: SaveCall[SaveResult], saves: Saves) -> Background[SaveResult]:
        """Begin to hold a snapshot; once it is written, it counts among the saves."""
        self.step, self.released = step, False

        async def hold(started: Callable[[], None]) -> SaveResult:
            try:
                result = await call.run(started)
            except Exception as error:
                if self.released:
                    await saves.failed(step, error)
                raise
            await saves.committed(step, result)
            return result

        self._held = _bridge.start(hold, name=call.name, daemon=True)
        return self._held

    def release(self) -> bool:
        """Let the held snapshot be written; from any thread. Return whether there was one."""
        with self._lock:
            if self._held is None or self._held.done() or self.released:
                return False
            self.released = True
        self._gate.set_result(None)
        return True

    async def drop(self) -> int | None:
        """Give the held snapshot up, or wait until it is written if it was released.

        Returns:
            The step of a snapshot that was given up.

        """
        with self._lock:
            held, self._held = self._held, None
        if held is None:
            return None
        if not self.released:
            held.cancel()
        await in_thread(held.wait_ended)
        error = held.exception()
        if not self.released:
            return self.step
        if error is not None:
            log.warning("the standby snapshot of step %s could not be written", self.step, exc_info=error)
        return None


class Watchdog:
    """A thread that releases the standby snapshot when the notice is nearly over and no step has ended."""

    def __init__(self, release: Callable[[], bool], deadline: Callable[[], float | None], needed: float) -> None:
        """Start to watch.

        Args:
            release: writes the snapshot; returns whether there is one.
            deadline: returns when the process is killed, in monotonic seconds, or None while that is unknown. A second
                notice may make it sooner.
            needed: seconds that a save is known to take; 0 if that is unknown.

        """
        self._release, self._deadline, self._needed = release, deadline, needed
        self._step_ended = threading.Event()
        threading.Thread(target=self._watch, name="bcp watchdog", daemon=True).start()

    def step_ended(self) -> None:
        """Stop watching: the loop has come to the end of a step."""
        self._step_ended.set()

    def _watch(self) -> None:
        known = fires = math.inf
        while time.monotonic() < fires:
            told, now = self._deadline(), time.monotonic()
            if told is not None and told < known:
                known, fires = told, told - max(RESERVE * (told - now), 2 * self._needed)
            if self._step_ended.wait(min(max(0.0, fires - now), LOOK_SECONDS)):
                return
        if self._release():
            log.warning("no step has ended since the stop signal: the standby snapshot is written")
