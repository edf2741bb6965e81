"""The roll call: all ranks show themselves in a store, and rank 0 answers each once all are there.

Rank 0 is the caller, every other rank is a member.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch.distributed import TCPStore

from bcp._messages.base import Message
from bcp._messages.coordination import Abort, Answer, Ended, Host, MemberSign, OperationEnd, Reply, RootSign
from bcp._sockets import new_token
from bcp.coordinators.hosts import address_of, here, stated_address
from bcp.coordinators.store_client import Backoff, StoreClient, innermost, set_bytes

__all__ = ["RollCall"]

AT_ONCE = 256
"""Keys in one look."""


M = TypeVar("M", bound=Message)


class RollKeys:
    """Keys below a prefix, whose values are messages. All calls but :meth:`name` block until the store has answered."""

    def __init__(self, client: StoreClient, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"<Keys {self._prefix!r}>"

    def name(self, *names: object) -> str:
        """Return a whole key."""
        return "/".join((self._prefix, *map(str, names)))

    def set(self, message: Message, *names: object) -> None:
        """Set a key."""
        set_bytes(self._client.store, self.name(*names), message.encode())

    def set_all(self, messages: Mapping[int, Message], name: str) -> None:
        """Set a key of each rank."""
        keys, values = [self.name(name, rank) for rank in messages], [message.encode() for message in messages.values()]
        self._client.store.multi_set(keys, values)  # type: ignore[attr-defined]  # torch's stub lacks it

    def get(self, kind: type[M], *names: object, sender: int | None = None) -> M | None:
        """Return a message, or None if there is none yet. Raises MessageError if it cannot be decoded."""
        key, store = self.name(*names), self._client.store
        return kind.decode(bytes(store.get(key)), sender) if store.check([key]) else None

    def get_ranks(self, kind: type[M], name: str, ranks: Iterable[int]) -> list[M]:
        """Return the messages of these ranks if all are there, else an empty list.

        Raises MessageError if one cannot be decoded.
        """
        senders, store = list(ranks), self._client.store
        keys = [self.name(name, rank) for rank in senders]
        if not store.check(keys):
            return []
        return [kind.decode(bytes(value), rank) for rank, value in zip(senders, store.multi_get(keys), strict=True)]


_ELSEWHERE = 3  # other hosts that a rank is told of
_TICK_SECONDS = 0.25  # how often rank 0 shows that it still waits


class Caller:
    """Shows a nonce, counts the ranks that repeat it, and answers all once they are there."""

    def __init__(self, keys: RollKeys, world_size: int, words: Callable[[Sequence[Host]], Sequence[bytes]]) -> None:
        self.heard: OperationEnd | None = None  # the last operation that another rank has ended meanwhile
        self.hosts: list[Host] = []  # hosts of ranks 1, 2 and so on, as far as they have come
        self._keys = keys
        self._world_size = world_size
        self._words = words
        self._nonce = secrets.token_hex(8)
        self._nonces: list[str] = []  # of ranks 1, 2 and so on
        self._told: OperationEnd | None = None
        self._ticks = 0
        self._ticked = float("-inf")

    def __repr__(self) -> str:
        return f"<Caller: {1 + len(self.hosts)} of {self._world_size} ranks are there>"

    def look(self, host: Host) -> Answer | None:
        """Show a sign of life, count the ranks, and answer all once they are there; return rank 0's own answer."""
        if time.monotonic() - self._ticked > _TICK_SECONDS:
            self._tick()
        self._count()
        self._listen()
        if len(self.hosts) < self._world_size - 1:
            return None
        return self._answer([host, *self.hosts])

    def tell(self, ended: OperationEnd) -> None:
        """Tell the ranks that wait for their answer that an operation has ended."""
        self._told = ended
        self._tick()

    def absent(self) -> int:
        """Return the lowest rank that has not come."""
        return len(self.hosts) + 1

    def present(self) -> dict[int, Host]:
        """Return the hosts of all ranks that have come, even after an absent one; one request a rank."""
        hosts = {}
        for rank in range(1, self._world_size):
            sign = self._keys.get(MemberSign, "here", rank, sender=rank)
            if sign is not None and sign.root == self._nonce:
                hosts[rank] = sign.host
        return hosts

    def _answer(self, hosts: Sequence[Host]) -> Answer:
        session, token, sample = secrets.token_hex(8), new_token(), _sample(hosts)
        answers = [
            Answer(session, token, hosts[0].name, _elsewhere(own, sample), words)
            for own, words in zip(hosts, self._words(hosts), strict=True)
        ]
        for start in range(1, self._world_size, AT_ONCE):
            ranks = range(start, min(start + AT_ONCE, self._world_size))
            self._keys.set_all({rank: Reply(self._nonces[rank - 1], answers[rank]) for rank in ranks}, "answer")
        return answers[0]

    def _tick(self) -> None:
        """Show that this process is alive, and the operation that has ended."""
        self._ticked, self._ticks = time.monotonic(), self._ticks + 1
        self._keys.set(RootSign(self._nonce, self._ticks, self._told), "root")

    def _count(self) -> None:
        """Count the ranks, in order, that repeat this rank's nonce."""
        while (rank := len(self.hosts) + 1) < self._world_size:
            upcoming = range(rank, min(rank + AT_ONCE, self._world_size))
            signs = self._keys.get_ranks(MemberSign, "here", upcoming)
            if not signs and not (signs := self._keys.get_ranks(MemberSign, "here", upcoming[:1])):
                return
            for sign in signs:
                if sign.root != self._nonce:
                    return
                self._nonces.append(sign.nonce)
                self.hosts.append(sign.host)

    def _listen(self) -> None:
        """Read of an operation that a rank has ended, and pass it on."""
        ended = self._keys.get(Ended, "ended")
        if ended is not None and ended.root == self._nonce and self.heard != ended.end:
            self.heard = ended.end
            self.tell(ended.end)


