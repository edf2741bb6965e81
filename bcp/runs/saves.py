"""The saves of a run in the background: one at a time, and no failure is lost."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from bcp import _bridge
from bcp._bridge import Background
from bcp._calls import Call
from bcp._log import log
from bcp.events import SaveReport
from bcp.pipeline import in_thread

__all__ = ["OnCommit", "OnFailure", "Saves"]

OnCommit = Callable[[int, SaveReport], object]
OnFailure = Callable[[int, BaseException], object]


class Saves:
    """Begins saves, remembers how they ended, and does the housekeeping after each commit.

    Attributes:
        step: the step of the newest save that has begun; None before the first.
        begun: when that was, in monotonic seconds.
        stall: seconds for which the newest ended save held training back.
        durable: seconds from its call to its commit.
    """

    def __init__(
        self, after: Callable[[int, SaveReport], Awaitable[None]], on_commit: OnCommit, on_failure: OnFailure
    ) -> None:
        """Know what is to be called on bcp's loop after a commit, and the user's callbacks, which get a thread."""
        self._after, self._on_commit, self._on_failure = after, on_commit, on_failure
        self._running: Background[SaveReport] | None = None
        self._keeping: set[Background[None]] = set()
        self._order = anyio.Lock()
        self.step: int | None = None
        self.begun: float | None = None
        self.stall = self.durable = 0.0

    @property
    def running(self) -> bool:
        """Whether the newest save has not ended."""
        return self._running is not None and not self._running.done()

    def begin(self, step: int, call: Call[SaveReport]) -> Background[SaveReport]:
        """Begin a save; the earlier one has ended and been taken."""
        self.step, self.begun = step, time.monotonic()
        self._running = _bridge.start(partial(self._save, step, call), what=call.what)
        return self._running

    def failure(self) -> BaseException | None:
        """Return the error of the newest save, once; None if it runs or went well."""
        if self._running is None or not self._running.failed():
            return None
        error = self._running.exception()
        self._running = None
        return error

    async def ended(self) -> None:
        """Wait until the newest save has ended, well or not."""
        if self._running is not None:
            await in_thread(self._running.wait_ended)

    async def kept(self) -> None:
        """Wait until the housekeeping of all saves has ended."""
        for keeping in list(self._keeping):
            await in_thread(keeping.wait_ended)

    async def _save(self, step: int, call: Call[SaveReport], started: Callable[[], None]) -> SaveReport:
        """Save; tell the callbacks; let the housekeeping begin."""
        try:
            report = await call.run(on_snapshot=started, goes_on=True)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self._told(self._on_failure, step, error)
            raise
        self.stall, self.durable = report.blocking_seconds + report.step_wait_seconds, report.seconds
        keeping = _bridge.start(lambda _: self._keep(step, report), what=f"housekeeping after step {step}")
        self._keeping = {each for each in self._keeping if not each.done()} | {keeping}
        await self._told(self._on_commit, step, report)
        return report

    async def _keep(self, step: int, report: SaveReport) -> None:
        """Do the housekeeping, one commit after the other; its failure costs no checkpoint and ends no training."""
        async with self._order:
            try:
                await self._after(step, report)
            except Exception as error:  # noqa: BLE001 -- see above
                log.error("the housekeeping after step %d failed; the next save does it again", step, exc_info=error)

    @staticmethod
    async def _told(callback: Callable[..., object], *values: object) -> None:
        """Call a user's callback in a thread; an error of its own is logged."""
        try:
            await in_thread(callback, *values)
        except Exception as error:  # noqa: BLE001 -- a callback shall not fail a save that went well
            log.error("the callback %r failed", callback, exc_info=error)
