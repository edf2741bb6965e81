"""When and whom to kill: drawn from a seed, before the job starts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Kind", "Moment", "moments"]

Kind = Literal["step", "save", "sweep", "resume", "start", "any"]

LONGEST_WAIT: dict[Kind, float] = {
    "step": 0.05,
    "save": 0.2,
    "sweep": 0.15,
    "resume": 0.5,
    "start": 6.0,
    "any": 15.0,
}
"""Most seconds from what a kill waits for to the kill."""

MOST_COUNT: dict[Kind, int] = {"step": 25, "save": 2, "sweep": 2, "resume": 1, "start": 1, "any": 1}
"""Most of them that have to come before the kill."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A kill that is planned.

    Attributes:
        kind: what the kill waits for: the end of a step, of one that is saved, a commit, the begin of the resumption,
            or the start of all ranks. ``"any"`` is any moment since that start.
        victim: the rank.
        count: which one in the life.
        wait: seconds from then on.
    """

    kind: Kind
    victim: int
    count: int
    wait: float


def moments(seed: int, kills: int, ranks: int) -> list[Moment]:
    """Draw the kills: each kind equally often, in any order.

    Args:
        seed: of the draw.
        kills: how many.
        ranks: how many ranks to choose from.

    """
    rng = random.Random(seed)  # noqa: S311 -- no secret
    kinds: list[Kind] = list(get_args(Kind))
    drawn: list[Kind] = []
    while len(drawn) < kills:
        drawn += rng.sample(kinds, len(kinds))
    return [
        Moment(kind, rng.randrange(ranks), rng.randint(1, MOST_COUNT[kind]), rng.uniform(0, LONGEST_WAIT[kind]))
        for kind in drawn[:kills]
    ]
