"""How often to save: the interval that loses the least training, from measurements of the run itself.

A save takes seconds away from the training. A failure does, too: the work since the last durable checkpoint is lost.
Frequent saves make the first loss large, rare ones the second. Let ``Ts`` be the seconds lost to a save, ``Tf`` those
between failures, ``Tr`` those of a restart. The least training is lost where saves begin

    Tc = Ts + sqrt(2 (Tf + Tr) Ts + Ts^2)

seconds apart (arXiv 2410.18124). The cap on the share of training that saves may take is CheckFreq's (FAST 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bcp.policies.checks import amount
from bcp.policies.save import Costs, Moment, elapsed

__all__ = ["Tuned", "interval"]

HOUR = 3_600.0
"""Seconds of an hour."""


def interval(stall: float, failure_seconds: float, restart: float) -> float:
    """Return the seconds from the beginning of one save to that of the next that lose the least training.

    Args:
        stall: seconds of training that one save takes away.
        failure_seconds: mean seconds between failures.
        restart: seconds that a failure costs beside the work since the last save began: those of the restart, and those
            until a save is durable.

    Raises:
        InputError: a number is negative or not finite, or ``failure_seconds`` is zero.

    Example:
        >>> round(interval(10.0, 11_100.0, 60.0))
        483

    """
    amount("interval", "stall", stall, zero=True)
    amount("interval", "failure_seconds", failure_seconds)
    amount("interval", "restart", restart, zero=True)
    return stall + math.sqrt(2 * (failure_seconds + restart) * stall + stall * stall)


@dataclass(frozen=True, slots=True)
class Tuned:
    """Save as often as loses the least training, from the stall, the lag and the failures that the run has measured.

    The interval is that of :func:`interval`. It is never shorter than the stall divided by ``overhead``, the time until
    a save is durable, and a step. The rate of failures is learned: ``prior_failures`` in ``prior_hours`` are assumed (a
    Gamma prior), and the run's own are added to them. Until a save has shown its stall, ``first`` is the interval.

    Args:
        overhead: the most that saves may take of the training time, above 0 and at most 1.
        restart: seconds of a restart, until the run has measured one.
        prior_hours: hours over which ``prior_failures`` are assumed.
        prior_failures: failures that are assumed beside the observed ones.
        first: seconds until the first save, and between saves as long as no stall is known.

    Raises:
        InputError: a number is not finite or out of its range.

    Example:
        >>> tuned = Tuned(overhead=0.02)
        >>> round(tuned.interval(Costs(stall=10.0, durable=30.0, failures=3, observed_hours=8.0, restart=60.0)))
        770

    """

    overhead: float = 0.05
    restart: float = 120.0
    prior_hours: float = 24.0
    prior_failures: float = 1.0
    first: float = 10.0

    def __post_init__(self) -> None:
        amount("Tuned", "overhead", self.overhead, most=1.0)
        amount("Tuned", "restart", self.restart, zero=True)
        amount("Tuned", "prior_hours", self.prior_hours)
        amount("Tuned", "prior_failures", self.prior_failures)
        amount("Tuned", "first", self.first)

    @property
    def timed(self) -> bool:
        """Whether the answer depends on a clock or on measurements: yes."""
        return True

    def due(self, moment: Moment) -> bool:
        """Return whether the interval has passed since the last save began, or since the run began or was resumed.

        A save that runs when its duration is still unknown is waited for.
        """
        if moment.saving and _measured(moment.costs.durable) == 0:
            return False
        return elapsed(moment) >= self.interval(moment.costs)

    def failure_seconds(self, costs: Costs) -> float:
        """Return the mean seconds between failures, as far as they are known.

        Args:
            costs: measurements of the run.

        Example:
            >>> Tuned(prior_hours=24.0).failure_seconds(Costs(failures=3, observed_hours=8.0)) / 3600
            8.0

        """
        hours = self.prior_hours + _measured(costs.observed_hours)
        return hours * HOUR / (self.prior_failures + _measured(costs.failures))

    def interval(self, costs: Costs) -> float:
        """Return the seconds from the beginning of one save to that of the next.

        Args:
            costs: measurements of the run. A number that is negative or not finite counts as not measured.

        Example:
            >>> Tuned(first=20.0).interval(Costs())
            20.0

        """
        return max(seconds for seconds, _ in self._bounds(costs))

    def explain(self, costs: Costs) -> str:
        r"""Return the interval, its reason and everything that it was computed from, in plain sentences.

        Args:
            costs: measurements of the run.

        Example:
            >>> said = Tuned().explain(Costs(stall=0.5, durable=600.0, step=1.5, observed_hours=12.0))
            >>> print(said.replace(". ", ".\n"))
            Saves begin 10.0 min apart: a save takes so long to be durable.
            The least training would be lost at 6.0 min (stall 500 ms, failures 36.0 h apart, restart 2.0 min).
            Saves may take 5 % of the training: 10.0 s apart at least.
            A step takes 1.5 s.
            Failures: 0 in 12.0 h, and before these 1 in 24.0 h by assumption.

        """
        bounds = self._bounds(costs)
        seconds, why = max(bounds, key=lambda bound: bound[0])
        sentences = [f"Saves begin {_shown(seconds)} apart: {why}."]
        stall, best = _measured(costs.stall), bounds[0][0]
        if stall:
            inputs = f"stall {_shown(stall)}, failures {_shown(self.failure_seconds(costs))} apart"
            inputs += f", restart {_shown(self._restart(costs))}"
            share = f"{100 * self.overhead:g} %"
            sentences += [
                f"The least training {'is' if best == seconds else 'would be'} lost at {_shown(best)} ({inputs})."
            ]
            sentences += [f"Saves may take {share} of the training: {_shown(stall / self.overhead)} apart at least."]
        sentences += [f"A step takes {_shown(_measured(costs.step))}."] if _measured(costs.step) else []
        assumed = f"{self.prior_failures:g} in {_shown(self.prior_hours * HOUR)} by assumption"
        observed = f"{_measured(costs.failures):g} in {_shown(_measured(costs.observed_hours) * HOUR)}"
        return " ".join([*sentences, f"Failures: {observed}, and before these {assumed}."])

    def _bounds(self, costs: Costs) -> list[tuple[float, str]]:
        """Return the interval of the least loss, and those that it must not be shorter than, each with its reason."""
        stall, durable = _measured(costs.stall), _measured(costs.durable)
        if stall:
            best = interval(stall, self.failure_seconds(costs), self._restart(costs) + durable)
            chosen = [
                (best, "this loses the least training"),
                (stall / self.overhead, f"saves may take {100 * self.overhead:g} % of the training"),
            ]
        else:
            chosen = [(self.first, "no save has shown yet how much training it takes away")]
        return [
            *chosen,
            (durable, "a save takes so long to be durable"),
            (_measured(costs.step), "a step takes so long"),
        ]

    def _restart(self, costs: Costs) -> float:
        return _measured(costs.restart) or self.restart


def _measured(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _shown(seconds: float) -> str:
    """Return seconds as people write them, as in ``"6.0 min"``."""
    if seconds >= 2 * HOUR:
        return f"{seconds / HOUR:.1f} h"
    if seconds >= 120:  # noqa: PLR2004 -- two minutes
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 or not seconds else f"{1000 * seconds:.3g} ms"
