"""Bulk data from rank to rank: plain sockets, opened where two ranks have something to send."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any

import anyio

from bcp.errors import InputError, PeerError
from bcp.protocols import Buffer

__all__ = ["Mesh", "own_address"]

_DIAL_SECONDS = 10.0  # for one address of a rank that has said that it listens
_TOKEN_BYTES = 16
_HEAD_BYTES = 8  # the length of what follows
_WELCOME = b"+"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Mesh:
    """This rank's sockets in one operation: one for each direction between two ranks, opened by the sender.

    Whoever connects has to show the token that the listener published in the job's own store or tree; bytes are only
    bytes, nothing that is received is interpreted.
    """

    def __init__(self, rank: int, address: str) -> None:
        """Listen on a port of the system's choice, on this one address of this host."""
        self._rank = rank
        self._address = address
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = _listen(address)
        self._dialled: dict[int, socket.socket] = {}
        self._accepted: dict[int, socket.socket] = {}
        self._news = anyio.Event()
        self._scope = anyio.CancelScope()

    def __repr__(self) -> str:
        """Show the port and how many ranks are connected."""
        return f"<Mesh of rank {self._rank}: {len(self._dialled)} dialled, {len(self._accepted)} accepted>"

    @property
    def card(self) -> bytes:
        """What other ranks need to connect."""
        port = self._listener.getsockname()[1]
        return json.dumps({"address": self._address, "port": port, "token": self._token.hex()}).encode()

    async def serve(self) -> None:
        """Accept connections until :meth:`close`."""
        loop = asyncio.get_running_loop()
        with self._scope:
            async with anyio.create_task_group() as group:
                while True:
                    connection, _ = await loop.sock_accept(self._listener)
                    group.start_soon(self._welcome, connection)

    def close(self) -> None:
        """Stop to accept; :meth:`disconnect` follows once :meth:`serve` has returned."""
        self._scope.cancel()

    def disconnect(self) -> None:
        """Close all sockets."""
        for each in (self._listener, *self._dialled.values(), *self._accepted.values()):
            each.close()

    async def exchange(
        self, send: Sequence[Buffer], receive: Sequence[int], card_of: Callable[[int], Awaitable[bytes]]
    ) -> list[bytearray]:
        """Send to and receive from all ranks at once; pairs with nothing to send are not connected.

        Args:
            send: bytes for each rank.
            receive: how many bytes come from each rank.
            card_of: returns the card of a rank, once it has one.

        """
        views = [memoryview(data) for data in send]
        received = [bytearray(nbytes) for nbytes in receive]
        received[self._rank][:] = views[self._rank]
        others = [rank for rank in range(len(views)) if rank != self._rank]
        try:
            async with anyio.create_task_group() as group:
                for rank in others:
                    if views[rank].nbytes:
                        group.start_soon(self._send, rank, views[rank].cast("B"), card_of)
                    if receive[rank]:
                        group.start_soon(self._receive, rank, received[rank])
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__
        return received

    async def _send(self, rank: int, data: memoryview, card_of: Callable[[int], Awaitable[bytes]]) -> None:
        """Send one rank its bytes."""
        loop = asyncio.get_running_loop()
        if rank not in self._dialled:
            self._dialled[rank] = await self._dial(rank, json.loads(await card_of(rank)))
        with _blaming(rank):
            await loop.sock_sendall(self._dialled[rank], len(data).to_bytes(_HEAD_BYTES, "big"))
            await loop.sock_sendall(self._dialled[rank], data)

    async def _receive(self, rank: int, out: bytearray) -> None:
        """Receive one rank's bytes."""
        while rank not in self._accepted:
            await self._news.wait()
        connection = self._accepted[rank]
        with _blaming(rank):
            head = await _read(connection, bytearray(_HEAD_BYTES))
            if (nbytes := int.from_bytes(head, "big")) != len(out):
                raise InputError(f"rank {rank} sent {nbytes} bytes where rank {self._rank} expected {len(out)}")
            await _read(connection, out)

    async def _dial(self, rank: int, card: dict[str, Any]) -> socket.socket:
        """Connect to a rank."""
        address, port = card["address"], card["port"]
        connection = socket.socket(_family(address))
        connection.settimeout(0)
        try:
            with anyio.fail_after(_DIAL_SECONDS):
                await self._shake_hands(connection, (address, port), card["token"])
        except OSError as error:  # TimeoutError is one, too
            connection.close()
            cause = (
                f"rank {self._rank} cannot connect to it at {address} port {port}: {error or type(error).__name__}; "
                "if the ranks' network is another one, say so, as in GrpcCoordinator.over(address=...)"
            )
            raise PeerError(rank, cause) from error
        except BaseException:
            connection.close()
            raise
        return connection

    async def _shake_hands(self, connection: socket.socket, address: tuple[str, object], token: str) -> None:
        """Connect, show the token and this rank, and wait to be welcomed."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_sendall(connection, bytes.fromhex(token) + self._rank.to_bytes(4, "big"))
        await _read(connection, bytearray(len(_WELCOME)))

    async def _welcome(self, connection: socket.socket) -> None:
        """Let a connection in that shows the token; close any other."""
        connection.settimeout(0)
        with suppress(OSError):
            with anyio.fail_after(_DIAL_SECONDS):
                shown = await _read(connection, bytearray(_TOKEN_BYTES + 4))
                known = hmac.compare_digest(shown[:_TOKEN_BYTES], self._token)
                if known:
                    await asyncio.get_running_loop().sock_sendall(connection, _WELCOME)
            if known:
                self._accepted[int.from_bytes(shown[_TOKEN_BYTES:], "big")] = connection
                self._news.set()
                self._news = anyio.Event()
                return
        connection.close()


@contextmanager
def _blaming(rank: int) -> Iterator[None]:
    """Turn a broken connection into the other rank's error."""
    try:
        yield
    except OSError as error:
        raise PeerError(rank, f"the connection to rank {rank} broke: {error}") from error


async def _read(connection: socket.socket, out: bytearray) -> bytearray:
    """Fill ``out``, or raise ConnectionError."""
    loop = asyncio.get_running_loop()
    view = memoryview(out)
    while view:
        count = await loop.sock_recv_into(connection, view)
        if not count:
            raise ConnectionResetError("closed by the other side")
        view = view[count:]
    return out


def _listen(address: str) -> socket.socket:
    """Return a non-blocking listener on that address alone."""
    listener = socket.create_server((address, 0), family=_family(address), backlog=1024)
    listener.settimeout(0)
    return listener


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def own_address(server: tuple[str, int] | None) -> str:
    """Return this host's address in the job's network: the one on the way to the store's server, loopback without one.

    Where the way to the server is a loopback although the server's name is not one (many hosts call themselves
    127.0.1.1), it is the address on the way out. No packet is sent: hosts without a way out wait for nothing.
    """
    if server is None or server[0] in _LOOPBACK:
        return "127.0.0.1"
    found = [_source(*server), _source("10.255.255.255", 9)]
    return next((address for address in found if address and not ip_address(address).is_loopback), "127.0.0.1")


def _source(host: str, port: int) -> str | None:
    """Return the address from which packets to a host would leave this one."""
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return None
