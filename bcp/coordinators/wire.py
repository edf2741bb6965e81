"""A connected socket that sends whole buffers and fills whole buffers, with or without TLS.

A connection begins on the event loop, with few and small messages. Bulk data goes through blocking calls in threads,
few and large: they run without Python's lock, and cost little more than the kernel's copies.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from bcp.protocols import Buffer

__all__ = ["TlsWire", "Wire", "readable"]

_RECORDS = 64  # of 16 KiB at most; after so many of them other tasks get their turn


class Wire:
    """A plain connection. Bytes go straight from the sender's buffer to the kernel, and into the receiver's."""

    _flags: int = socket.MSG_WAITALL  # one call for all bytes, as far as they come

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected socket."""
        connection.settimeout(0)
        self._socket = connection

    async def handshake(self) -> None:
        """Agree on keys, where there are any."""

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

    def block(self) -> None:
        """Let calls block from now on: :meth:`push` and :meth:`pull` come next, in threads, and nothing else."""
        self._socket.settimeout(None)

    def push(self, data: memoryview) -> None:
        """Send all bytes of a buffer; blocks."""
        self._socket.sendall(data)

    def pull(self, view: memoryview) -> None:
        """Fill a buffer; blocks. Raises ConnectionResetError if the other side closes before."""
        while view:
            view = view[_some(self._socket.recv_into(view, 0, self._flags)) :]

    def hang_up(self) -> None:
        """End the connection for both sides, also where a forked child holds the socket; tasks that wait go on."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # SSLSocket's own takes TLS from a waiting task

    def close(self) -> None:
        """End the connection, and give its descriptor back. Idempotent; no task may wait for it."""
        self.hang_up()
        self._socket.close()


class TlsWire(Wire):
    """A connection with TLS. OpenSSL holds one record of 16 KiB in each direction, and nothing else is buffered."""

    _flags = 0  # OpenSSL knows none

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, name: str | None) -> None:
        """Take over a connected socket; :meth:`handshake` comes next.

        Args:
            connection: the socket; closed if this raises.
            context: settings of this side.
            name: the name in the other side's certificate; None on the side that was dialled.

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
        """Call again whenever the socket is ready, until OpenSSL has what it needs."""
        while True:
            try:
                return call()
            except ssl.SSLWantReadError:
                await readable(self._tls)
            except ssl.SSLWantWriteError:
                await _writable(self._tls)


def _some(count: int) -> int:
    if not count:
        raise ConnectionResetError("closed by the other side")
    return count


async def readable(connection: socket.socket) -> None:
    """Wait until a socket has something to read, or to accept."""
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
