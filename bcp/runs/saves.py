"""The saves of a run in the background: one after the other, and no failure is lost."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from bcp import _bridge
from bcp._bridge import Background
from bcp._calls import Call
from bcp._log import log
from bcp.errors import InputError, RunTakenError
from bcp.events import SaveReport
from bcp.pipeline import in_thread

__all__ = ["OnCommit", "OnFailure", "Saves", "nothing"]

OnCommit = Callable[[int, SaveReport], object]
OnFailure = Callable[[int, BaseException], object]


def nothing(_step: int, _outcome: object) -> None:
    """Do nothing, in the place of a callback."""


class Saves:
    """Begins saves, records their outcome, and does the housekeeping after each commit.

    Attributes:
        step: the step of the newest save that has begun; None before the first.
        begun: when it began, in monotonic seconds.
        stall: seconds for which the newest committed save held training back.
        durable: seconds from its call to its commit.
    """

    def __init__(
        self,
        housekeeping: Callable[[int], Awaitable[None]],
        on_commit: OnCommit,
        on_failure: OnFailure,
        tolerate: int,
    ) -> None:
        """Remember the callbacks.

        Args:
            housekeeping: awaited on bcp's loop after each commit.
            on_commit: the user's; called in a thread.
            on_failure: the user's; called in a thread.
            tolerate: so many failed saves in a row are only logged.

        """
        self._housekeeping, self._on_commit, self._on_failure = housekeeping, on_commit, on_failure
        self._tolerate, self._failed_in_a_row = tolerate, 0
        self._tolerated: BaseException | None = None
        self._newest: Background[SaveReport] | None = None
        self._keeping: set[Background[None]] = set()
        self._order = anyio.Lock()
        self._taken: RunTakenError | None = None
        self.step: int | None = None
        self.begun: float | None = None
        self.stall = self.durable = 0.0

    @property
    def running(self) -> bool:
        """Whether the newest save has not ended."""
        return self._newest is not None and not self._newest.done()

    def begin(self, step: int, call: Call[SaveReport]) -> Background[SaveReport]:
        """Begin a save. The one before it has ended, and its outcome was taken."""
        self.step, self.begun, self._tolerated = step, time.monotonic(), None
        self._newest = _bridge.start(partial(self._save, step, call), what=call.what)
        return self._newest

    def raise_failure(self, *, last: bool = False) -> None:
        """Raise the error of the newest save, once. Errors of a tolerated number of saves in a row are logged.

        An :class:`InputError` is raised always: the next save would fail with it as well.

        Args:
            last: no save follows, so that no error is tolerated, and one that was logged is raised.

        """
        if self._taken is not None:
            raise self._taken
        if last and self._tolerated is not None:
            raise self._tolerated
        if self._newest is None or not self._newest.done():
            return
        error, self._newest = self._newest.exception(), None
        if error is None:
            self._failed_in_a_row = 0
            return
        if last:
            raise error
        self._failed_in_a_row += 1
        if self._failed_in_a_row > self._tolerate or isinstance(error, InputError):
            raise error
        self._tolerated = error
        log.warning(
            "the save of step %s failed, %d of %d tolerated in a row; training goes on",
            self.step,
            self._failed_in_a_row,
            self._tolerate,
            exc_info=error,
        )

    async def ended(self) -> None:
        """Wait until the newest save has ended, well or not."""
        if self._newest is not None:
            await in_thread(self._newest.wait_ended)

    async def kept(self) -> None:
        """Wait until the housekeeping after all ended saves is done."""
        for keeping in list(self._keeping):
            await in_thread(keeping.wait_ended)

    async def _save(self, step: int, call: Call[SaveReport], started: Callable[[], None]) -> SaveReport:
        """Save, begin the housekeeping, and call the callbacks."""
        try:
            report = await call.run(on_snapshot=started, goes_on=True)
        except BaseException as error:
            await self.failed(step, error)
            raise
        self.stall, self.durable = report.blocking_seconds + report.step_wait_seconds, report.seconds
        await self.committed(step, report)
        return report

    async def failed(self, step: int, error: BaseException) -> None:
        """Call the user's callback for a failed save."""
        with anyio.CancelScope(shield=True):
            await self._tell(self._on_failure, step, error)

    async def committed(self, step: int, report: SaveReport) -> None:
        """Begin the housekeeping after a commit, and call the user's callback."""
        keeping = _bridge.start(lambda _: self._keep(step), what=f"housekeeping after step {step}")
        self._keeping = {each for each in self._keeping if not each.done()} | {keeping}
        await self._tell(self._on_commit, step, report)

    async def _keep(self, step: int) -> None:
        """Do the housekeeping, one commit after the other. Its failure costs no checkpoint, so training goes on."""
        async with self._order:
            try:
                await self._housekeeping(step)
            except RunTakenError as error:  # this job must end: two jobs would delete each other's checkpoints
                self._taken = error
            except Exception as error:  # noqa: BLE001 -- see above
                log.error("the housekeeping after step %d failed; the next commit repeats it", step, exc_info=error)

    @staticmethod
    async def _tell(callback: Callable[..., object], *values: object) -> None:
        """Call a user's callback in a thread; log its own error."""
        try:
            await in_thread(callback, *values)
        except Exception as error:  # noqa: BLE001 -- a callback must not fail a committed save
            log.error("the callback %r failed", callback, exc_info=error)
