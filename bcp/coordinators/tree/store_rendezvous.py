"""A rendezvous over a torch Store: a key or two a rank, at the first operation only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bcp.coordinators.backoff import Backoff
from bcp.coordinators.hello import Abort
from bcp.coordinators.hosts import Host
from bcp.coordinators.roll import Roll
from bcp.coordinators.store_client import StoreClient
from bcp.coordinators.tree.rendezvous import Ended, Invitation
from bcp.coordinators.tree.topology import Place, Tree
from bcp.pipeline import in_thread

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["StoreRendezvous"]

_ANNOUNCE_SECONDS = 5.0  # how long a rank tries to tell the others that an operation has ended


class StoreRendezvous:
    """Every rank says on which host it is; rank 0 grows the tree and tells every rank its place.

    A silent store is waited for without a limit: an operation's round ends that wait, after the operation's timeout.
    No call waits for a key. A rank's keys are those of the roll call, and its address if it has children.
    """

    def __init__(
        self,
        store: Store | StoreClient,
        prefix: str,
        rank: int,
        world_size: int,
        fanout: int,
        address: str | None = None,
    ) -> None:
        """Prepare; nothing is sent before :meth:`invitation`.

        Args:
            store: a connection that nobody waits on.
            prefix: of our keys.
            rank: this rank.
            world_size: how many there are.
            fanout: of the tree.
            address: this host's in the job's network; None: see :mod:`bcp.coordinators.hosts`.

        """
        self._client = StoreClient.of(store)
        self._rank = rank
        self._world_size = world_size
        self._fanout = fanout
        self._first: Place | None = None  # rank 0's own, with the order of all
        self._addresses: dict[int, str] = {}  # as they were found: later connections need no store
        self._doors: dict[int, str] = {}
        self._roll = Roll(self._client, prefix, rank, world_size, address=address, texts=self._grow)

    def __repr__(self) -> str:
        """Show the place in the store."""
        return f"<StoreRendezvous, {self._roll!r}>"

    async def invitation(self, ended: Ended) -> Invitation:
        """Say where this rank is, and wait for its place; on rank 0, wait for all hosts and grow the tree."""
        answer = await self._roll.answered(ended)
        await in_thread(self._roll.address)  # a rank that no other host can reach says so at once, children or not
        parent, children, sizes, hosts = json.loads(answer.text)
        place = self._first or Place(self._rank, self._world_size, parent, tuple(children), tuple(sizes))
        return Invitation(place, answer.token, answer.session, dict(zip(place.neighbours, hosts, strict=True)))

    def bind_address(self) -> str:
        """Return this host's address in the job's network."""
        address = self._roll.address()
        return f"[{address}]:0" if ":" in address else f"{address}:0"

    async def publish(self, port: int, door: str) -> None:
        """Let the children know where this rank listens."""
        await self._client.call(self._set, self._roll.key("door", self._rank), door)
        address = self.bind_address().rpartition(":")[0]
        await self._client.call(self._set, self._roll.key("address", self._rank), f"{address}:{port}")

    async def address_of(self, rank: int) -> str:
        """Return where a rank listens, once it does."""
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
        """Tell those who still wait for their place that an operation has ended."""
        await self._client.call(self._roll.tell, number, abort, seconds=_ANNOUNCE_SECONDS)

    def absent(self) -> int | None:
        """Return the lowest rank that has not come; only rank 0 knows of others than rank 0."""
        return self._roll.absent()

    def silence(self, seconds: float) -> str:
        """Say that the store has not answered for so many seconds or more, or nothing."""
        return self._client.silence(seconds)

    def _grow(self, hosts: Sequence[Host]) -> list[str]:
        """Return every rank's place in the tree, as text."""
        places = Tree.of([host.identity for host in hosts], self._fanout).places()
        self._first = places[0]
        names = [host.name for host in hosts]
        return [
            json.dumps([place.parent, place.children, place.sizes, [names[rank] for rank in place.neighbours]])
            for place in places
        ]

    def _set(self, key: str, text: str) -> None:
        self._client.store.set(key, text)

    def _get(self, key: str) -> bytes | None:
        """Return a value, or None where there is none yet."""
        return bytes(self._client.store.get(key)) if self._client.store.check([key]) else None
