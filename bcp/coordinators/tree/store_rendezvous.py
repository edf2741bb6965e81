"""A rendezvous over a torch Store: a key or two a rank, at the first operation only."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from bcp.coordinators.hello import Abort
from bcp.coordinators.store_client import StoreClient
from bcp.coordinators.tree.rendezvous import Ended, Invitation, new_token
from bcp.coordinators.tree.topology import Place, Tree

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["StoreRendezvous"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks; doubles
_AT_ONCE = 256  # keys in one look
_ANNOUNCE_SECONDS = 5.0  # how long a rank tries to tell the others that an operation has ended


class StoreRendezvous:
    """Every rank says on which host it is; rank 0 grows the tree and tells every rank its place.

    A silent store is waited for without a limit: an operation's round ends that wait, after the operation's timeout.
    No call waits for a key. A rank's keys are its host, its place, and its address if it has children.
    """

    def __init__(
        self,
        store: Store | StoreClient,
        prefix: str,
        rank: int,
        world_size: int,
        fanout: int,
        address: Callable[[], str],
    ) -> None:
        """Prepare; nothing is sent before :meth:`invitation`.

        Args:
            store: a connection that nobody waits on.
            prefix: of our keys.
            rank: this rank.
            world_size: how many there are.
            fanout: of the tree.
            address: returns this host's address in the job's network.

        """
        self._client = StoreClient.of(store)
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._fanout = fanout
        self._address = address
        self._here = 0  # all ranks below this one have come
        self._seen = b""

    def __repr__(self) -> str:
        """Show the place in the store."""
        return f"<StoreRendezvous of rank {self._rank} of {self._world_size}, {self._prefix!r}>"

    async def invitation(self, ended: Ended) -> Invitation:
        """Say where this rank is, and wait for its place; on rank 0, wait for all hosts and grow the tree."""
        await self._client.call(self._set, self._key("host", self._rank), socket.gethostname())
        look = self._grow if self._rank == 0 else self._find
        pause = _FIRST_PAUSE
        while (found := await self._client.call(look)) is None:
            await self._listen(ended)
            pause = await self._rest(pause)
        return found

    def bind_address(self) -> str:
        """Return this host's address in the job's network."""
        address = self._address()
        return f"[{address}]:0" if ":" in address else f"{address}:0"

    async def publish(self, port: int, door: str) -> None:
        """Let the children know where this rank listens."""
        await self._client.call(self._set, self._key("door", self._rank), door)
        address = self.bind_address().rpartition(":")[0]
        await self._client.call(self._set, self._key("address", self._rank), f"{address}:{port}")

    async def address_of(self, rank: int) -> str:
        """Return where a rank listens, once it does."""
        pause = _FIRST_PAUSE
        while (address := await self._client.call(self._get, self._key("address", rank))) is None:
            pause = await self._rest(pause)
        return address.decode()

    async def door_of(self, rank: int) -> str:
        """Return the door of a rank whose address is known."""
        return (await self._client.call(self._get, self._key("door", rank)) or b"").decode()

    async def announce(self, number: int, abort: Abort) -> None:
        """Tell those who still wait for their place that an operation has ended."""
        text = json.dumps([number, asdict(abort)])
        await self._client.call(self._set, self._key("ended"), text, seconds=_ANNOUNCE_SECONDS)

    def absent(self) -> int | None:
        """Return the lowest rank that has not come; only rank 0 knows of others than rank 0."""
        return self._here if self._here < (self._world_size if self._rank == 0 else 1) else None

    def silence(self, seconds: float) -> str:
        """Say that the store has not answered for so many seconds or more, or nothing."""
        return self._client.silence(seconds)

    # -- rank 0 -------------------------------------------------------------------------------

    def _grow(self) -> Invitation | None:
        """Return rank 0's own invitation and write all others', once every rank has come."""
        self._count(self._world_size)
        if self._here < self._world_size:
            return None
        ranks = range(self._world_size)
        hosts: list[str] = []
        for start in ranks[::_AT_ONCE]:
            keys = [self._key("host", rank) for rank in ranks[start : start + _AT_ONCE]]
            hosts.extend(bytes(host).decode() for host in self._client.store.multi_get(keys))
        token, session = new_token(), secrets.token_hex(8)
        first, *others = Tree.of(hosts, self._fanout).places()
        for start in range(0, len(others), _AT_ONCE):
            places = others[start : start + _AT_ONCE]
            texts = [json.dumps([place.parent, place.children, place.sizes, token, session]) for place in places]
            keys = [self._key("place", place.rank) for place in places]
            self._client.store.multi_set(keys, texts)  # type: ignore[attr-defined]  # its stub lacks it
        return Invitation(first, token, session)

    def _count(self, end: int) -> None:
        """Move on over the ranks that have come; every rank is looked for once, however often this is called."""
        while self._here < end:
            upcoming = range(self._here, min(self._here + _AT_ONCE, end))
            if self._client.store.check([self._key("host", rank) for rank in upcoming]):
                self._here = upcoming.stop
            elif self._client.store.check([self._key("host", self._here)]):
                self._here += 1
            else:
                return

    # -- the others ---------------------------------------------------------------------------

    def _find(self) -> Invitation | None:
        """Return this rank's invitation, once it is there."""
        self._count(1)
        text = self._get(self._key("place", self._rank))
        if text is None:
            return None
        parent, children, sizes, token, session = json.loads(text)
        place = Place(self._rank, self._world_size, parent, tuple(children), tuple(sizes))
        return Invitation(place, token, session)

    # -- the store ----------------------------------------------------------------------------

    async def _listen(self, ended: Ended) -> None:
        """Pass on what has been announced since the last look."""
        text = await self._client.call(self._get, self._key("ended"))
        if text is not None and text != self._seen:
            self._seen = text
            number, abort = json.loads(text)
            ended(number, Abort(**abort))

    async def _rest(self, pause: float) -> float:
        """Sleep, and return how long to sleep the next time."""
        await asyncio.sleep(pause)
        # 20 looks a second by each of 1,000 ranks are as many as one store answers; more ranks look less often
        return min(2 * pause, _LONGEST_PAUSE * max(1.0, self._world_size / 1000))

    def _key(self, *names: object) -> str:
        return "/".join((self._prefix, *map(str, names)))

    def _set(self, key: str, text: str) -> None:
        self._client.store.set(key, text)

    def _get(self, key: str) -> bytes | None:
        """Return a value, or None where there is none yet."""
        return bytes(self._client.store.get(key)) if self._client.store.check([key]) else None
