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
    """An error in place of a rank's contribution or of rank 0's answer.

    Attributes:
        rank: the rank that raised it, in rank 0's answer; None for rank 0's own, and in a contribution.
        name: the error's class.
        text: the error's message.
    """

    rank: Rank | None
    name: str
    text: str


class Abort(Message, frozen=True):
    """The cause of an operation's end.

    Attributes:
        rank: the rank that failed.
        message: the cause, for the other ranks.
        disagreement: whether the ranks' inputs do not fit together.
    """

    rank: Rank
    message: str
    disagreement: bool = False


class Card(Message, frozen=True):
    """Facts about a rank's listener for bulk data, which the other ranks need to connect.

    Attributes:
        address: its address.
        port: its port.
        host: the hostname, for messages.
        network: identity of the host's network.
        token: a secret, which keys the proofs of both sides.
        tls: whether it expects TLS.
    """

    address: str
    port: Port
    host: str
    network: str
    token: str
    tls: bool

    def __repr__(self) -> str:
        return f"<Card of {self.address} port {self.port} (host {self.host})>"  # without the secret


class Introduction(Message, frozen=True):
    """The parent of a new stream in the tree.

    Attributes:
        rank: its rank.
        host: its hostname.
        pid: its process.
    """

    rank: Rank
    host: str
    pid: Count


# -- before the first operation; these lie in the job's store ----------------------------------


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's host, as the others are told of it.

    Attributes:
        name: its hostname, for people.
        identity: the same for two processes that share a loopback address.
        address: the address at which others reach it, if that is known; else empty.
        networks: its addresses with their networks, as in ``"10.0.0.1/24"``, the best guess first.
    """

    name: str
    identity: str
    address: str
    networks: tuple[str, ...]


class OperationEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation that has ended, and why."""

    number: Count
    abort: Abort


class RootSign(Message, frozen=True):
    """The sign of life of rank 0 while it waits for the others.

    Attributes:
        nonce: names rank 0's process.
        ticks: grows with each sign.
        told: the operation that has ended meanwhile, if there is one.
    """

    nonce: str
    ticks: Count
    told: OperationEnd | None


class MemberSign(Message, frozen=True):
    """The presence of another rank.

    Attributes:
        nonce: names the rank's process.
        root: the nonce of rank 0 that the rank has seen.
        host: the rank's host.
    """

    nonce: str
    root: str
    host: Host


class Ended(Message, frozen=True):
    """An operation that another rank than rank 0 has ended.

    Attributes:
        root: the nonce of rank 0 that the rank has seen; None if it has seen none.
        end: the operation and its cause.
    """

    root: str | None
    end: OperationEnd


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts that rank 0 tells a rank once all are there.

    Attributes:
        session: the name of this meeting of these processes, which no other has.
        token: the secret of these processes.
        first: hostname of rank 0.
        elsewhere: some of the job's other hosts.
        words: a message of rank 0 for this rank alone, encoded.
    """

    session: str
    token: str
    first: str
    elsewhere: tuple[Host, ...]
    words: bytes

    def __repr__(self) -> str:
        return f"<Answer of session {self.session}>"  # without the secret


class Reply(Message, frozen=True):
    """Rank 0's answer to one process.

    Attributes:
        nonce: that of the process.
        answer: the answer.
    """

    nonce: str
    answer: Answer


class Seat(Message, frozen=True):
    """A rank's place in the tree.

    Attributes:
        parent: the rank above it; None for rank 0.
        children: the ranks right below it.
        sizes: the number of ranks in the subtree of each child.
        hosts: hostnames of the parent, if there is one, and of the children.
    """

    parent: Rank | None
    children: tuple[Rank, ...]
    sizes: tuple[Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)], ...]
    hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        neighbours = len(self.children) + (self.parent is not None)
        expect(
            len(self.sizes) == len(self.children),
            len(self.hosts) == neighbours,
            reason=f"{len(self.sizes)} sizes and {len(self.hosts)} hosts of {neighbours} neighbours",
        )


prepare(__name__)
