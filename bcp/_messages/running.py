"""Messages of runs: planned saves, the choice of a checkpoint, ended saves, and the common last step."""

from __future__ import annotations

from typing import Literal

import msgspec

from bcp._messages.base import Count, Message, Rank, Seconds, prepare

__all__ = [
    "Absence",
    "Alarm",
    "Candidates",
    "Choice",
    "Departure",
    "Durable",
    "Outcome",
    "Plan",
    "Standing",
    "Stop",
    "Verdict",
]


# -- the saves of policies that look at a clock -----------------------------------------------


class Plan(Message, frozen=True):
    """The answer of rank 0."""

    step: Count  # the step at whose end something happens
    saves: bool  # whether that is a save; otherwise the ranks ask again


# -- the choice of the checkpoint to resume from ----------------------------------------------


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint that was not loaded."""

    step: Count
    reason: str  # why it was passed over
    name: str = ""  # of its folder, as in "step-00001000"


class Candidates(Message, frozen=True):
    """The checkpoints of a run, as rank 0 sees them."""

    steps: tuple[Count, ...]  # the steps to try, in this order; a step comes twice if two folders have it
    others: tuple[Choice, ...]  # the checkpoints that must not be tried
    life: str  # id of this life of the job
    names: tuple[str, ...] = ()  # the folder of each step to try


class Outcome(Message, frozen=True):
    """How one rank fared in the load of a checkpoint."""

    kind: Literal["", "peer", "unreadable", "damaged", "fatal"]  # empty if it loaded; else the kind of its error
    text: str = ""  # the error


class Verdict(Message, frozen=True):
    """How all ranks fared."""

    culprit: Rank | None  # the rank whose error ends the resumption; None if nothing does
    reason: str = ""  # the error that decides; empty if every rank has loaded the checkpoint
    unreadable: Rank | None = None  # the rank that storage failed: the checkpoint may be whole


# -- the outcome of saves ---------------------------------------------------------------------


class Durable(Message, frozen=True):
    """The saves that have ended, as rank 0 knows them."""

    steps: tuple[Count, ...]  # that are committed
    failed: tuple[Count, ...] = ()


# -- the step at which all ranks stop; these lie in the job's store ----------------------------


class Alarm(Message, frozen=True):
    """One rank is to end."""

    reason: str  # why, with the rank
    seconds: Seconds | None  # seconds until that rank is killed; None if unknown


class Departure(Message, frozen=True):
    """One rank has ended its meetings before any alarm."""

    rank: Rank
    count: Count  # number of steps that the rank has counted


class Standing(Message, frozen=True):
    """The number of steps that one rank has counted."""

    count: Count  # number of steps
    seconds: Seconds | None  # seconds until the rank is killed; None if unknown


class Stop(Message, frozen=True):
    """All ranks stop at one count."""

    count: Count  # number of steps at which the ranks stop
    seconds: Seconds | None  # seconds until the first rank is killed; None if unknown


class Absence(Message, frozen=True):
    """A rank has not answered the alarm, so that there is no common count."""

    rank: Rank  # the lowest such rank
    cause: str


prepare(__name__, Alarm | Departure, Stop | Absence)
