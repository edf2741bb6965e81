"""Relays between ranks of one process: they record, change or cut the bytes that cross the sockets of a job."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Self

import anyio
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
        connections: the number of connections so far.
    """

    def __init__(self, change: Change = lambda data: data) -> None:
        self.seen: list[bytearray] = []
        self.connections = 0
        self._change = change
        self._listeners: list[socket.socket] = []
        self._ends: list[socket.socket] = []
        self._deaf: set[socket.socket] = set()  # ends whose bytes go nowhere
        self._drops_all = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bytes(self) -> bytes:
        return b"\n".join(self.seen)

    def before(self, port: int) -> int:
        """Return a port of the relay's own for one of the job."""
        listener = socket.create_server((LOOPBACK, 0))
        self._listeners.append(listener)
        threading.Thread(target=self._listen, args=(listener, port), daemon=True).start()
        return int(listener.getsockname()[1])

    def cut(self) -> None:
        """Break all connections; new ones are passed on."""
        ends, self._ends = self._ends, []
        _close(ends)

    def hush(self, *, up: bool = True, down: bool = True, for_good: bool = False) -> None:
        """Drop all bytes of the present connections, and close none: towards the listener (up), from it, or both.

        New connections are passed on, unless it is for good.
        """
        outer, inner = self._ends[::2], self._ends[1::2]
        self._deaf.update(outer if up else (), inner if down else ())
        self._drops_all = for_good

    def close(self) -> None:
        """Break all connections, and accept no others."""
        _close(self._listeners)
        self.cut()

    def _listen(self, listener: socket.socket, port: int) -> None:
        with suppress(OSError):
            while True:
                outer, _ = listener.accept()
                inner = socket.create_connection((LOOPBACK, port))
                self._ends += [outer, inner]
                self.connections += 1
                for source, target in ((outer, inner), (inner, outer)):
                    record = bytearray()
                    self.seen.append(record)
                    threading.Thread(target=self._pass_on, args=(source, target, record), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                record += data
                if not (self._drops_all or source in self._deaf):
                    target.sendall(self._change(data))
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def relayed_job(
    size: int, tree: Relay, mesh: Relay, monkeypatch: pytest.MonkeyPatch, tls: Tls | None = None
) -> tuple[list[GrpcCoordinator], list[MemoryRendezvous]]:
    """Return coordinators that meet at the relays' addresses, and their rendezvous."""

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
    return [GrpcCoordinator(rank, size, each, tls) for rank, each in enumerate(ranks)], ranks


class _Wired(MemoryRendezvous):
    """A rendezvous of a rank that has a relay before its parent."""

    relay: Relay
    address = ""

    async def publish(self, port: int, door: str) -> None:
        del door  # all has to go through the relays
        await super().publish(port, "")

    async def address_of(self, rank: int) -> str:
        if not self.address:
            port = int((await super().address_of(rank)).rpartition(":")[2])
            self.address = f"{LOOPBACK}:{self.relay.before(port)}"
        return self.address


class Wires:
    """The network of a job: a relay on each edge of its tree, between a rank and its parent.

    Attributes:
        coordinators: one for each rank.
    """

    def __init__(self, size: int, fanout: int) -> None:
        self._tree = Tree.of(["host"] * size, fanout)
        self._exit = ExitStack()
        self._relays = [self._exit.enter_context(Relay()) for _ in range(size)]
        ranks = _Wired.all_of(self._tree)
        for each, relay in zip(ranks, self._relays, strict=True):
            assert isinstance(each, _Wired)
            each.relay = relay
        self.coordinators = [GrpcCoordinator(rank, size, each) for rank, each in enumerate(ranks)]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        async with anyio.create_task_group() as group:
            for each in self.coordinators:
                group.start_soon(each.aclose)
        self._exit.close()

    def cut(self, rank: int) -> None:
        """Break the connection of a rank to its parent, without a word."""
        self._relays[rank].cut()

    def hush(self, rank: int, *, up: bool = True, down: bool = True, for_good: bool = False) -> None:
        """Drop all bytes between a rank and its parent, as :meth:`Relay.hush` does."""
        self._relays[rank].hush(up=up, down=down, for_good=for_good)

    def connections(self, rank: int) -> int:
        """Return the number of connections of a rank to its parent so far."""
        return self._relays[rank].connections

    async def renew(self, rank: int) -> None:
        """Break the connection of a rank to its parent, and wait until there is another one.

        The rank dials again only once it has noticed, and its parent forgets the old connection before the new one.
        """
        before = self._relays[rank].connections
        self.cut(rank)
        with anyio.fail_after(60):
            while self._relays[rank].connections == before or not _all_edges_up(self.coordinators[rank]):  # noqa: ASYNC110 -- a coordinator sets no event
                await anyio.sleep(0.001)

    def isolate(self, rank: int) -> None:
        """Break all connections of a rank for good. Nobody hears from it any more, of the other breaks neither."""
        edges = [self._relays[other] for other in (*self._tree.children[rank], rank)]
        for edge in edges:
            edge.hush(for_good=True)
        for edge in edges:
            edge.close()


def _all_edges_up(coordinator: GrpcCoordinator) -> bool:
    found = re.search(r"(\d+) of (\d+) edges up", repr(coordinator))
    return found is not None and found[1] == found[2]
