"""Finds the ranks of this job in a store that may hold keys of processes that have ended.

torchrun may keep its store while it restarts the workers, and no number that it gives them is the same on all hosts.
So no key is believed for its name. Rank 0 draws a nonce and shows it; the others show nonces of their own beside it;
rank 0 answers each beside the nonce that it showed. Who repeats a nonce has seen it, and so is alive.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from weakref import ref

from torch.distributed import TCPStore

from bcp.coordinators.hello import Abort
from bcp.coordinators.hosts import Host, address_of, here, stated_address
from bcp.coordinators.store_client import StoreClient, innermost
from bcp.errors import PeerError

__all__ = ["Answer", "Roll"]

_AT_ONCE = 256  # keys in one look
_ELSEWHERE = 3  # other hosts that a rank is told of
_TICK_SECONDS = 0.25  # how often rank 0 shows that it still waits
_SILENT_SECONDS = 5.0  # how long rank 0 may show nothing before it counts as absent
_ATTENTION_SECONDS = 60.0  # how long a store may be silent before nobody looks in the background any more
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks; doubles


@dataclass(frozen=True, slots=True)
class Answer:
    """What rank 0 tells a rank, once all are there.

    Attributes:
        session: of these processes; no others have had it.
        token: their secret.
        elsewhere: some of the job's other hosts.
        text: what :class:`Roll` was given for this rank.
    """

    session: str
    token: str = field(repr=False)
    elsewhere: tuple[Host, ...]
    text: str


class Roll:
    """One rank's part in the roll call: looks, one after another, until there is an answer.

    :meth:`look` and :meth:`tell` block until the store has answered, and are called in the client's thread.

    Attributes:
        answer: rank 0's answer, once it is there.
        heard: the last operation that a rank has ended meanwhile, and why.
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
            texts: returns on rank 0 what else each rank is told, given the hosts of all.

        """
        self.answer: Answer | None = None
        self.heard: tuple[int, Abort] | None = None
        self._client = client
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._given_address = address
        self._texts = texts
        self._nonce = secrets.token_hex(8)
        self._stated = ""
        self._host: Host | None = None
        self._told: tuple[int, Abort] | None = None
        self._ticks = 0  # of rank 0: its own, or as seen last
        self._ticked: float | None = None  # when rank 0 was last known to be alive
        self._root: str | None = None  # rank 0's nonce, as seen last
        self._shown: tuple[int, Abort] | None = None  # what rank 0 tells, whether or not it is alive
        self._looked = False
        self._attendant: threading.Thread | None = None
        self._here: list[tuple[str, Host]] = []  # nonce and host of rank 1 and the next ones, as far as they have come

    def __repr__(self) -> str:
        """Show the place in the store."""
        return f"<Roll of rank {self._rank} of {self._world_size}, {self._prefix!r}>"

    async def answered(self, heard: Callable[[int, Abort], None]) -> Answer:
        """Look until there is an answer; pass on which operations have ended meanwhile. Waits without a limit."""
        pause, known = _FIRST_PAUSE, self.heard
        while True:
            answer = await self._client.call(self.look)
            if self.heard is not None and self.heard != known:
                known = self.heard
                heard(*known)
            if answer is not None:
                return answer
            await asyncio.sleep(pause)
            # 20 looks a second by each of 1,000 ranks are as many as one store answers; more ranks look less often
            pause = min(2 * pause, _LONGEST_PAUSE * max(1.0, self._world_size / 1000))

    @property
    def client(self) -> StoreClient:
        """What calls the store."""
        return self._client

    def key(self, *names: object) -> str:
        """Return a key that no other session has; there has to be an answer."""
        assert self.answer is not None  # noqa: S101 -- for mypy
        return self._key(self.answer.session, *names)

    def look(self) -> Answer | None:
        """Look once; return this rank's answer if it is there."""
        if self.answer is None:
            if self._host is None:
                self._stated = stated_address(self._given_address)
                self._host = here(self._server(), self._stated)
            if self._rank == 0:
                self._gather(self._host)
            else:
                self._find(self._host)
            self._looked = True
        return self.answer

    def attend(self) -> None:
        """Go on looking in the background until there is an answer: others may come and have to hear what has ended."""
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
        if self.answer is not None:
            return None
        if self._rank == 0:
            return len(self._here) + 1
        silent = self._ticked is None or time.monotonic() - self._ticked > _SILENT_SECONDS
        return 0 if silent else None

    def tell(self, number: int, abort: Abort) -> None:
        """Let those who wait for their answer know that an operation has ended."""
        self._told = number, abort
        if self._rank == 0:
            self._tick()
        else:
            self._set(self._key("ended"), [self._root, number, asdict(abort)])

    def forget(self) -> None:
        """Delete the keys, where the store can; nobody may look any more."""
        names = (
            ("root",),
            ("ended",),
            *((name, rank) for name in ("here", "answer") for rank in range(self._world_size)),
        )
        for each in names:
            with suppress(RuntimeError, NotImplementedError):
                self._client.store.delete_key(self._key(*each))

    # -- rank 0 -------------------------------------------------------------------------------

    def _gather(self, host: Host) -> None:
        """Show a sign of life, count who is there, and answer all once they are."""
        if self._ticked is None or time.monotonic() - self._ticked > _TICK_SECONDS:
            self._tick()
        self._count()
        self._listen()
        if len(self._here) < self._world_size - 1:
            return
        hosts = [host, *(other for _, other in self._here)]
        session, token, sample = secrets.token_hex(8), secrets.token_hex(16), _sample(hosts)
        told = zip(hosts, self._texts(hosts), strict=True)
        answers = [Answer(session, token, _elsewhere(own, sample), text) for own, text in told]
        for start in range(1, self._world_size, _AT_ONCE):
            ranks = range(start, min(start + _AT_ONCE, self._world_size))
            keys = [self._key("answer", rank) for rank in ranks]
            texts = [json.dumps([self._here[rank - 1][0], asdict(answers[rank])]) for rank in ranks]
            self._client.store.multi_set(keys, texts)  # type: ignore[attr-defined]  # its stub lacks it
        self.answer = answers[0]

    def _tick(self) -> None:
        """Show that this process is alive, and what has ended."""
        self._ticked, self._ticks = time.monotonic(), self._ticks + 1
        told = None if self._told is None else [self._told[0], asdict(self._told[1])]
        self._set(self._key("root"), [self._nonce, self._ticks, told])

    def _count(self) -> None:
        """Move on over the ranks that have come; each is looked for until it repeats this rank 0's nonce."""
        while (rank := len(self._here) + 1) < self._world_size:
            upcoming = [self._key("here", each) for each in range(rank, min(rank + _AT_ONCE, self._world_size))]
            store = self._client.store
            if not store.check(upcoming):
                upcoming = upcoming[:1]
                if not store.check(upcoming):
                    return
            for value in store.multi_get(upcoming):
                nonce, root, host = json.loads(bytes(value))
                if root != self._nonce:
                    return
                self._here.append((nonce, Host.of(host)))

    def _listen(self) -> None:
        """Hear of an operation that a rank has ended, and pass it on."""
        value = self._get(self._key("ended"))
        root, number, abort = (None, 0, {}) if value is None else json.loads(value)
        if root == self._nonce and self.heard != (number, Abort(**abort)):
            self.heard = self._told = number, Abort(**abort)
            self._tick()

    # -- the others ---------------------------------------------------------------------------

    def _find(self, host: Host) -> None:
        """Show this rank beside the present rank 0's nonce, and look for the answer."""
        shown = self._get(self._key("root"))
        if shown is not None:
            root, ticks, told = json.loads(shown)
            if root != self._root:
                self._root = root
                if self._told is not None:
                    self.tell(*self._told)
                self._set(self._key("here", self._rank), [self._nonce, root, asdict(host)])
                alive = self._looked  # what was there at the first look may be an earlier process's
            else:
                alive = ticks != self._ticks
            self._ticks = ticks
            if alive:
                self._ticked = time.monotonic()
            self._shown = None if told is None else (told[0], Abort(**told[1]))
        value = self._get(self._key("answer", self._rank))
        nonce, data = (None, {}) if value is None else json.loads(value)
        if nonce == self._nonce:
            self.answer = Answer(**{**data, "elsewhere": tuple(map(Host.of, data["elsewhere"]))})
        if self._shown is not None and (self._ticked is not None or self.answer is not None):
            self.heard = self._shown

    # -- the store ----------------------------------------------------------------------------

    def _server(self) -> tuple[str, int] | None:
        inner = innermost(self._client.shared)
        return (inner.host, inner.port) if isinstance(inner, TCPStore) else None

    def _key(self, *names: object) -> str:
        return "/".join((self._prefix, *map(str, names)))

    def _set(self, key: str, value: object) -> None:
        self._client.store.set(key, json.dumps(value))

    def _get(self, key: str) -> bytes | None:
        """Return a value, or None where there is none yet."""
        store = self._client.store
        return bytes(store.get(key)) if store.check([key]) else None


def _attend(roll_of: ref[Roll]) -> None:
    """Look now and then, as long as somebody has the roll and the store answers."""
    with suppress(PeerError):
        while (roll := roll_of()) is not None:
            if roll.client.call_blocking(roll.look, seconds=_ATTENTION_SECONDS) is not None:
                return
            del roll
            time.sleep(_LONGEST_PAUSE)


def _sample(hosts: Sequence[Host]) -> list[Host]:
    """Return a few different hosts, one more than a rank is told of: its own may be among them."""
    different: dict[str, Host] = {}
    for host in hosts:
        if len(different) > _ELSEWHERE:
            break
        different.setdefault(host.identity, host)
    return list(different.values())


def _elsewhere(own: Host, sample: Sequence[Host]) -> tuple[Host, ...]:
    return tuple(host for host in sample if host.identity != own.identity)[:_ELSEWHERE]
