"""Bulk data from rank to rank: sockets of one operation, opened if two ranks have something to send."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio

from bcp.coordinators.hosts import HINT
from bcp.coordinators.proof import proof
from bcp.coordinators.strangers import Stranger, Strangers
from bcp.coordinators.tls import TlsContexts
from bcp.coordinators.wire import TlsWire, Wire
from bcp.errors import InputError, PeerError
from bcp.pipeline import in_pool
from bcp.protocols import Buffer

__all__ = ["Mesh"]

_DIAL_SECONDS = 10.0  # for one rank that has said that it listens
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two attempts to connect; doubles
_STRANGERS = 64  # besides the ranks that have still to come
_LANES = 4  # transfers at a time in each direction, each with a thread
_PROBES = 3  # signs of life that are asked for in vain before a connection counts as broken
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_HEAD_BYTES = 8  # the length of what follows


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
        patience: float,
        secret: Callable[[], bytes] = lambda: b"",
        tls: TlsContexts | None = None,
    ) -> None:
        """Listen on a port of the system's choice, on this one address of this host.

        Args:
            rank: this rank.
            address: this host's, in the job's network.
            world_size: how many ranks there are.
            patience: seconds that the network between two ranks may be silent.
            secret: returns the job's secret, once a card of any rank is known.
            tls: settings of TLS, for every connection; None: plain TCP.

        """
        self._rank = rank
        self._address = address
        self._world_size = world_size
        self._secret = secret
        self._tls = tls
        self._token = secrets.token_hex(_NONCE_BYTES)
        self._patience = patience
        self._listener = _listen(address, patience)
        self._dialled: dict[int, Wire] = {}
        self._accepted: dict[int, Wire] = {}
        self._replaced: list[Wire] = []  # by a second connection of the same rank
        self._unproved: set[Wire] = set()
        self._strangers = Strangers("bulk data", rank, self._most_strangers)
        self._news = anyio.Event()
        self._scope = anyio.CancelScope()
        self._threads = ThreadPoolExecutor(2 * _LANES, "bcp-bulk-data")
        self._busy = False

    def __repr__(self) -> str:
        """Show the port and how many ranks are connected."""
        return f"<Mesh of rank {self._rank}: {len(self._dialled)} dialled, {len(self._accepted)} accepted>"

    @property
    def card(self) -> bytes:
        """What other ranks need to connect."""
        port = self._listener.getsockname()[1]
        tls = self._tls is not None
        host = socket.gethostname()
        facts = {"address": self._address, "port": port, "token": self._token, "tls": tls, "host": host}
        return json.dumps(facts).encode()

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
        """Close all sockets, and let go of the threads, none of which is busy."""
        self._threads.shutdown(wait=False)
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
        # All send to the next rank, then to the one after it, and receive in the same order. So the first transfer in
        # that order that is not done has a thread on both sides, however few there are.
        size = self._world_size
        after = [(self._rank + step) % size for step in range(1, size)]
        before = [(self._rank - step) % size for step in range(1, size)]
        filled = [rank for rank in after if views[rank].nbytes]
        sends = iter([partial(self._send, rank, views[rank].cast("B"), card_of) for rank in filled])
        receives = iter([partial(self._receive, rank, received[rank], card_of) for rank in before if receive[rank]])
        try:
            async with anyio.create_task_group() as group:
                self._busy = True
                group.start_soon(self._hang_up_when_cancelled)
                async with anyio.create_task_group() as lanes:
                    for transfers in (*[sends] * _LANES, *[receives] * _LANES):
                        lanes.start_soon(_one_by_one, transfers)
                self._busy = False
                group.cancel_scope.cancel()
        except ExceptionGroup as errors:
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from first.__cause__
        return received

    async def _hang_up_when_cancelled(self) -> None:
        """End the connections of an exchange that ends before it is done, so that no thread waits in one."""
        try:
            await anyio.sleep_forever()
        finally:
            if self._busy:
                for wire in (*self._dialled.values(), *self._accepted.values()):
                    wire.hang_up()

    async def _send(self, rank: int, data: memoryview, card_of: Callable[[int], Awaitable[bytes]]) -> None:
        """Send one rank its bytes."""
        if rank not in self._dialled:
            self._dialled[rank] = await self._dial(rank, json.loads(await card_of(rank)))
        async with self._blaming(rank, card_of):
            await in_pool(self._threads, self._push, self._dialled[rank], data)

    async def _receive(self, rank: int, out: bytearray, card_of: Callable[[int], Awaitable[bytes]]) -> None:
        """Receive one rank's bytes."""
        while rank not in self._accepted:
            await self._news.wait()
        wire = self._accepted[rank]
        async with self._blaming(rank, card_of):
            nbytes = await in_pool(self._threads, self._pull, wire, out)
            if nbytes != len(out):
                raise InputError(f"rank {rank} sent {nbytes} bytes where rank {self._rank} expected {len(out)}")

    @staticmethod
    def _push(wire: Wire, data: memoryview) -> None:
        wire.block()
        wire.push(memoryview(len(data).to_bytes(_HEAD_BYTES, "big")))
        wire.push(data)

    @staticmethod
    def _pull(wire: Wire, out: bytearray) -> int:
        """Fill a buffer if as many bytes come; return how many the other side says."""
        wire.block()
        head = bytearray(_HEAD_BYTES)
        wire.pull(memoryview(head))
        nbytes = int.from_bytes(head, "big")
        if nbytes == len(out):
            wire.pull(memoryview(out))
        return nbytes

    @asynccontextmanager
    async def _blaming(self, rank: int, card_of: Callable[[int], Awaitable[bytes]]) -> AsyncIterator[None]:
        """Turn a broken connection into an error that names both ends: either may be the one that is cut off."""
        try:
            yield
        except OSError as error:
            other = json.loads(await card_of(rank))["host"]
            ends = f"rank {self._rank} (host {socket.gethostname()}) and rank {rank} (host {other})"
            cause = f"the connection between {ends} broke: {error}; look at the network between them if both are alive"
            raise PeerError(rank, cause) from error

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
        where = f"{card['address']} port {card['port']} (host {card['host']})"
        last: Exception | None = None
        pause = _FIRST_PAUSE
        try:
            with anyio.fail_after(min(_DIAL_SECONDS, self._patience)):
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
                f"rank {self._rank} (host {socket.gethostname()}) cannot connect to rank {rank} at {where}: "
                f"{last or error or type(error).__name__}; {HINT}"
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


async def _one_by_one(transfers: Iterator[Callable[[], Awaitable[None]]]) -> None:
    """Do what is left of the transfers, one after another; others do so too."""
    for transfer in transfers:
        await transfer()


def _compare(shown: bytes | bytearray, expected: bytes) -> None:
    """Raise :class:`_UnprovedError` if a proof is wrong."""
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

    What it accepts asks a silent other side for a sign of life, and breaks when that side's kernel gives none. The
    dialling side has no need to: each side that waits for bytes has accepted.
    """
    listener = socket.create_server((address, 0), family=_family(address), backlog=1024)
    pause = max(1, round(patience / (_PROBES + 1)))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    listener.settimeout(0)
    return listener


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
