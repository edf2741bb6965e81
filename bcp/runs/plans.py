"""Which step is saved next, so that all ranks agree without a word in most steps.

Policies that look at steps alone give the same answer on every rank. Those that look at a clock are asked on rank 0
only. It answers with a step in the future, which it computes from the measured seconds of a step; the ranks get the
answer while they train. A step later than twice the known steps is never promised: there rank 0 looks again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Plan", "next_plan"]

FARTHEST = 1_000
"""Most steps until rank 0 looks at its clock again."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of rank 0.

    Attributes:
        step: the step at whose end something happens.
        saves: whether that is a save; else the ranks ask again.
    """

    step: int
    saves: bool

    def packed(self) -> bytes:
        """Return it as a message."""
        return json.dumps([self.step, self.saves]).encode()

    @classmethod
    def unpacked(cls, message: bytes) -> Plan:
        """Return the plan of a message."""
        step, saves = json.loads(message)
        return cls(int(step), bool(saves))


def next_plan(step: int, known: int, step_seconds: float, due_in: Callable[[float], bool]) -> Plan:
    """Return when to save, or when to look again.

    Args:
        step: the step that has just ended on rank 0.
        known: over how many steps ``step_seconds`` was measured.
        step_seconds: the mean seconds of a step.
        due_in: whether a save is due so many seconds from now.

    Example:
        >>> next_plan(10, 10, 2.0, lambda seconds: seconds >= 9.0)
        Plan(step=15, saves=True)

    """
    if due_in(0.0):
        return Plan(step + 2, saves=True)  # the next step may have ended elsewhere before this answer arrives
    horizon = max(2, min(known, FARTHEST))
    if not due_in(horizon * step_seconds):
        return Plan(step + horizon, saves=False)
    low, high = 0, horizon
    while high - low > 1:
        middle = math.ceil((low + high) / 2)
        low, high = (low, middle) if due_in(middle * step_seconds) else (middle, high)
    return Plan(step + max(2, high), saves=True)
