"""Connections that nobody of a job makes: scanners, browsers, and programs that have the wrong port."""

from __future__ import annotations

import socket
import struct
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from jobs import seat
from ranks import forkserver

from benchmarks.network import Network, enter

__all__ = ["Strangers"]

_LISTENS = "0A"  # in /proc/net/tcp
_RESET = struct.pack("ii", 1, 0)
_WORDS = (
    b"",
    b"GET / HTTP/1.1\r\nHost: h1\r\n\r\n",
    bytes(range(256)) * 40,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    bytes(64),
)
_HELD = 100  # connections that are left open


class Strangers:
    """Knock at every port on which a process's host listens, again and again, as long as the context lasts."""

    def __init__(self, network: Network, host: int, victim: int, address: str, spare: Iterable[int]) -> None:
        """Prepare.

        Args:
            network: the hosts.
            host: where they come from.
            victim: a process on the host at whose ports they knock.
            address: that host's.
            spare: ports that they leave alone.

        """
        self._folder = tempfile.TemporaryDirectory()
        self._knocks = Path(self._folder.name) / "knocks"
        where = seat(network, host, self._folder.name)
        self._process = forkserver().Process(
            target=_knock, args=(victim, address, list(spare), self._knocks, *where), daemon=True
        )

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    def knocks(self) -> dict[int, int]:
        """Return how many there were at each port."""
        lines = self._knocks.read_text().split() if self._knocks.exists() else []
        return Counter(map(int, lines[:-1]))  # the last one may be half a line


def _knock(victim: int, address: str, spare: list[int], knocks: Path, *where: Any) -> None:
    enter(*where)
    held: deque[socket.socket] = deque()
    number = 0
    with knocks.open("w", buffering=1) as log:
        while True:
            for port in _ports(victim) - set(spare):
                number += 1
                with suppress(OSError):
                    stranger = socket.create_connection((address, port), timeout=1.0)
                    stranger.sendall(_WORDS[number % len(_WORDS)])
                    log.write(f"{port}\n")
                    if number % 3 == 0:
                        held.append(stranger)
                    elif number % 3 == 1:
                        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        stranger.close()
                    else:
                        stranger.close()
            while len(held) > _HELD:
                held.popleft().close()
            time.sleep(0.01)


def _ports(victim: int) -> set[int]:
    """Return the ports that others reach on a process's host."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{victim}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            host, _, port = local.rpartition(":")
            if state == _LISTENS and not host.endswith("0100007F"):
                found.add(int(port, 16))
    return found
