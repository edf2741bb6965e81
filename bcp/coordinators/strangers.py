"""Bounds on the number and the time of connections that have not yet proved that they belong to the job."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass

from bcp._log import log
from bcp._sockets import readable

__all__ = ["Stranger", "Strangers", "named"]

PROOF_SECONDS = 10.0
"""How long a connection may take to prove that it belongs to the job."""

LOG_SECONDS = 60.0
"""Seconds between two log lines about refused connections of one listener."""

_PAUSE = 0.05  # seconds until accept is tried again when descriptors or memory are short
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PASSING = frozenset({errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH})


@dataclass(slots=True, eq=False)
class Stranger:
    """A connection that has not proved yet that it belongs to the job."""

    peer: str  # its address, for messages
    hang_up: Callable[[], None]
    spoke: bool = False  # whether any bytes have come; a rank of the job sends some at once
    timer: asyncio.TimerHandle | None = None  # refuses the connection at the end of its time


class Strangers:
    """The strangers of one listener. All calls come from one event loop.

    Each stranger has :data:`PROOF_SECONDS`. If there are too many, the oldest silent one is closed, or the oldest one
    if all have sent something. A rank of the job that is closed so tries again.
    """

    def __init__(self, listener: str, rank: int, most: Callable[[], int]) -> None:
        """Begin without strangers. Log lines name ``listener``; ``most`` returns the largest number of strangers."""
        self._event = f"refused connections to the {listener}"
        self._rank = rank
        self._most = most
        self._here: dict[Stranger, None] = {}  # by age
        self._refused = 0  # since the last log line
        self._last = ("", "")
        self._quiet: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Strangers of rank {self._rank}: {len(self._here)}>"

    def __len__(self) -> int:
        return len(self._here)

    async def accept(self, listener: socket.socket) -> tuple[socket.socket, str]:
        """Return the next connection and its address; if descriptors are short, hang up on a stranger first.

        Nothing is awaited once there is a connection, so a cancellation loses none.
        """
        await asyncio.sleep(0)
        while True:
            try:
                connection, peer = listener.accept()
            except BlockingIOError:
                await readable(listener)
            except OSError as error:
                if error.errno not in _SHORT | _PASSING:
                    raise
                if error.errno in _SHORT:
                    self._make_room("this process has no descriptor left for it")
                    await asyncio.sleep(_PAUSE)
            else:
                return connection, named(peer)

    def enter(self, peer: str, hang_up: Callable[[], None]) -> Stranger:
        """Add a connection that has still to prove that it belongs here."""
        most = self._most()
        while len(self._here) >= most:
            self._make_room(f"more than {most} connections at once have proved nothing")
        loop = asyncio.get_running_loop()
        stranger = Stranger(peer, hang_up)
        stranger.timer = loop.call_later(
            PROOF_SECONDS, self.refuse, stranger, f"it has proved nothing within {PROOF_SECONDS:g} s"
        )
        self._here[stranger] = None
        return stranger

    def admit(self, stranger: Stranger) -> bool:
        """Remove a connection that has proved that it belongs here; return False if its time was over."""
        if stranger.timer is not None:
            stranger.timer.cancel()
        return self._here.pop(stranger, self) is None

    def refuse(self, stranger: Stranger, reason: str) -> None:
        """Hang up on a stranger, and count it; one that has gone already stays counted once."""
        if self.admit(stranger):
            stranger.hang_up()
            self.count(stranger.peer, reason)

    def leave(self, stranger: Stranger) -> None:
        """Forget a stranger that has gone by itself."""
        self.admit(stranger)

    def count(self, peer: str, reason: str) -> None:
        """Log a refused connection: the first at once, further ones as a number a minute later."""
        self._refused += 1
        self._last = (peer, reason)
        if self._quiet is None:
            self._say()

    def close(self) -> None:
        """Hang up on all strangers, and log the refusals that are not logged yet."""
        for stranger in list(self._here):
            self.admit(stranger)
            stranger.hang_up()
        if self._quiet is not None:
            self._quiet.cancel()
        self._say(again=False)

    def _make_room(self, reason: str) -> None:
        silent = (stranger for stranger in self._here if not stranger.spoke)
        first = next(silent, None) or next(iter(self._here), None)
        if first is not None:
            self.refuse(first, reason)

    def _say(self, *, again: bool = True) -> None:
        """Log the refusals since the last line; then be quiet for a while."""
        self._quiet = None
        if not self._refused:
            return
        count, (peer, reason) = self._refused, self._last
        self._refused = 0
        log.warning(self._event, count=count, peer=peer, reason=reason, rank=self._rank)
        if again:
            self._quiet = asyncio.get_running_loop().call_later(LOG_SECONDS, self._say)


def named(peer: tuple[object, ...]) -> str:
    """Name a socket's address as gRPC does, as in ``ipv4:10.0.0.1:29500``."""
    host, port = peer[:2]
    return f"ipv6:[{host}]:{port}" if ":" in str(host) else f"ipv4:{host}:{port}"
