"""The question whether a save is due: policies of steps on each rank, policies of clocks on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from bcp.policies.save import Costs, Moment, SavePolicy, divided
from bcp.protocols import Coordinator
from bcp.runs.calls import Body
from bcp.runs.plans import Clock, Plan, Plans, agreed, horizon_of, next_plan
from bcp.runs.saves import Saves

__all__ = ["Schedule"]


class Schedule:
    """Says at which steps a run saves."""

    def __init__(
        self,
        policy: SavePolicy | None,
        while_saving: Literal["wait", "skip"],
        patience: float,
        clock: Clock,
        saves: Saves,
        costs: Callable[[], Costs],
    ) -> None:
        """Divide the policy into the part that looks at a clock and the rest; without a policy no save is due."""
        self._stepwise, self._timed = (None, None) if policy is None else divided(policy)
        self._while_saving, self._patience = while_saving, patience
        self._clock, self._saves, self._costs = clock, saves, costs
        self._plans = Plans(patience)

    def due(self, ranks: Coordinator, step: int) -> Body[bool]:
        """Ask the policies; one that looks at a clock is asked on rank 0, which announces a step."""
        due = self._timed is not None and (yield from self._plans.due(step))
        if not due and (self._stepwise is None or not self._stepwise.due(self._moment(0))):
            return False
        if self._while_saving == "wait":
            return True
        busy = yield partial(agreed, ranks, f"skip step {step}", self._patience, lambda: self._saves.running)
        return not busy

    def forget(self) -> None:
        """Drop the plan of the next save: a save begins before it."""
        self._plans.forget()

    def renew(self, ranks: Coordinator, step: int) -> None:
        """Ask rank 0 for the next plan, if a policy looks at a clock."""
        if self._timed is not None:
            self._plans.renew(ranks, step, self._next_plan)

    async def ended(self) -> None:
        """Wait until no plan is being made."""
        await self._plans.ended()

    def _next_plan(self) -> Plan:
        clock = self._clock
        horizon = horizon_of(clock.steps, clock.step_seconds, busy=self._saves.running)
        timed = self._timed
        return next_plan(clock.step, horizon, lambda steps: timed is not None and timed.due(self._moment(steps)))

    def _moment(self, ahead: int) -> Moment:
        """Return the input of a policy, so many steps from now."""
        seconds = self._clock.seconds + ahead * self._clock.step_seconds
        begun = None if self._saves.begun is None else self._saves.begun - self._clock.began
        saved_by_then = begun is not None and 0 < self._saves.durable < seconds - begun
        return Moment(
            step=self._clock.step + ahead,
            seconds=seconds,
            last_step=self._saves.step,
            last_seconds=begun,
            saving=self._saves.running and not (ahead and saved_by_then),
            costs=self._costs(),
        )
