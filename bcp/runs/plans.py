"""The saves of policies that look at a clock, so that all ranks agree and no step has a collective.

Policies that look at steps alone give the same answer on every rank. The others are asked on rank 0 only. It computes
a step in the future from the measured seconds of a step, and the ranks learn that step while they train. Rank 0 looks
again when twice as many steps have been measured.

The position of a run, on one rank: its step, and the seconds that it took to come here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence

from bcp._messages.running import Plan
from bcp.protocols import Coordinator
from bcp.runs.calls import Body
from bcp.runtime import bridge as _bridge
from bcp.runtime.bridge import Background

__all__ = ["Clock", "Plan", "Plans", "agreed", "horizon_of", "next_plan", "told"]


class Clock:
    """Counts steps and seconds since the resumption; monotonic, so that no change of the host's time harms.

    Attributes:
        began: the resumption, in monotonic seconds.
        step: the newest step that has ended.
        restart: seconds that the resumption took; 0 for a new run.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.step = self._first = 0
        self.restart = 0.0

    def start(self, step: int, restart: float) -> None:
        """Begin to count behind a step."""
        self.began, self.step, self._first, self.restart = time.monotonic(), step, step, restart

    @property
    def seconds(self) -> float:
        """Seconds since the resumption."""
        return time.monotonic() - self.began

    @property
    def steps(self) -> int:
        """Steps since the resumption."""
        return self.step - self._first

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step since the resumption; 0 before the first one."""
        return self.seconds / self.steps if self.steps else 0.0


FARTHEST = 1_000
"""Most steps until rank 0 looks at its clock again."""
BUSY_SECONDS = 1.0
"""Seconds until rank 0 looks again while a save runs, whose end nobody knows."""


def next_plan(step: int, horizon: int, due_after: Callable[[int], bool]) -> Plan:
    """Return the step of the next save, or the step at which rank 0 looks again.

    Args:
        step: the step that has just ended on rank 0.
        horizon: after so many steps rank 0 looks again; at least 2.
        due_after: whether a save is due so many steps from now.

    Example:
        >>> next_plan(10, 8, lambda steps: 2.0 * steps >= 9.0)
        Plan(step=15, saves=True)

    """
    for ahead in range(horizon + 2):  # the next plan comes too late for the step behind the horizon
        if due_after(ahead):
            return Plan(step + max(2, ahead), saves=True)  # step + 1 may end elsewhere before this answer arrives
    return Plan(step + horizon, saves=False)


def horizon_of(steps: int, step_seconds: float, *, busy: bool) -> int:
    """Return after how many steps rank 0 looks again.

    Args:
        steps: the number of steps over which ``step_seconds`` was measured.
        step_seconds: the mean seconds of a step.
        busy: a save is running, whose end nobody knows.

    Example:
        >>> horizon_of(5_000, 0.25, busy=False), horizon_of(5_000, 0.25, busy=True)
        (1000, 4)

    """
    horizon = min(steps, FARTHEST)
    if busy and step_seconds:
        horizon = min(horizon, math.ceil(BUSY_SECONDS / step_seconds))
    return max(2, horizon)


class Plans:
    """The plan that holds, on one rank, and the next one that is being made."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._asked = 0
        self._stale = False
        self._asking: Background[Plan] | None = None
        self._plan: Plan | None = None

    def due(self, step: int) -> Body[bool]:
        """Return whether a save is planned for this step. All ranks give the same answer."""
        if self._asking is not None and step >= self._asked + 2:  # no plan is for an earlier step
            asking, self._asking = self._asking, None
            plan = asking.wait() if asking.done() else (yield asking.result)
            self._plan, self._stale = None if self._stale else plan, False
        if self._plan is None or step < self._plan.step:
            return False
        plan, self._plan = self._plan, None
        return plan.saves

    def forget(self) -> None:
        """Drop the plan that holds or is being made: a save begins before it. All ranks do so at one step."""
        self._plan, self._stale = None, self._asking is not None

    def renew(self, ranks: Coordinator, step: int, make: Callable[[], Plan]) -> None:
        """Ask rank 0 for the next plan in the background, unless one holds. Called after a save has begun.

        Args:
            ranks: the ranks of the job.
            step: the step that has just ended.
            make: makes the plan; called on rank 0 only.

        """
        if self._plan is not None or self._asking is not None:
            return
        self._asked = step
        operation = ranks.begin(f"plan the save after step {step}", self._patience)

        async def decide(_: Sequence[bytes]) -> bytes:
            return make().encode()

        async def ask(_: Callable[[], None]) -> Plan:
            async with operation as agreement:
                return Plan.decode(await agreement.gather_broadcast("plan", b"", decide), sender=0)

        self._asking = _bridge.start(ask, name=f"plan after step {step}", daemon=True)

    async def ended(self) -> None:
        """Wait until no plan is being made: a rank that leaves earlier would look like one that failed."""
        if self._asking is not None:
            await self._asking.result()


async def told(ranks: Coordinator, name: str, patience: float, answer: Callable[[], Awaitable[bytes]]) -> bytes:
    """Return the answer of rank 0 on all ranks. Collective."""

    async def decide(_: Sequence[bytes]) -> bytes:
        return await answer()

    async with ranks.begin(name, patience) as agreement:
        return await agreement.gather_broadcast("answer", b"", decide)


async def agreed(ranks: Coordinator, name: str, patience: float, answer: Callable[[], bool]) -> bool:
    """Do the same for yes or no."""

    async def asked() -> bytes:
        return b"yes" if answer() else b""

    return bool(await told(ranks, name, patience, asked))
