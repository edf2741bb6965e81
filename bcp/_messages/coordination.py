"""Messages of ranks that agree on an operation, and of those that meet before it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from bcp._messages.base import Count, Message, Rank, expect, prepare

__all__ = [
    "Abort",
    "Answer",
    "Card",
    "Ended",
    "Failure",
    "Host",
    "Introduction",
    "MemberSign",
    "OperationEnd",
    "Port",
    "Reply",
    "RootSign",
    "Seat",
]

Port = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
"""A TCP port."""


# -- in an operation --------------------------------------------------------------------------


class Failure(Message, frozen=True):
    """An error in place of a rank's contribution or of rank 0's answer."""

    rank: Rank | None  # in rank 0's answer, the rank that raised it; None for rank 0's own error, and in a contribution
    name: str  # the error's class
    text: str


class Abort(Message, frozen=True):
    """The cause of an operation's end."""

    rank: Rank  # the rank that failed
    message: str  # the cause, for the other ranks
    disagreement: bool = False  # whether the ranks' inputs do not fit together


class Card(Message, frozen=True):
    """Facts about a rank's listener for bulk data, which the other ranks need to connect."""

    address: str
    port: Port
    host: str  # the hostname, for messages
    network: str  # identity of the host's network
    token: str  # a secret, which keys the proofs of both sides
    tls: bool  # whether it expects TLS

    def __repr__(self) -> str:
        return f"<Card of {self.address} port {self.port} (host {self.host})>"  # without the secret


class Introduction(Message, frozen=True):
    """The parent of a new stream in the tree."""

    rank: Rank
    host: str
    pid: Count
    received: Count | None = None  # messages received from the child, if the new stream takes the place of a silent one


# -- before the first operation; these lie in the job's store ----------------------------------


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's host, as the others are told of it."""

    name: str  # its hostname, for people
    identity: str  # the same for two processes that share a loopback address
    address: str  # the address at which others reach it, if that is known; else empty
    networks: tuple[str, ...]  # its addresses with their networks, as in ``"10.0.0.1/24"``, the best guess first


class OperationEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation that has ended, and why."""

    number: Count
    abort: Abort


class RootSign(Message, frozen=True):
    """The sign of life of rank 0 while it waits for the others."""

    nonce: str  # names rank 0's process
    ticks: Count  # grows with each sign
    told: OperationEnd | None  # the operation that has ended meanwhile, if there is one


class MemberSign(Message, frozen=True):
    """The presence of another rank."""

    nonce: str  # names the rank's process
    root: str  # the nonce of rank 0 that the rank has seen
    host: Host


class Ended(Message, frozen=True):
    """An operation that another rank than rank 0 has ended."""

    root: str | None  # the nonce of rank 0 that the rank has seen; None if it has seen none
    end: OperationEnd


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts that rank 0 tells a rank once all are there."""

    session: str  # the name of this meeting of these processes, which no other has
    token: str  # the secret of these processes
    first: str  # hostname of rank 0
    elsewhere: tuple[Host, ...]  # some of the job's other hosts
    words: bytes  # a message of rank 0 for this rank alone, encoded

    def __repr__(self) -> str:
        return f"<Answer of session {self.session}>"  # without the secret


class Reply(Message, frozen=True):
    """Rank 0's answer to one process."""

    nonce: str  # names the process
    answer: Answer


class Seat(Message, frozen=True):
    """A rank's place in the tree."""

    parent: Rank | None  # the rank above it; None for rank 0
    children: tuple[Rank, ...]  # the ranks right below it
    sizes: tuple[Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)], ...]  # ranks in each child's subtree
    hosts: tuple[str, ...]  # hostnames of the parent, if there is one, and of the children

    def __post_init__(self) -> None:
        neighbours = len(self.children) + (self.parent is not None)
        expect(
            len(self.sizes) == len(self.children),
            len(self.hosts) == neighbours,
            reason=f"{len(self.sizes)} sizes and {len(self.hosts)} hosts of {neighbours} neighbours",
        )


prepare(__name__)
