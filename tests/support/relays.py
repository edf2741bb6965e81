"""Relays between ranks of one process: they record, or change, the bytes that cross the sockets of a job."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import msgspec
import pytest

from bcp._messages.coordination import Card
from bcp.coordinators import GrpcCoordinator, Tls
from bcp.coordinators.mesh import Mesh
from bcp.coordinators.tree.rendezvous import MemoryRendezvous, Tree

LOOPBACK = "127.0.0.1"
Change = Callable[[bytes], bytes]


class Relay:
    """Listens for every listener of a job, and passes on what comes, both ways.

    Attributes:
        seen: all bytes, of each connection and direction apart.
    """

    def __init__(self, change: Change = lambda data: data) -> None:
        self.seen: list[bytearray] = []
        self._change = change
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    @property
    def bytes(self) -> bytes:
        return b"\n".join(self.seen)

    def before(self, port: int) -> int:
        """Return a port of the relay's own for one of the job."""
        listener = socket.create_server((LOOPBACK, 0))
        self._sockets.append(listener)
        threading.Thread(target=self._listen, args=(listener, port), daemon=True).start()
        return int(listener.getsockname()[1])

    def _listen(self, listener: socket.socket, port: int) -> None:
        with suppress(OSError):
            while True:
                outer, _ = listener.accept()
                inner = socket.create_connection((LOOPBACK, port))
                self._sockets += [outer, inner]
                for source, target in ((outer, inner), (inner, outer)):
                    record = bytearray()
                    self.seen.append(record)
                    threading.Thread(target=self._pass_on, args=(source, target, record), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                record += data
                target.sendall(self._change(data))
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def relayed_job(
    size: int, tree: Relay, mesh: Relay, monkeypatch: pytest.MonkeyPatch, tls: Tls | None = None
) -> tuple[list[GrpcCoordinator], str]:
    """Return coordinators that meet at the relays' addresses, and their token."""

    class Tapped(MemoryRendezvous):
        async def publish(self, port: int, door: str) -> None:
            del door  # all has to go through the relay
            await super().publish(tree.before(port), "")

    true_card: Any = Mesh.card

    def card(self: Mesh) -> bytes:
        said = Card.decode(true_card.fget(self))
        return msgspec.structs.replace(said, port=mesh.before(said.port)).encode()

    monkeypatch.setattr(Mesh, "card", property(card))
    ranks = Tapped.all_of(Tree.of(["host"] * size, 16))
    coordinators = [GrpcCoordinator(rank, size, each, tls) for rank, each in enumerate(ranks)]
    return coordinators, ranks[0]._invitation.token
