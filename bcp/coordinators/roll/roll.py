"""One rank's roll call, whichever its part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import ref

from torch.distributed import TCPStore

from bcp.coordinators.backoff import Backoff
from bcp.coordinators.hello import Abort
from bcp.coordinators.hosts import Host, address_of, here, stated_address
from bcp.coordinators.roll.caller import Caller
from bcp.coordinators.roll.keys import Answer, Ended, Keys
from bcp.coordinators.roll.member import Member
from bcp.coordinators.store_client import StoreClient, innermost
from bcp.errors import PeerError

__all__ = ["Roll"]

_ATTENTION_PAUSE = 0.05  # seconds between two looks in the background
_ATTENTION_SECONDS = 60.0  # how long a store may be silent before nobody looks in the background any more


class Roll:
    """One rank's part in the roll call: looks, one after another, until there is an answer.

    :meth:`look`, :meth:`present` and :meth:`tell` block until the store has answered, and are called in the client's
    thread.

    Attributes:
        client: calls the store.
        answer: rank 0's answer, once it is there.
    """

    def __init__(
        self,
        client: StoreClient,
        prefix: str,
        rank: int,
        world_size: int,
        *,
        address: str | None = None,
        texts: Callable[[Sequence[Host]], Sequence[str]] = lambda hosts: [""] * len(hosts),
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            client: calls the store.
            prefix: of our keys.
            rank: this rank.
            world_size: how many there are.
            address: this host's in the job's network, if the caller states it.
            texts: returns on rank 0 the words for each rank, given the hosts of all.

        """
        self.client = client
        self.answer: Answer | None = None
        self._rank = rank
        self._world_size = world_size
        self._given_address = address
        self._stated = ""
        self._host: Host | None = None
        self._keys = Keys(client, prefix)
        self._part = Caller(self._keys, world_size, texts) if rank == 0 else Member(self._keys, rank)
        self._attendant: threading.Thread | None = None

    def __repr__(self) -> str:
        """Show the place in the store."""
        return f"<Roll of rank {self._rank} of {self._world_size}, {self._keys!r}>"

    @property
    def heard(self) -> Ended | None:
        """The last operation that a rank has ended before there was an answer."""
        return self._part.heard

    def key(self, *names: object) -> str:
        """Return a key that no other session has; there has to be an answer."""
        assert self.answer is not None  # noqa: S101 -- for mypy
        return self._keys.name(self.answer.session, *names)

    def name(self, rank: int) -> str:
        """Name a rank for messages, with its host if that is known."""
        host = ""
        if rank == 0:
            host = "" if self.answer is None else self.answer.first
        elif isinstance(self._part, Caller) and rank <= len(self._part.hosts):
            host = self._part.hosts[rank - 1].name
        return f"rank {rank} (host {host})" if host else f"rank {rank}"

    async def answered(self, heard: Callable[[int, Abort], None]) -> Answer:
        """Look until there is an answer; pass on which operations have ended meanwhile. Waits without a limit."""
        backoff, known = Backoff.of_store(self._world_size), self.heard
        while True:
            answer = await self.client.call(self.look)
            if self.heard is not None and self.heard != known:
                known = self.heard
                heard(*known)
            if answer is not None:
                return answer
            await backoff.sleep()

    def look(self) -> Answer | None:
        """Look once; return this rank's answer if it is there."""
        if self.answer is None:
            if self._host is None:
                self._stated = stated_address(self._given_address)
                self._host = here(self._server(), self._stated)
            self.answer = self._part.look(self._host)
        return self.answer

    def attend(self) -> None:
        """Go on looking in the background until there is an answer: later ranks have to hear which operation ended."""
        if self._attendant is None:
            self._attendant = threading.Thread(target=_attend, args=[ref(self)], name="bcp-roll", daemon=True)
            self._attendant.start()

    def address(self) -> str:
        """Return the address at which this rank listens; there has to be an answer.

        Raises:
            InputError: this host has none that the others reach.

        """
        assert self._host is not None  # noqa: S101 -- for mypy: the first look has set both
        assert self.answer is not None  # noqa: S101 -- same
        return address_of(self._host, self.answer.elsewhere, self._stated)

    def absent(self) -> int | None:
        """Return the lowest rank that is not known to be there; only rank 0 knows of others than rank 0."""
        return None if self.answer is not None else self._part.absent()

    def present(self) -> dict[int, Host]:
        """Return on rank 0 the hosts of the ranks that have come; on others, this rank's own. Blocks."""
        own = {} if self._host is None else {self._rank: self._host}
        return own | (self._part.present() if isinstance(self._part, Caller) else {})

    def tell(self, number: int, abort: Abort) -> None:
        """Let the ranks that wait for their answer know that an operation has ended."""
        self._part.tell(Ended(number, abort))

    def forget(self) -> None:
        """Delete the keys, if the store can; nobody may look any more."""
        for name in ("root", "ended"):
            self._keys.delete(name)
        for rank in range(self._world_size):
            for name in ("here", "answer"):
                self._keys.delete(name, rank)

    def _server(self) -> tuple[str, int] | None:
        inner = innermost(self.client.shared)
        return (inner.host, inner.port) if isinstance(inner, TCPStore) else None


def _attend(roll_of: ref[Roll]) -> None:
    """Look now and then, as long as somebody has the roll and the store answers."""
    with suppress(PeerError):
        while (roll := roll_of()) is not None:
            if roll.client.call_blocking(roll.look, seconds=_ATTENTION_SECONDS) is not None:
                return
            del roll
            time.sleep(_ATTENTION_PAUSE)
