"""How a rank finds its place in the tree and its parent's address."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bcp.coordinators.hello import Abort
from bcp.coordinators.proof import new_token
from bcp.coordinators.tree.topology import Place, Tree
from bcp.errors import InputError

__all__ = ["Addresses", "Invitation", "MemoryRendezvous", "Rendezvous"]

Ended = Callable[[int, Abort], None]
"""Called with an operation's number and why it has ended."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Facts that a rank needs to take part.

    Attributes:
        place: its place in the tree.
        token: the job's secret, which everyone who connects has to show.
        session: tells this tree from others; not secret.
        hosts: names of the neighbours' hosts, for messages, as far as they are known.
    """

    place: Place
    token: str = field(repr=False)
    session: str
    hosts: Mapping[int, str] = field(default_factory=dict)


class Rendezvous(Protocol):
    """The way to the others, until there are connections; one for each rank. Its coroutines run on one loop."""

    async def invitation(self, ended: Ended) -> Invitation:
        """Return this rank's place, once it is known; calls ``ended`` for what others announce meanwhile."""

    def bind_address(self) -> str:
        """Return the one address, with port, on which this rank may listen; port 0 for any. May block shortly."""

    async def publish(self, port: int, door: str) -> None:
        """Let the children know where this rank listens; ``door`` is for those on its host, empty if there is none."""

    async def address_of(self, rank: int) -> str:
        """Return where a rank listens, once it does."""

    async def door_of(self, rank: int) -> str:
        """Return the door of a rank whose address is known; empty if it has none."""

    async def announce(self, number: int, abort: Abort) -> None:
        """Tell those who still wait for their place that an operation has ended."""

    def absent(self) -> int | None:
        """Return a rank that has not come yet and is waited for by this one; None where it knows none."""

    def silence(self, seconds: float) -> str:
        """Say that the way to the others has been silent for so many seconds or more, as a cause; or nothing."""


class Addresses:
    """Everybody's addresses are known beforehand, and so is the tree."""

    def __init__(
        self, rank: int, addresses: Sequence[str], token: str, fanout: int, hosts: Sequence[str] | None = None
    ) -> None:
        """Take the ``host:port`` of every rank; ranks with one host part are on one host unless ``hosts`` says more."""
        self._rank = rank
        self._addresses = tuple(addresses)
        hosts = [address.rpartition(":")[0] for address in addresses] if hosts is None else hosts
        if not 0 <= rank < len(addresses) or len(hosts) != len(addresses):
            raise InputError(f"rank {rank}, {len(addresses)} addresses and {len(hosts)} hosts do not fit together")
        if not token:
            raise InputError("an empty token protects nobody: give all ranks the same secret, as secrets.token_hex()")
        # ranks that were given other lists grow other trees, and may not meet
        agreed = json.dumps([self._addresses, list(hosts), fanout])
        self._invitation = Invitation(
            Tree.of(hosts, fanout).places()[rank], token, hashlib.blake2b(agreed.encode(), digest_size=8).hexdigest()
        )

    def __repr__(self) -> str:
        """Show this rank's address."""
        return f"<Addresses, {self._addresses[self._rank]} is rank {self._rank} of {len(self._addresses)}>"

    async def invitation(self, ended: Ended) -> Invitation:
        """Return this rank's place."""
        del ended
        return self._invitation

    def bind_address(self) -> str:
        """Return this rank's address."""
        return self._addresses[self._rank]

    async def publish(self, port: int, door: str) -> None:
        """Do nothing: all know it."""

    async def address_of(self, rank: int) -> str:
        """Return the given address."""
        return self._addresses[rank]

    async def door_of(self, rank: int) -> str:
        """Return nothing: there is no place where a door could be published."""
        del rank
        return ""

    async def announce(self, number: int, abort: Abort) -> None:
        """Do nothing: nobody waits for a place."""

    def absent(self) -> int | None:
        """Return None: nobody waits for a place."""
        return None

    def silence(self, seconds: float) -> str:
        """Say nothing: no server stands between the ranks."""
        del seconds
        return ""


class _Board:
    """Ports and doors of the ranks of one process. Only used on the coordinators' loop."""

    def __init__(self) -> None:
        self._ports: dict[int, int] = {}
        self.doors: dict[int, str] = {}
        self._news = asyncio.Event()

    def put(self, rank: int, port: int, door: str) -> None:
        self._ports[rank], self.doors[rank] = port, door
        self._news.set()
        self._news = asyncio.Event()

    async def port(self, rank: int) -> int:
        while rank not in self._ports:
            await self._news.wait()
        return self._ports[rank]


class MemoryRendezvous:
    """All ranks are in this process, thousands if need be; they talk over the loopback."""

    def __init__(self, board: _Board, invitation: Invitation) -> None:
        """Be one of those that :meth:`all_of` returns."""
        self._board = board
        self._invitation = invitation

    @classmethod
    def all_of(cls, tree: Tree) -> list[MemoryRendezvous]:
        """Return one for each rank."""
        board, token, session = _Board(), new_token(), secrets.token_hex(8)
        return [cls(board, Invitation(place, token, session)) for place in tree.places()]

    def __repr__(self) -> str:
        """Show the rank."""
        return f"<MemoryRendezvous, rank {self._invitation.place.rank}>"

    async def invitation(self, ended: Ended) -> Invitation:
        """Return this rank's place."""
        del ended
        return self._invitation

    def bind_address(self) -> str:
        """Return the loopback."""
        return "127.0.0.1:0"

    async def publish(self, port: int, door: str) -> None:
        """Put up this rank's port and door."""
        self._board.put(self._invitation.place.rank, port, door)

    async def address_of(self, rank: int) -> str:
        """Return where a rank listens, once it does."""
        return f"127.0.0.1:{await self._board.port(rank)}"

    async def door_of(self, rank: int) -> str:
        """Return the door that was put up."""
        return self._board.doors[rank]

    async def announce(self, number: int, abort: Abort) -> None:
        """Do nothing: nobody waits for a place."""

    def absent(self) -> int | None:
        """Return None: nobody waits for a place."""
        return None

    def silence(self, seconds: float) -> str:
        """Say nothing: no server stands between the ranks."""
        del seconds
        return ""
