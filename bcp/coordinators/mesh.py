"""Bulk data from rank to rank: sockets of one operation, opened if two ranks have something to send."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any

import anyio

from bcp.coordinators.proof import proof
from bcp.coordinators.strangers import Stranger, Strangers
from bcp.coordinators.tls import TlsContexts
from bcp.coordinators.wire import TlsWire, Wire
from bcp.errors import InputError, PeerError
from bcp.protocols import Buffer

__all__ = ["Mesh", "own_address"]

_DIAL_SECONDS = 10.0  # for one rank that has said that it listens
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two attempts to connect; doubles
_STRANGERS = 64  # besides the ranks that have still to come
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_HEAD_BYTES = 8  # the length of what follows
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class _UnprovedError(Exception):
    """The other side does not know the secret."""


class Mesh:
    """This rank's sockets in one operation: one for each direction between two ranks, opened by the sender.

    Both sides of a connection prove that they know a secret: the token that the listener published in the job's own
    store or tree, keyed with the job's secret if there is one. Neither is shown. Bytes are only bytes: nothing that is
    received is interpreted.
    """

    def __init__(
        self,
        rank: int,
        address: str,
        world_size: int,
        *,
        secret: Callable[[], bytes] = lambda: b"",
        tls: TlsContexts | None = None,
    ) -> None:
        """Listen on a port of the system's choice, on this one address of this host.

        Args:
            rank: this rank.
            address: this host's, in the job's network.
            world_size: how many ranks there are.
            secret: returns the job's secret, once a card of any rank is known.
            tls: settings of TLS, for every connection; None: plain TCP.

        """
        self._rank = rank
        self._address = address
        self._world_size = world_size
        self._secret = secret
        self._tls = tls
        self._token = secrets.token_hex(_NONCE_BYTES)
        self._listener = _listen(address)
        self._dialled: dict[int, Wire] = {}
        self._accepted: dict[int, Wire] = {}
        self._replaced: list[Wire] = []  # by a second connection of the same rank
        self._unproved: set[Wire] = set()
        self._strangers = Strangers("bulk data", rank, self._most_strangers)
        self._news = anyio.Event()
        self._scope = anyio.CancelScope()

    def __repr__(self) -> str:
        """Show the port and how many ranks are connected."""
        return f"<Mesh of rank {self._rank}: {len(self._dialled)} dialled, {len(self._accepted)} accepted>"

    @property
    def card(self) -> bytes:
        """What other ranks need to connect."""
        port = self._listener.getsockname()[1]
        tls = self._tls is not None
        return json.dumps({"address": self._address, "port": port, "token": self._token, "tls": tls}).encode()

    async def serve(self) -> None:
        """Accept connections until :meth:`close`."""
        try:
            with self._scope:
                async with anyio.create_task_group() as group:
                    while True:
                        connection, peer = await self._strangers.accept(self._listener)
                        with suppress(OSError):  # it has closed already
                            wire = self._wire(connection, None)
                            self._unproved.add(wire)
                            stranger = self._strangers.enter(peer, wire.hang_up)
                            group.start_soon(self._welcome, wire, stranger)
        finally:
            self._strangers.close()
            for wire in self._unproved:
                wire.close()

    def close(self) -> None:
        """Stop to accept; :meth:`disconnect` follows once :meth:`serve` has returned."""
        self._scope.cancel()

    def disconnect(self) -> None:
        """Close all sockets."""
        self._listener.close()
        for wire in (*self._dialled.values(), *self._accepted.values(), *self._replaced):
            wire.close()

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
        if rank not in self._dialled:
            self._dialled[rank] = await self._dial(rank, json.loads(await card_of(rank)))
        with _blaming(rank):
            await self._dialled[rank].send(len(data).to_bytes(_HEAD_BYTES, "big"))
            await self._dialled[rank].send(data)

    async def _receive(self, rank: int, out: bytearray) -> None:
        """Receive one rank's bytes."""
        while rank not in self._accepted:
            await self._news.wait()
        wire = self._accepted[rank]
        with _blaming(rank):
            head = await wire.fill(bytearray(_HEAD_BYTES))
            if (nbytes := int.from_bytes(head, "big")) != len(out):
                raise InputError(f"rank {rank} sent {nbytes} bytes where rank {self._rank} expected {len(out)}")
            await wire.fill(out)

    # -- dialling -----------------------------------------------------------------------------

    async def _dial(self, rank: int, card: dict[str, Any]) -> Wire:
        """Connect to a rank; again and again, if it hangs up on a connection that it takes for a stranger's."""
        if card["tls"] != (self._tls is not None):
            with_tls, without = (rank, self._rank) if card["tls"] else (self._rank, rank)
            raise PeerError(
                rank,
                f"rank {with_tls} sends bulk data with TLS and rank {without} without; give tls= to the coordinators "
                "of all ranks, or to none",
            )
        where = f"{card['address']} port {card['port']}"
        last: Exception | None = None
        pause = _FIRST_PAUSE
        try:
            with anyio.fail_after(_DIAL_SECONDS):
                while True:
                    connection = await _connected(card["address"], card["port"])
                    try:
                        return await self._introduced(connection, rank, card)
                    except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
                        last = error
                    await anyio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except ssl.SSLError as error:
            raise self._untrusted(rank, where, error) from error
        except (OSError, _UnprovedError) as error:  # TimeoutError is one, too
            cause = (
                f"rank {self._rank} cannot connect to it at {where}: {last or error or type(error).__name__}; "
                "if the ranks' network is another one, say so, as in GrpcCoordinator.over(address=...)"
            )
            raise PeerError(rank, cause) from error

    async def _introduced(self, connection: socket.socket, rank: int, card: dict[str, Any]) -> Wire:
        """Prove to the listener that this is a rank of the job, and let it prove the same."""
        name = None if self._tls is None else self._tls.target_name or card["address"]
        wire = self._wire(connection, name)
        try:
            await wire.handshake()
            nonce = secrets.token_bytes(_NONCE_BYTES)
            await wire.send(nonce + self._rank.to_bytes(4, "big"))
            challenge = bytes(await wire.fill(bytearray(_NONCE_BYTES)))
            facts = (self._rank, rank, nonce.hex(), challenge.hex())
            key = self._key(card["token"])
            await wire.send(proof(key, "dials", *facts))
            _compare(await wire.fill(bytearray(_PROOF_BYTES)), proof(key, "listens", *facts))
        except BaseException:
            wire.close()
            raise
        return wire

    def _untrusted(self, rank: int, where: str, error: ssl.SSLError) -> PeerError | InputError:
        """Return the error for a TLS handshake with a rank that failed."""
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            cause = f"rank {self._rank} does not accept the certificate of rank {rank} at {where}: {reason}"
            return PeerError(rank, f"{cause}; give it one that the ca of Tls(...) has signed, for this name")
        if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
            return InputError(
                f"rank {rank} does not accept the certificate of rank {self._rank}: {reason}; "
                "give this rank one that is valid, and that the ca of Tls(...) has signed"
            )
        return PeerError(rank, f"rank {self._rank} cannot talk TLS with it at {where}: {reason}")

    # -- listening ----------------------------------------------------------------------------

    async def _welcome(self, wire: Wire, stranger: Stranger) -> None:
        """Keep a connection whose other side proves that it is a rank of the job; close any other."""
        try:
            rank = await self._proved(wire, stranger)
        except _UnprovedError as error:
            self._strangers.refuse(stranger, str(error))
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            self._strangers.refuse(stranger, f"no TLS: {reason}")
        except OSError:
            self._strangers.leave(stranger)
        else:
            if self._strangers.admit(stranger):
                self._unproved.discard(wire)
                if (earlier := self._accepted.get(rank)) is not None:
                    earlier.hang_up()
                    self._replaced.append(earlier)
                self._accepted[rank] = wire
                self._news.set()
                self._news = anyio.Event()
                return
        self._unproved.discard(wire)
        wire.close()

    async def _proved(self, wire: Wire, stranger: Stranger) -> int:
        """Return the rank that has connected, once both sides have proved that they know the secret."""
        await wire.handshake()
        head = await wire.fill(bytearray(_NONCE_BYTES + 4))
        stranger.spoke = True
        nonce, rank = head[:_NONCE_BYTES], int.from_bytes(head[_NONCE_BYTES:], "big")
        challenge = secrets.token_bytes(_NONCE_BYTES)
        await wire.send(challenge)
        facts = (rank, self._rank, nonce.hex(), challenge.hex())
        key = self._key(self._token)
        _compare(await wire.fill(bytearray(_PROOF_BYTES)), proof(key, "dials", *facts))
        await wire.send(proof(key, "listens", *facts))
        return rank

    # -- both ---------------------------------------------------------------------------------

    def _wire(self, connection: socket.socket, name: str | None) -> Wire:
        """Return a connection as it is here, with TLS or without; ``name`` is the listener's, None on its own side."""
        if self._tls is None:
            return Wire(connection)
        return TlsWire(connection, self._tls.listener if name is None else self._tls.dialer, name)

    def _key(self, token: str) -> bytes:
        """Return the key of proofs to the listener that has published a token."""
        return proof(self._secret(), "bulk data", token)

    def _most_strangers(self) -> int:
        """Return how many connections may be unproved: some, and all ranks that have still to come."""
        return _STRANGERS + self._world_size - 1 - len(self._accepted)


def _compare(shown: bytes | bytearray, expected: bytes) -> None:
    """Raise :class:`_UnprovedError` if a proof is wrong."""
    if not hmac.compare_digest(shown, expected):
        raise _UnprovedError("the other side does not know the job's secret")


@contextmanager
def _blaming(rank: int) -> Iterator[None]:
    """Turn a broken connection into the other rank's error."""
    try:
        yield
    except OSError as error:
        raise PeerError(rank, f"the connection to rank {rank} broke: {error}") from error


async def _connected(address: str, port: int) -> socket.socket:
    """Connect to an address."""
    connection = socket.socket(_family(address))
    try:
        connection.settimeout(0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    return connection


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
