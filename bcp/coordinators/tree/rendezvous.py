"""The tree of ranks, and the ways in which a rank finds its place in it and its parent's address.

Ranks of one host are together in the tree. A rendezvous over a torch Store takes a key or two a rank, at the first
operation only.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from bcp._messages.coordination import Abort, Host, Seat
from bcp._sockets import new_token
from bcp.coordinators.roll_call import RollCall
from bcp.coordinators.store_client import Backoff, StoreClient
from bcp.errors import InputError
from bcp.runtime.threads import in_thread

__all__ = [
    "Addresses",
    "Invitation",
    "KnownPlaces",
    "MemoryRendezvous",
    "Place",
    "Rendezvous",
    "StoreRendezvous",
    "Tree",
]


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in the tree."""

    rank: int
    world_size: int
    parent: int | None  # the rank above it; None for rank 0
    children: tuple[int, ...]  # the ranks right below it
    sizes: tuple[int, ...]  # ranks in the subtree of each child, the child included
    order: tuple[int, ...] = ()  # a walk through the tree: each rank, then its children's subtrees; empty but on rank 0

    @property
    def size(self) -> int:
        """The number of ranks in this one's subtree, itself included."""
        return 1 + sum(self.sizes)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks that this one talks to."""
        return self.children if self.parent is None else (self.parent, *self.children)


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree, with rank 0 at its root.

    The lowest rank of each host leads it. The ranks of a host are below their leader, and the leaders below rank 0.
    Both have the same fan-out: a leader has at most ``fanout`` children on its host and ``fanout`` leaders.
    """

    parents: tuple[int | None, ...]  # the rank above each rank; None for rank 0
    children: tuple[tuple[int, ...], ...]  # the ranks below each rank; each of the two kinds ascends

    @classmethod
    def of(cls, hosts: Sequence[str], fanout: int) -> Tree:
        """Return the tree of ranks, given the host of each rank.

        100,000 ranks take 0.1 s. Raises InputError if there is no rank, or the fan-out is less than 1.
        """
        if not hosts or fanout < 1:
            raise InputError(f"{len(hosts)} ranks, fan-out {fanout}: both have to be at least 1")
        on_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            on_host.setdefault(host, []).append(rank)
        parents: list[int | None] = [None] * len(hosts)
        children: list[list[int]] = [[] for _ in hosts]
        for ranks in (*on_host.values(), [ranks[0] for ranks in on_host.values()]):
            for position, rank in enumerate(ranks[1:]):
                parent = ranks[position // fanout]
                parents[rank] = parent
                children[parent].append(rank)
        return cls(tuple(parents), tuple(map(tuple, children)))

    @property
    def order(self) -> tuple[int, ...]:
        """All ranks in walk order: each one right before its children's subtrees."""
        order: list[int] = []
        waiting = [0]
        while waiting:
            rank = waiting.pop()
            order.append(rank)
            waiting.extend(reversed(self.children[rank]))
        return tuple(order)

    def places(self) -> list[Place]:
        """Return every rank's place."""
        order = self.order
        sizes = [1] * len(order)
        for rank in reversed(order):
            if (parent := self.parents[rank]) is not None:
                sizes[parent] += sizes[rank]
        return [
            Place(
                rank,
                len(order),
                self.parents[rank],
                children,
                tuple(sizes[child] for child in children),
                order if rank == 0 else (),
            )
            for rank, children in enumerate(self.children)
        ]


Ended = Callable[[int, Abort], None]
"""Called with an operation's number and why it has ended."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Facts that a rank needs to take part."""

    place: Place
    token: str = field(repr=False)  # the job's secret, which everyone who connects has to show
    session: str  # tells this tree from others; not secret
    hosts: Mapping[int, str] = field(default_factory=dict)  # the neighbours' hosts, as far as known


class Rendezvous(Protocol):
    """One rank's way to the others until there are connections. Its coroutines run on one loop."""

    async def invitation(self, ended: Ended) -> Invitation:
        """Wait for this rank's place, and return it; call ``ended`` for operations that others announce meanwhile."""

    def bind_address(self) -> str:
        """Return the address and port on which this rank may listen; port 0 for any. May block shortly."""

    async def publish(self, port: int, door: str) -> None:
        """Publish this rank's port for its children; ``door`` is for those on its host, empty if there is none."""

    async def address_of(self, rank: int) -> str:
        """Wait until a rank listens, and return its address."""

    async def door_of(self, rank: int) -> str:
        """Return the door of a rank whose address is known; empty if it has none."""

    async def announce(self, number: int, abort: Abort) -> None:
        """Tell ranks that still wait for their place that an operation has ended."""

    def absent(self) -> int | None:
        """Return a rank that has not come, and for which this one waits; None if none is known."""

    def silence(self, seconds: float) -> str:
        """Return the cause if the way to the others has been silent for ``seconds``, else an empty text."""


class KnownPlaces:
    """The methods of a rendezvous whose ranks know their places beforehand."""

    _invitation: Invitation

    async def invitation(self, ended: Ended) -> Invitation:
        """Return this rank's place."""
        del ended
        return self._invitation

    async def announce(self, number: int, abort: Abort) -> None:
        """Do nothing: nobody waits for a place."""

    def absent(self) -> int | None:
        """Return None: nobody waits for a place."""
        return None

    def silence(self, seconds: float) -> str:
        """Return an empty text: no server stands between the ranks."""
        del seconds
        return ""


class Addresses(KnownPlaces):
    """A rendezvous of ranks that know all addresses, and so the tree, beforehand."""

    def __init__(
        self, rank: int, addresses: Sequence[str], token: str, fanout: int, hosts: Sequence[str] | None = None
    ) -> None:
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
        return f"<Addresses, {self._addresses[self._rank]} is rank {self._rank} of {len(self._addresses)}>"

    def bind_address(self) -> str:
        """Return this rank's address."""
        return self._addresses[self._rank]

    async def publish(self, port: int, door: str) -> None:
        """Do nothing: all ranks know the address."""

    async def address_of(self, rank: int) -> str:
        """Return the given address."""
        return self._addresses[rank]

    async def door_of(self, rank: int) -> str:
        """Return an empty text: no door can be published."""
        del rank
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


class MemoryRendezvous(KnownPlaces):
    """A rendezvous of ranks that are all in this process; they talk over the loopback."""

    def __init__(self, board: _Board, invitation: Invitation) -> None:
        self._board = board
        self._invitation = invitation

    @classmethod
    def all_of(cls, tree: Tree) -> list[MemoryRendezvous]:
        """Return a rendezvous for each rank."""
        board, token, session = _Board(), new_token(), secrets.token_hex(8)
        return [cls(board, Invitation(place, token, session)) for place in tree.places()]

    def __repr__(self) -> str:
        return f"<MemoryRendezvous, rank {self._invitation.place.rank}>"

    def bind_address(self) -> str:
        """Return the loopback."""
        return "127.0.0.1:0"

    async def publish(self, port: int, door: str) -> None:
        """Publish this rank's port and door."""
        self._board.put(self._invitation.place.rank, port, door)

    async def address_of(self, rank: int) -> str:
        """Wait until a rank listens, and return its address."""
        return f"127.0.0.1:{await self._board.port(rank)}"

    async def door_of(self, rank: int) -> str:
        """Return the published door of a rank."""
        return self._board.doors[rank]


if TYPE_CHECKING:
    from torch.distributed import Store


_ANNOUNCE_SECONDS = 5.0  # how long a rank tries to tell the others that an operation has ended


class StoreRendezvous:
    """Every rank shows its host; rank 0 makes the tree, and tells every rank its place.

    A silent store is waited for without a limit: the operation ends that wait after its timeout. No call waits for a
    key. A rank's keys are those of the roll call, and its address if it has children.
    """

    def __init__(
        self,
        store: Store | StoreClient,  # a connection on which no other call waits
        prefix: str,  # prefix of our keys
        rank: int,
        world_size: int,
        fanout: int,
        address: str | None = None,  # this host's address in the job's network; None: see bcp.coordinators.hosts
    ) -> None:
        """Prepare the rendezvous; nothing is sent before :meth:`invitation`."""
        self._client = StoreClient.of(store)
        self._rank = rank
        self._world_size = world_size
        self._fanout = fanout
        self._first: Place | None = None  # rank 0's own, with the order of all
        self._addresses: dict[int, str] = {}  # as they were found: later connections need no store
        self._doors: dict[int, str] = {}
        self._roll = RollCall(self._client, prefix, rank, world_size, address=address, words=self._grow)

    def __repr__(self) -> str:
        return f"<StoreRendezvous, {self._roll!r}>"

    async def invitation(self, ended: Ended) -> Invitation:
        """Show this rank's host, and wait for its place; rank 0 waits for all hosts, and makes the tree."""
        answer = await self._roll.answered(ended)
        await in_thread(self._roll.address)  # a rank that no other host can reach says so at once, children or not
        seat = Seat.decode(answer.words, sender=0)
        place = self._first or Place(self._rank, self._world_size, seat.parent, seat.children, seat.sizes)
        return Invitation(place, answer.token, answer.session, dict(zip(place.neighbours, seat.hosts, strict=True)))

    def bind_address(self) -> str:
        """Return this host's address in the job's network."""
        address = self._roll.address()
        return f"[{address}]:0" if ":" in address else f"{address}:0"

    async def publish(self, port: int, door: str) -> None:
        """Publish this rank's address for its children."""
        await self._client.call(self._set, self._roll.key("door", self._rank), door)
        address = self.bind_address().rpartition(":")[0]
        await self._client.call(self._set, self._roll.key("address", self._rank), f"{address}:{port}")

    async def address_of(self, rank: int) -> str:
        """Wait until a rank listens, and return its address."""
        if rank in self._addresses:
            return self._addresses[rank]
        key, backoff = self._roll.key("address", rank), Backoff.of_store(self._world_size)
        while (address := await self._client.call(self._get, key)) is None:
            await backoff.sleep()
        self._doors[rank] = (await self._client.call(self._get, self._roll.key("door", rank)) or b"").decode()
        self._addresses[rank] = address.decode()
        return self._addresses[rank]

    async def door_of(self, rank: int) -> str:
        """Return the door of a rank whose address is known."""
        return self._doors[rank]

    async def announce(self, number: int, abort: Abort) -> None:
        """Tell ranks that still wait for their place that an operation has ended."""
        await self._client.call(self._roll.tell, number, abort, seconds=_ANNOUNCE_SECONDS)

    def absent(self) -> int | None:
        """Return the lowest rank that has not come; only rank 0 knows of others than rank 0."""
        return self._roll.absent()

    def silence(self, seconds: float) -> str:
        """Return the cause if the store has not answered for ``seconds``, else an empty text."""
        return self._client.silence(seconds)

    def _grow(self, hosts: Sequence[Host]) -> list[bytes]:
        """Return every rank's place in the tree, as a message."""
        places = Tree.of([host.identity for host in hosts], self._fanout).places()
        self._first = places[0]
        names = [host.name for host in hosts]
        return [
            Seat(place.parent, place.children, place.sizes, tuple(names[rank] for rank in place.neighbours)).encode()
            for place in places
        ]

    def _set(self, key: str, text: str) -> None:
        self._client.store.set(key, text)

    def _get(self, key: str) -> bytes | None:
        return bytes(self._client.store.get(key)) if self._client.store.check([key]) else None
