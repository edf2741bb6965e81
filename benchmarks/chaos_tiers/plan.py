"""What dies when: the lives of a campaign, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

from benchmarks.chaos_tiers.job import PER_HOST, Point
from benchmarks.chaos_tiers.training import Layout

__all__ = ["ENDS", "HOSTS", "MEANWHILE", "End", "LifePlan", "Meanwhile", "plan"]

T = TypeVar("T")
HOSTS = 4

End = Literal[
    "copies",
    "before mark",
    "after mark",
    "returned",
    "rank",
    "host's ranks",
    "all ranks",
    "ranks and agents",
    "host wiped",
    "neighbours wiped",
    "opposite hosts wiped",
    "host lost",
    "host left out",
    "bit",
]
"""How a life ends; all of its other ranks end by themselves, or are killed some moments later.

The first four are points in the job. The others come at a random time: a rank, the ranks of a host, all ranks, all
ranks and agents; one host, two neighbours, or two that do not copy each other, with their memories; a host that does
not come back in the next life, with its memory or without; all ranks, and one bit in a file of a host.
"""

Meanwhile = Literal["agent", "agent's child", "agents", "silent agent", "silent storage"]
"""What happens in a life that goes on: an agent dies with its parent or alone, or all agents do so.

Or an agent stops for a while, or writes to storage wait for a while. These two are no kills.
"""

ENDS: Sequence[End] = get_args(End)
MEANWHILE: Sequence[Meanwhile] = get_args(Meanwhile)
POINTS: dict[End, Point] = {
    "copies": "copies",
    "before mark": "before mark",
    "after mark": "after mark",
    "returned": "returned",
}
NEVER = 10**9

SHARE = 0.3
"""Of lives in which more happens, and of those whose other ranks end by themselves."""

MEANWHILE_STEPS = 4
"""Steps that a life has for it before its victim dies."""


@dataclass(frozen=True, slots=True)
class LifePlan:
    """One life of the job.

    Attributes:
        number: from 0 on.
        by_torchrun: whether torchrun starts it, and not a warm process.
        layout: of the model.
        durable: every so many steps a snapshot goes to storage.
        pause: seconds of each step.
        steps: of this life before its end.
        meanwhile: what happens before, behind the first step.
        end: of the life.
        host: which is hit; that of the victim, too.
        victim: the rank that is hit.
        moment: seconds from the step to the end.
        is_alone: whether the other ranks are left to end by themselves.
    """

    number: int
    by_torchrun: bool = False
    layout: Layout = "fsdp"
    durable: int = NEVER
    pause: float = 0.0
    steps: int = 1
    meanwhile: Meanwhile | None = None
    end: End = "all ranks"
    host: int = 0
    victim: int = 0
    moment: float = 0.0
    is_alone: bool = False

    @property
    def point(self) -> Point:
        """The point of the job at which the victim kills itself; empty for none."""
        return POINTS.get(self.end, "")

    @property
    def kills(self) -> int:
        """How many of the campaign's kills it has."""
        return 1 + (self.meanwhile in ("agent", "agent's child", "agents"))


def plan(seed: int, kills: int, torchrun: int, ends: Sequence[End] = ENDS) -> list[LifePlan]:
    """Draw lives with so many kills; all ends come equally often.

    Args:
        seed: of the choice.
        kills: how many.
        torchrun: how many lives torchrun starts.
        ends: that are drawn.

    """
    drawn = random.Random(seed)  # noqa: S311 -- no secret
    kinds, others = _in_turns(drawn, ends), _in_turns(drawn, MEANWHILE)
    lives: list[LifePlan] = []
    while (left := kills - sum(life.kills for life in lives)) > 0:
        end = next(kinds)
        meanwhile = next(others) if left > 1 and drawn.random() < SHARE else None
        lives.append(
            LifePlan(
                len(lives),
                layout=drawn.choice(("fsdp", "hsdp", "fsdp", "replicas")),
                durable=NEVER if end == "host lost" else drawn.choice((2, 5, NEVER)),
                pause=drawn.choice((0.0, 0.0, 0.3)),
                steps=drawn.randint(1, 6) + (0 if meanwhile is None else MEANWHILE_STEPS),
                meanwhile=meanwhile,
                end=end,
                host=drawn.randrange(HOSTS),
                victim=drawn.randrange(HOSTS * PER_HOST),
                moment=drawn.random() * drawn.choice((0.05, 0.5, 2.0)),
                is_alone=drawn.random() < SHARE,
            )
        )
    chosen = {number * len(lives) // torchrun for number in range(min(torchrun, len(lives)))}
    return [replace(life, by_torchrun=life.number in chosen) for life in lives]


def _in_turns(drawn: random.Random, kinds: Sequence[T]) -> Iterator[T]:
    """Yield kinds for ever: all of them in a random order, then all of them again."""
    while True:
        yield from drawn.sample(kinds, len(kinds))