def _sample(hosts: Sequence[Host]) -> list[Host]:
    """Return a few different hosts: one more than a rank is told of, since its own may be among them."""
    different: dict[str, Host] = {}
    for host in hosts:
        if len(different) > _ELSEWHERE:
            break
        different.setdefault(host.identity, host)
    return list(different.values())


def _elsewhere(own: Host, sample: Sequence[Host]) -> tuple[Host, ...]:
    return tuple(host for host in sample if host.identity != own.identity)[:_ELSEWHERE]


_SILENT_SECONDS = 5.0  # how long rank 0 may show nothing before it counts as absent


class Member:
    """Repeats rank 0's nonce, and looks for rank 0's answer."""

    def __init__(self, keys: RollKeys, rank: int) -> None:
        self.heard: OperationEnd | None = None  # the last operation that another rank has ended meanwhile
        self._keys = keys
        self._rank = rank
        self._nonce = secrets.token_hex(8)
        self._told: OperationEnd | None = None
        self._root: str | None = None  # rank 0's nonce, as seen last
        self._ticks = 0  # rank 0's, as seen last
        self._alive: float | None = None  # when rank 0 was last known to be alive
        self._looked = False

    def __repr__(self) -> str:
        return f"<Member {self._rank}, {'rank 0 was never seen' if self._root is None else 'rank 0 was seen'}>"

    def look(self, host: Host) -> Answer | None:
        """Repeat the nonce of the present rank 0; return the answer if it is there."""
        shown = self._look_at_root(host)
        reply = self._keys.get(Reply, "answer", self._rank, sender=0)
        answer = reply.answer if reply is not None and reply.nonce == self._nonce else None
        if shown is not None and (self._alive is not None or answer is not None):
            self.heard = shown
        return answer

    def tell(self, ended: OperationEnd) -> None:
        """Tell rank 0, and so all others, that an operation has ended."""
        self._told = ended
        self._keys.set(Ended(self._root, ended), "ended")

    def absent(self) -> int | None:
        """Return 0 if rank 0 shows no sign of life, else None; a member knows of no other rank."""
        silent = self._alive is None or time.monotonic() - self._alive > _SILENT_SECONDS
        return 0 if silent else None

    def _look_at_root(self, host: Host) -> OperationEnd | None:
        """Look for rank 0's sign of life, and show this rank to a new rank 0; return the operation that it reports."""
        first, self._looked = not self._looked, True
        shown = self._keys.get(RootSign, "root", sender=0)
        if shown is None:
            return None
        if shown.nonce != self._root:
            self._root = shown.nonce
            if self._told is not None:
                self.tell(self._told)
            self._keys.set(MemberSign(self._nonce, shown.nonce, host), "here", self._rank)
            alive = not first  # the first look may find an earlier process's
        else:
            alive = shown.ticks != self._ticks
        self._ticks = shown.ticks
        if alive:
            self._alive = time.monotonic()
        return shown.told


class RollCall:
    """One rank's part in the roll call: looks at the store until there is an answer.

    :meth:`look`, :meth:`present` and :meth:`tell` block until the store has answered, and are called in the client's
    thread.
    """

    def __init__(
        self,
        client: StoreClient,
        prefix: str,
        rank: int,
        world_size: int,
        *,
        address: str | None = None,  # this host's address in the job's network, if the caller states it
        words: Callable[[Sequence[Host]], Sequence[bytes]] = lambda hosts: [b""] * len(hosts),
    ) -> None:
        """Prepare the roll call; nothing is sent. On rank 0, ``words`` turns all hosts into a message for each rank."""
        self.client = client
        self.answer: Answer | None = None  # rank 0's answer, once it is there
        self._rank = rank
        self._world_size = world_size
        self._given_address = address
        self._stated = ""
        self._host: Host | None = None
        self._keys = RollKeys(client, prefix)
        self._part = Caller(self._keys, world_size, words) if rank == 0 else Member(self._keys, rank)

    def __repr__(self) -> str:
        return f"<Roll of rank {self._rank} of {self._world_size}, {self._keys!r}>"

    @property
    def heard(self) -> OperationEnd | None:
        """The last operation that a rank has ended before there was an answer."""
        return self._part.heard

    def key(self, *names: object) -> str:
        """Return a key that no other session has. The answer has to be there."""
        assert self.answer is not None  # noqa: S101 -- for mypy
        return self._keys.name(self.answer.session, *names)

    async def answered(self, heard: Callable[[int, Abort], None]) -> Answer:
        """Look until there is an answer; pass operations that have ended to ``heard``. Waits without a limit."""
        backoff, known = Backoff.of_store(self._world_size), self.heard
        while True:
            answer = await self.client.call(self.look)
            if self.heard is not None and self.heard != known:
                known = self.heard
                heard(known.number, known.abort)
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

    def address(self) -> str:
        """Return the address at which this rank listens; the answer has to be there.

        Raises InputError if this host has no address that the others reach.
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
        """Tell the ranks that wait for their answer that an operation has ended."""
        self._part.tell(OperationEnd(number, abort))

    def _server(self) -> tuple[str, int] | None:
        inner = innermost(self.client.shared)
        return (inner.host, inner.port) if isinstance(inner, TCPStore) else None
