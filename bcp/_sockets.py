"""A connected socket that sends whole buffers and fills whole buffers, with or without TLS.

A connection begins on the event loop, with few and small messages. Bulk data goes through blocking calls in threads,
few and large: they run without Python's lock, and cost little more than the kernel's copies.

The file also has the proof of a secret that does not show it, and the certificates of a job: one setting for the tree's
streams and for the sockets of bulk data.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from bcp.errors import InputError
from bcp.protocols import Buffer

__all__ = ["Tls", "TlsContexts", "TlsWire", "Wire", "new_token", "proof", "readable"]


def new_token() -> str:
    """Return a secret that nobody can guess."""
    return secrets.token_hex(16)


def proof(secret: bytes, side: str, *facts: object) -> bytes:
    """Return the HMAC-SHA256 of a side's name and of facts that both sides know, 32 bytes.

    Both sides' nonces are among the facts, so no proof is good for a second connection. The name of the side keeps one
    side from sending the other's proof back to it.

    Example::

        proof(token, "dials", 1, 0, nonce, challenge)  # rank 1 dials rank 0
    """
    return hmac.digest(secret, json.dumps([side, *facts]).encode(), "sha256")


class TlsContexts(NamedTuple):
    """Settings of both ends of a TLS connection of bulk data."""

    dialer: ssl.SSLContext  # settings of the rank that connects
    listener: ssl.SSLContext  # settings of the rank that accepts
    target_name: str | None  # the name in the listener's certificate; None: the address that is dialled


@dataclass(frozen=True, slots=True)
class Tls:
    """Mutual TLS: every rank shows a certificate, and takes only those of the one authority.

    It covers the streams of the tree and the bulk data of ``all_to_all``. A rank dials and is dialled, so its
    certificate has to be good for clients and for servers.

    Attributes:
        ca: the certificate of the authority that signed the ranks' certificates, PEM.
        certificate: this rank's, PEM, with intermediate ones behind it.
        key: this rank's private key, PEM, not encrypted.
        target_name: the name in the others' certificates; None: the address that is dialled.

    Raises:
        InputError: one of them is not PEM, or certificate and key do not belong together.

    Example::

        tls = Tls(ca=Path("ca.pem").read_bytes(), certificate=..., key=..., target_name="ranks.example")
        coordinator = GrpcCoordinator.over(tls=tls)
    """

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    target_name: str | None = None

    def __post_init__(self) -> None:
        self.contexts()

    def contexts(self) -> TlsContexts:
        """Return the settings for bulk data: TLS 1.3, both sides show certificates.

        Raises InputError if the certificates or the key cannot be used.
        """
        dialer, listener = (ssl.SSLContext(side) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
        for context in (dialer, listener):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: ``ca`` may be an intermediate authority
            try:
                context.load_verify_locations(cadata=self.ca.decode("ascii"))
                _load_own(context, self.certificate, self.key)
            except (ssl.SSLError, ValueError) as error:
                raise InputError(
                    f"the certificates of Tls(...) cannot be used: {error}; give the authority's certificate, this "
                    "rank's certificate, and the key that belongs to it, each as PEM"
                ) from error
        listener.num_tickets = 0  # a dialer never reads, and closing a socket with unread bytes resets it
        return TlsContexts(dialer, listener, self.target_name)

    def check(self) -> None:
        """Check this rank's certificate by a handshake in memory: gRPC closes the connection of a bad one silently.

        Raises InputError if no rank would accept the certificate: it has expired, or ``ca`` has not signed it.
        """
        dialer, listener, _ = self.contexts()
        dialer.check_hostname = False
        to_dialer, to_listener = ssl.MemoryBIO(), ssl.MemoryBIO()
        sides = (dialer.wrap_bio(to_dialer, to_listener), listener.wrap_bio(to_listener, to_dialer, server_side=True))
        for side in (*sides, *sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", "") or error.reason or str(error)
                raise InputError(f"no rank would accept this rank's own certificate: {reason}; renew it") from error


def _load_own(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a certificate and its key from an anonymous file in memory: OpenSSL reads files only."""
    memory = os.memfd_create("bcp-tls", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(key + b"\n" + certificate)
        context.load_cert_chain(f"/proc/self/fd/{memory}", password=_refuse_to_ask)
    finally:
        os.close(memory)


def _refuse_to_ask() -> str:
    raise ValueError("the private key is encrypted")


_TIMEVAL = struct.Struct("@ll")  # seconds and microseconds, as the kernel has them

_RECORDS = 64  # of 16 KiB at most; after so many of them other tasks get their turn


class Wire:
    """A plain connection. Bytes go straight from the sender's buffer to the kernel, and into the receiver's."""

    _flags: int = socket.MSG_WAITALL  # one call for all bytes, as far as they come

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        self._socket = connection

    async def handshake(self) -> None:
        """Agree on keys; a plain connection has none."""

    async def send(self, data: Buffer) -> None:
        """Send all bytes of a buffer."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def fill(self, out: bytearray) -> bytearray:
        """Fill ``out`` and return it. Raises ConnectionResetError if the other side closes before."""
        loop = asyncio.get_running_loop()
        view = memoryview(out)
        while view:
            view = view[_some(await loop.sock_recv_into(self._socket, view)) :]
        return out

    def block(self, seconds: float = 0.0) -> None:
        """Make the socket blocking: only :meth:`push`, :meth:`pull` and :meth:`push_file` may follow, in threads.

        The kernel counts the seconds of silence that are too long; 0 for no limit. Python would do so with sockets that
        do not block, and wait and be called for each few bytes.
        """
        self._socket.settimeout(None)
        whole = int(seconds)
        limit = _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
        for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, name, limit)

    def push(self, data: memoryview) -> None:
        """Send all bytes of a buffer; blocks."""
        with _in_time():
            self._socket.sendall(data)

    def pull(self, view: memoryview) -> None:
        """Fill a buffer; blocks. Raises ConnectionResetError if the other side closes before."""
        with _in_time():
            while view:
                view = view[_some(self._socket.recv_into(view, 0, self._flags)) :]

    def push_file(self, fd: int, start: int, nbytes: int) -> None:
        """Send bytes of a file from the page cache, over a plain connection; blocks.

        Raises ConnectionResetError if the file is shorter.
        """
        with _in_time():
            while nbytes:
                sent = os.sendfile(self._socket.fileno(), fd, start, nbytes)
                if not sent:
                    raise ConnectionResetError(f"the file has ended {nbytes} bytes before the range that it had")
                start, nbytes = start + sent, nbytes - sent

    def hang_up(self) -> None:
        """End the connection for both sides, even if a forked child holds the socket. Waiting tasks continue."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # SSLSocket's own takes TLS from a waiting task

    def close(self) -> None:
        """End the connection, and close its descriptor. Idempotent; no task may wait for it."""
        self.hang_up()
        self._socket.close()


class TlsWire(Wire):
    """A connection with TLS. OpenSSL holds one record of 16 KiB in each direction; there is no other buffer."""

    _flags = 0  # OpenSSL knows none

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, name: str | None) -> None:
        """Take over a connected socket, which is closed if this raises; :meth:`handshake` comes next.

        ``context`` has the settings of this side. ``name`` is the name in the other side's certificate; None on the
        side that was dialled.
        """
        connection.settimeout(0)
        try:
            secured = context.wrap_socket(
                connection, server_side=name is None, server_hostname=name, do_handshake_on_connect=False
            )
        except BaseException:
            connection.close()
            raise
        self._tls = self._socket = secured

    async def handshake(self) -> None:
        """Agree on keys, and check each other's certificates. Raises ssl.SSLError."""
        await self._done(self._tls.do_handshake)

    async def send(self, data: Buffer) -> None:
        """Send all bytes of a buffer."""
        await self._all(memoryview(data), self._tls.send)

    async def fill(self, out: bytearray) -> bytearray:
        """Fill ``out`` and return it. Raises ConnectionResetError if the other side closes before."""
        await self._all(memoryview(out), self._tls.recv_into)
        return out

    async def _all(self, view: memoryview, step: Callable[[memoryview], int]) -> None:
        records = 0
        while view:
            count = 0

            def call(rest: memoryview = view) -> None:
                nonlocal count
                count = step(rest)

            await self._done(call)
            view = view[_some(count) :]
            records += 1
            if records % _RECORDS == 0:
                await asyncio.sleep(0)

    async def _done(self, call: Callable[[], None]) -> None:
        """Repeat a call whenever the socket is ready, until OpenSSL is satisfied."""
        while True:
            try:
                return call()
            except ssl.SSLWantReadError:
                await readable(self._tls)
            except ssl.SSLWantWriteError:
                await _writable(self._tls)


@contextmanager
def _in_time() -> Iterator[None]:
    """Turn the end of a time limit of the kernel into a TimeoutError."""
    try:
        yield
    except BlockingIOError as error:
        raise TimeoutError("timed out") from error


def _some(count: int) -> int:
    if not count:
        raise ConnectionResetError("closed by the other side")
    return count


async def readable(connection: socket.socket) -> None:
    """Wait until a socket has bytes to read, or a connection to accept."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


async def _writable(connection: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(connection)
