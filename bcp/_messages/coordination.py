"""Messages of ranks that agree on an operation, and of those that meet before it."""

from __future__ import annotations

from bcp._messages.base import Message, Rank

__all__ = ["Failure"]


class Failure(Message, frozen=True):
    """An error in place of a rank's contribution or of rank 0's answer.

    Attributes:
        rank: the rank that raised it, in rank 0's answer; None for rank 0's own, and in a contribution.
        name: the error's class.
        text: the error's message.
    """

    rank: Rank | None
    name: str
    text: str
