"""Rank 0's part in the roll call."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from bcp.coordinators.hello import Abort
from bcp.coordinators.hosts import Host
from bcp.coordinators.proof import new_token
from bcp.coordinators.roll.keys import AT_ONCE, Answer, Ended, Keys

__all__ = ["Caller"]

_ELSEWHERE = 3  # other hosts that a rank is told of
_TICK_SECONDS = 0.25  # how often rank 0 shows that it still waits


class Caller:
    """Shows a nonce, counts the ranks that repeat it, and answers all once they are there.

    Attributes:
        heard: the last operation that another rank has ended meanwhile.
        hosts: the hosts of ranks 1, 2 and so on, as far as they have come.
    """

    def __init__(self, keys: Keys, world_size: int, texts: Callable[[Sequence[Host]], Sequence[str]]) -> None:
        """Prepare; ``texts`` returns rank 0's words for each rank, given the hosts of all."""
        self.heard: Ended | None = None
        self.hosts: list[Host] = []
        self._keys = keys
        self._world_size = world_size
        self._texts = texts
        self._nonce = secrets.token_hex(8)
        self._nonces: list[str] = []  # of ranks 1, 2 and so on
        self._told: Ended | None = None
        self._ticks = 0
        self._ticked = float("-inf")

    def __repr__(self) -> str:
        """Show how many ranks are there."""
        return f"<Caller: {1 + len(self.hosts)} of {self._world_size} ranks are there>"

    def look(self, host: Host) -> Answer | None:
        """Show a sign of life, count the ranks, and answer all once they are there; return the answer to itself."""
        if time.monotonic() - self._ticked > _TICK_SECONDS:
            self._tick()
        self._count()
        self._listen()
        if len(self.hosts) < self._world_size - 1:
            return None
        return self._answer([host, *self.hosts])

    def tell(self, ended: Ended) -> None:
        """Let the ranks that wait for their answer know that an operation has ended."""
        self._told = ended
        self._tick()

    def absent(self) -> int:
        """Return the lowest rank that has not come."""
        return len(self.hosts) + 1

    def present(self) -> dict[int, Host]:
        """Return the hosts of all ranks that have come, also those behind an absent one; asks for each of them."""
        found = {}
        for rank in range(1, self._world_size):
            _, root, host = self._keys.get("here", rank) or (None, None, {})
            if root == self._nonce:
                found[rank] = Host.of(host)
        return found

    def _answer(self, hosts: Sequence[Host]) -> Answer:
        session, token, sample = secrets.token_hex(8), new_token(), _sample(hosts)
        answers = [
            Answer(session, token, hosts[0].name, _elsewhere(own, sample), text)
            for own, text in zip(hosts, self._texts(hosts), strict=True)
        ]
        for start in range(1, self._world_size, AT_ONCE):
            ranks = range(start, min(start + AT_ONCE, self._world_size))
            self._keys.set_all({rank: [self._nonces[rank - 1], asdict(answers[rank])] for rank in ranks}, "answer")
        return answers[0]

    def _tick(self) -> None:
        """Show that this process is alive, and the operation that has ended."""
        self._ticked, self._ticks = time.monotonic(), self._ticks + 1
        told = None if self._told is None else [self._told.number, asdict(self._told.abort)]
        self._keys.set([self._nonce, self._ticks, told], "root")

    def _count(self) -> None:
        """Move on over the ranks that have come; each is looked for until it repeats this rank's nonce."""
        while (rank := len(self.hosts) + 1) < self._world_size:
            upcoming = [self._keys.name("here", each) for each in range(rank, min(rank + AT_ONCE, self._world_size))]
            found = self._keys.get_all(upcoming) or self._keys.get_all(upcoming[:1])
            if not found:
                return
            for nonce, root, host in found:
                if root != self._nonce:
                    return
                self._nonces.append(nonce)
                self.hosts.append(Host.of(host))

    def _listen(self) -> None:
        """Hear of an operation that a rank has ended, and pass it on."""
        root, number, abort = self._keys.get("ended") or (None, 0, {})
        if root == self._nonce and self.heard != (ended := Ended(number, Abort(**abort))):
            self.heard = ended
            self.tell(ended)


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
