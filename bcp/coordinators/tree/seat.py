"""Interfaces of a round: to its node, and to the node's own rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bcp.coordinators.hello import Abort
from bcp.coordinators.tree.frames import Frame
from bcp.coordinators.tree.topology import Place
from bcp.coordinators.tree.values import Values

__all__ = ["Part", "Seat"]


class Seat(Protocol):
    """The node that a round belongs to, as far as the round uses it."""

    rank: int
    place: Place | None

    def send(self, rank: int, frame: Frame) -> None:
        """Send a neighbour a frame."""

    def name(self, rank: int) -> str:
        """Name a rank, with host and process where they are known."""

    def connected(self, rank: int) -> bool:
        """Say whether there is a connection to a neighbour."""

    def trouble(self, rank: int) -> str:
        """Say why there is none, as the end of a message; or nothing."""

    def absent(self) -> int | None:
        """Return a rank for which the tree waits that this rank has no place in yet; None if nobody knows one."""

    def silence(self, seconds: float) -> str:
        """Say that the way to ranks without a connection was silent for so many seconds, as a cause; or nothing."""

    def announce(self, number: int, abort: Abort) -> None:
        """Tell those who have no place in the tree yet that an operation has ended."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of this node's own rank in the operation.

    Attributes:
        what: what it is doing.
        timeout: seconds that a neighbour may be late or silent.
        beat: seconds between its signs of life.
        hand_over: called with the number of a step and its answer, or, on rank 0, what was gathered in walk order.
        end: called with the reason when the operation has ended.
    """

    what: str
    timeout: float
    beat: float
    hand_over: Callable[[int, bytes | Values], None]
    end: Callable[[Abort], None]
