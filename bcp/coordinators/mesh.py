"""The connections for bulk data of one operation, opened for ranks that have something to send."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import anyio

from bcp._messages.coordination import Card
from bcp._sockets import TlsContexts, TlsWire, Wire, proof
from bcp.coordinators.hosts import HINT, identity
from bcp.coordinators.store_client import Backoff
from bcp.coordinators.strangers import Stranger, Strangers
from bcp.errors import InputError, PeerError
from bcp.runtime.threads import in_pool

__all__ = ["LANES", "PROBE", "PROBE_LEAST", "PROBE_MOST", "Mesh"]

LANES = 4
"""Transfers at a time in each direction, each with a thread."""

PROBE = 0xFFFF_FFFF
"""Number of a connection whose messages are acknowledged, and else dropped: they measure how fast the way is."""

PROBE_LEAST, PROBE_MOST = 64 << 10, 8 << 20
"""Bytes of its first message and of the longest; each is twice as long as the one before."""

_DIAL_SECONDS = 10.0  # for one rank that has said that it listens
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two attempts to connect; doubles
_STRANGERS = 64  # besides the ranks that have still to come
_PROBES = 3  # signs of life that are asked for in vain before a connection counts as broken
_MOST_KEEPALIVE = 32_000.0  # seconds; Linux takes 32,767
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_MOST_THREADS = 64  # those of transfers, and one for each probe of another rank


class _UnprovedError(Exception):
    """The other side does not know the secret."""


class Mesh:
    """This rank's sockets in one operation: one or more for each direction between two ranks, opened by the sender.

    Both sides of a connection prove that they know a secret: the token that the listener published in the tree, keyed
    with the job's secret if there is one. Neither is shown. Received bytes are never interpreted.
    """

    def __init__(
        self,
        rank: int,
        address: str,  # this host's address in the job's network
        world_size: int,
        *,
        patience: float,  # seconds that the network between two ranks may be silent
        secret: Callable[[], bytes] = lambda: b"",  # returns the job's secret, once a card is known
        tls: TlsContexts | None = None,  # None: plain TCP
    ) -> None:
        """Listen on one address of this host, at a port of the system's choice."""
        self.rank = rank
        self.network = identity()  # identity of this host's network
        self.threads = ThreadPoolExecutor(_MOST_THREADS, "bcp-bulk-data")  # for blocking calls on the sockets
        self._address = address
        self._world_size = world_size
        self._secret = secret
        self._tls = tls
        self._token = secrets.token_hex(_NONCE_BYTES)
        self._patience = patience
        self._listener = _listen(address, patience)
        self._dialled: dict[tuple[int, int], Wire] = {}  # by rank and number
        self._accepted: dict[tuple[int, int], Wire] = {}
        self._replaced: list[Wire] = []  # by a second connection of the same rank
        self._unproved: set[Wire] = set()
        self._strangers = Strangers("bulk data", rank, self._most_strangers)
        self._news = anyio.Event()
        self._scope = anyio.CancelScope()

    def __repr__(self) -> str:
        return f"<Mesh of rank {self.rank}: {len(self._dialled)} dialled, {len(self._accepted)} accepted>"

    @property
    def card(self) -> bytes:
        """Facts that other ranks need to connect, as an encoded message."""
        port = self._listener.getsockname()[1]
        tls = self._tls is not None
        return Card(self._address, port, socket.gethostname(), self.network, self._token, tls).encode()

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
        """Stop accepting connections; call :meth:`disconnect` once :meth:`serve` has returned."""
        self._scope.cancel()

    def disconnect(self) -> None:
        """Close all sockets, and release the threads, none of which is busy."""
        self.threads.shutdown(wait=False)
        self._listener.close()
        for wire in (*self._dialled.values(), *self._accepted.values(), *self._replaced):
            wire.close()

    async def accepted(self, rank: int, flow: int) -> Wire:
        """Wait for a connection that a rank opens to this one, and return it."""
        while (rank, flow) not in self._accepted:
            await self._news.wait()
        return self._accepted[rank, flow]

    async def dialled(self, rank: int, flow: int, card: Card) -> Wire:
        """Return this rank's connection to another one; the first call opens it."""
        if (rank, flow) not in self._dialled:
            self._dialled[rank, flow] = await self._dial(rank, flow, card)
        return self._dialled[rank, flow]

    def drop(self, rank: int, flow: int) -> None:
        """Close a connection that this rank has opened, and that no thread uses."""
        self._dialled.pop((rank, flow)).close()

    # -- dialling -----------------------------------------------------------------------------

    async def _dial(self, rank: int, flow: int, card: Card) -> Wire:
        """Connect to a rank; try again while the rank hangs up on this connection as a stranger's."""
        if card.tls != (self._tls is not None):
            with_tls, without = (rank, self.rank) if card.tls else (self.rank, rank)
            raise PeerError(
                rank,
                f"rank {with_tls} sends bulk data with TLS and rank {without} without; give tls= to the coordinators "
                "of all ranks, or to none",
            )
        where = f"{card.address} port {card.port} (host {card.host})"
        last: Exception | None = None
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        try:
            with anyio.fail_after(min(_DIAL_SECONDS, self._patience)):
                while True:
                    connection = await _connected(card.address, card.port)
                    try:
                        return await self._introduced(connection, rank, flow, card)
                    except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
                        last = error
                    await backoff.sleep()
        except ssl.SSLError as error:
            raise self._untrusted(rank, where, error) from error
        except (OSError, _UnprovedError) as error:  # TimeoutError is one, too
            cause = (
                f"rank {self.rank} (host {socket.gethostname()}) cannot connect to rank {rank} at {where}: "
                f"{last or error or type(error).__name__}; {HINT}"
            )
            raise PeerError(rank, cause) from error

    async def _introduced(self, connection: socket.socket, rank: int, flow: int, card: Card) -> Wire:
        """Prove to the listener that this is a rank of the job, and let it prove the same."""
        name = None if self._tls is None else self._tls.target_name or card.address
        wire = self._wire(connection, name)
        try:
            await wire.handshake()
            nonce = secrets.token_bytes(_NONCE_BYTES)
            await wire.send(nonce + self.rank.to_bytes(4, "big") + flow.to_bytes(4, "big"))
            challenge = bytes(await wire.fill(bytearray(_NONCE_BYTES)))
            facts = (self.rank, rank, flow, nonce.hex(), challenge.hex())
            key = self._key(card.token)
            await wire.send(proof(key, "dials", *facts))
            _compare(await wire.fill(bytearray(_PROOF_BYTES)), proof(key, "listens", *facts))
        except BaseException:
            wire.close()
            raise
        return wire

    def _untrusted(self, rank: int, where: str, error: ssl.SSLError) -> PeerError | InputError:
        """Return the error for a failed TLS handshake with a rank."""
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            cause = f"rank {self.rank} does not accept the certificate of rank {rank} at {where}: {reason}"
            return PeerError(rank, f"{cause}; give it one that the ca of Tls(...) has signed, for this name")
        if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
            return InputError(
                f"rank {rank} does not accept the certificate of rank {self.rank}: {reason}; "
                "give this rank one that is valid, and that the ca of Tls(...) has signed"
            )
        return PeerError(rank, f"rank {self.rank} cannot talk TLS with it at {where}: {reason}")

    # -- listening ----------------------------------------------------------------------------

    async def _welcome(self, wire: Wire, stranger: Stranger) -> None:
        """Keep a connection whose other side proves that it is a rank of the job; close any other."""
        try:
            rank, flow = await self._proved(wire, stranger)
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
                if (earlier := self._accepted.get((rank, flow))) is not None:
                    earlier.hang_up()
                    self._replaced.append(earlier)
                self._accepted[rank, flow] = wire
                self._news.set()
                self._news = anyio.Event()
                if flow == PROBE:
                    with suppress(OSError):  # the prober hangs up once it knows enough, or fails itself
                        await in_pool(self.threads, _acknowledge, wire, interrupt=wire.hang_up)
                return
        self._unproved.discard(wire)
        wire.close()

    async def _proved(self, wire: Wire, stranger: Stranger) -> tuple[int, int]:
        """Exchange proofs of the secret; return the rank that has connected, and the connection's number."""
        await wire.handshake()
        head = bytes(await wire.fill(bytearray(_NONCE_BYTES + 8)))
        stranger.spoke = True
        nonce, rank, flow = head[:-8], int.from_bytes(head[-8:-4], "big"), int.from_bytes(head[-4:], "big")
        challenge = secrets.token_bytes(_NONCE_BYTES)
        await wire.send(challenge)
        facts = (rank, self.rank, flow, nonce.hex(), challenge.hex())
        key = self._key(self._token)
        _compare(await wire.fill(bytearray(_PROOF_BYTES)), proof(key, "dials", *facts))
        await wire.send(proof(key, "listens", *facts))
        return rank, flow

    # -- both ---------------------------------------------------------------------------------

    def _wire(self, connection: socket.socket, name: str | None) -> Wire:
        """Wrap a socket, with TLS if this mesh has it; ``name`` is the listener's, None on the listener's own side."""
        if self._tls is None:
            return Wire(connection)
        return TlsWire(connection, self._tls.listener if name is None else self._tls.dialer, name)

    def _key(self, token: str) -> bytes:
        return proof(self._secret(), "bulk data", token)

    def _most_strangers(self) -> int:
        return _STRANGERS + max(self._world_size - 1, LANES) - len(self._accepted)


def _acknowledge(wire: Wire) -> None:
    """Receive the messages of a probe, each twice as long as the one before, and acknowledge each; blocks."""
    wire.block()
    block, nbytes = memoryview(bytearray(PROBE_MOST)), PROBE_LEAST
    while nbytes <= PROBE_MOST:
        wire.pull(block[:nbytes])
        wire.push(block[:1])
        nbytes *= 2


def _compare(shown: bytes | bytearray, expected: bytes) -> None:
    if not hmac.compare_digest(shown, expected):
        raise _UnprovedError("the other side does not know the job's secret")


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


def _listen(address: str, patience: float) -> socket.socket:
    """Return a non-blocking listener on that address alone.

    Accepted connections ask a silent peer for a sign of life, and break if the peer's kernel gives none. The dialling
    side need not ask: the side that waits for bytes is always the one that accepted.
    """
    listener = socket.create_server((address, 0), family=_family(address), backlog=1024)
    seconds = int(min(patience, _MOST_KEEPALIVE))
    pause = max(1, seconds // (_PROBES + 1))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds - _PROBES * pause))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    listener.settimeout(0)
    return listener


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
