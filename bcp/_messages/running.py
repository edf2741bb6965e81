"""Messages of runs: planned saves, the choice of a checkpoint, and the common last step."""

from __future__ import annotations

from typing import Literal

import msgspec

from bcp._messages.base import Count, Message, Rank, Seconds, prepare

__all__ = ["Absence", "Alarm", "Candidates", "Choice", "Departure", "Outcome", "Plan", "Standing", "Stop", "Verdict"]


# -- the saves of policies that look at a clock -----------------------------------------------


class Plan(Message, frozen=True):
    """The answer of rank 0.

    Attributes:
        step: the step at whose end something happens.
        saves: whether that is a save; otherwise the ranks ask again.
    """

    step: Count
    saves: bool


# -- the choice of the checkpoint to resume from ----------------------------------------------


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint that was not loaded.

    Attributes:
        step: its step.
        reason: why it was passed over.
    """

    step: Count
    reason: str


class Candidates(Message, frozen=True):
    """The checkpoints of a run, as rank 0 sees them.

    Attributes:
        steps: those to try, newest first.
        others: those that must not be tried.
        life: id of this life of the job.
    """

    steps: tuple[Count, ...]
    others: tuple[Choice, ...]
    life: str


class Outcome(Message, frozen=True):
    """How one rank fared in the load of a checkpoint.

    Attributes:
        kind: empty if it loaded; else the kind of its error.
        text: the error.
    """

    kind: Literal["", "peer", "damaged", "fatal"]
    text: str = ""


class Verdict(Message, frozen=True):
    """How all ranks fared.

    Attributes:
        culprit: the rank whose error ends the resumption; None if nothing does.
        reason: the error that decides; empty if every rank has loaded the checkpoint.
    """

    culprit: Rank | None
    reason: str = ""


# -- the step at which all ranks stop; these lie in the job's store ----------------------------


class Alarm(Message, frozen=True):
    """One rank is to end.

    Attributes:
        reason: why, with the rank.
        seconds: until that rank is killed, as far as it is known.
    """

    reason: str
    seconds: Seconds | None


class Departure(Message, frozen=True):
    """One rank has ended its meetings before any alarm.

    Attributes:
        rank: that rank.
        count: the number of steps that it has counted.
    """

    rank: Rank
    count: Count


class Standing(Message, frozen=True):
    """The number of steps that one rank has counted.

    Attributes:
        count: the number.
        seconds: until the rank is killed, as far as it is known.
    """

    count: Count
    seconds: Seconds | None


class Stop(Message, frozen=True):
    """All ranks stop at one count.

    Attributes:
        count: the number of steps.
        seconds: until the first rank is killed, as far as it is known.
    """

    count: Count
    seconds: Seconds | None


class Absence(Message, frozen=True):
    """A rank has not answered the alarm, so that there is no common count.

    Attributes:
        rank: the lowest such rank.
        cause: the error's text.
    """

    rank: Rank
    cause: str


prepare(__name__, Alarm | Departure, Stop | Absence)
