"""Messages of ``python -m bcp doctor``, which lie in the job's store."""

from __future__ import annotations

import msgspec

from bcp._messages.base import Count, Message, Rank, Seconds, expect, prepare
from bcp._messages.coordination import Port

__all__ = ["DoorSign", "Finding", "Leaders", "RankReport", "Trial", "Way", "WholeVerdict"]


class Leaders(Message, frozen=True):
    """The lowest rank of each host."""

    ranks: tuple[Rank, ...]  # leaders of all hosts, in order; a rank that leads no host is told only its own
    names: tuple[str, ...]  # names of these hosts

    def __post_init__(self) -> None:
        expect(len(self.ranks) == len(self.names) > 0, reason=f"{len(self.ranks)} leaders, {len(self.names)} names")


class DoorSign(Message, frozen=True):
    """The place at which the leader of a host answers."""

    address: str | None = None  # the address; None if the host cannot listen
    port: Port | None = None  # the port; None with the address

    def __post_init__(self) -> None:
        expect((self.address is None) == (self.port is None), reason="an address goes with a port")


class Trial(Message, frozen=True):
    """Whether the leader of a host could write its file."""

    wrote: bool


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that is wrong."""

    check: str
    text: str  # the message, which follows the name of the rank or the host, as in ``"cannot reach host h4"``
    do: str = ""  # the remedy
    of_host: bool = False  # whether it concerns the rank's host, and not only the rank


class Way(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A connection to another host that has worked."""

    seconds: float  # the duration of the connection and the answer
    ahead: float  # seconds by which the other host's clock is ahead of this one, give or take half of ``seconds``


class RankReport(Message, frozen=True):
    """All that one rank knows; the fields are those of :class:`bcp._doctor.report.Report`."""

    rank: Rank
    findings: tuple[Finding, ...]
    more: dict[str, Count]
    versions: dict[str, str]
    store_seconds: Seconds
    address: str
    interface: str
    ways: Count
    slowest: Seconds
    clock: Way | None


class WholeVerdict(Message, frozen=True):
    """Rank 0's verdict."""

    healthy: bool
    unheard: tuple[Rank, ...]  # ranks whose report did not come in time


prepare(__name__)
