"""The standby snapshot: a save whose upload waits until a step end fails to come.

After a stop signal, training may hang in an evaluation, a compilation or a collective until the process is killed.
A run with ``standby=`` keeps a recent snapshot in host memory for this case. It is a whole save, divided and staged,
whose parts wait before the stage ``upload``. The next save drops it. The watchdog releases it when the notice is nearly
over and no step has ended.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from bcp import _bridge
from bcp._bridge import Background
from bcp._calls import Call
from bcp._log import log
from bcp.events import SaveReport
from bcp.options import Graph, SaveOptions
from bcp.pipeline import Stage, in_thread
from bcp.runs.saves import Saves

__all__ = ["Standby", "Watchdog"]

PARTS_HELD = 1 << 16
"""Parts that may wait at once: 2 TiB of them per rank."""
RESERVE = 0.5
"""Share of the notice that is kept for a standby upload, unless saves are known to take longer."""


class Standby:
    """At most one save that is held back before its upload."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._gate: Future[None] = Future()
        self._held: Background[SaveReport] | None = None
        self._lock = threading.Lock()
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

    def begin(self, step: int, call: Call[SaveReport], saves: Saves) -> Background[SaveReport]:
        """Begin to hold a snapshot; once it is written, it counts among the saves."""
        self.step, self.released = step, False

        async def hold(started: Callable[[], None]) -> SaveReport:
            try:
                report = await call.run(on_snapshot=started, goes_on=True)
            except Exception as error:
                if self.released:
                    await saves.failed(step, error)
                raise
            await saves.committed(step, report)
            return report

        self._held = _bridge.start(hold, what=call.what, daemon=True)
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

    def __init__(self, release: Callable[[], bool], deadline: float, needed: float) -> None:
        """Start to watch.

        Args:
            release: writes the snapshot; returns whether there is one.
            deadline: when the process is killed, in monotonic seconds.
            needed: seconds that a save is known to take; 0 if that is unknown.

        """
        now = time.monotonic()
        self._release = release
        self._fires = max(now, deadline - max(RESERVE * (deadline - now), 2 * needed))
        self._step_ended = threading.Event()
        threading.Thread(target=self._watch, name="bcp watchdog", daemon=True).start()

    def step_ended(self) -> None:
        """Stop watching: the loop has come to the end of a step."""
        self._step_ended.set()

    def _watch(self) -> None:
        if self._step_ended.wait(max(0.0, self._fires - time.monotonic())):
            return
        if self._release():
            log.warning("no step has ended since the stop signal: the standby snapshot is written")
