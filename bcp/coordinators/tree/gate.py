"""The door before gRPC's server, which cannot bound how many connections it keeps that never show a token.

The gate listens on the network, and gRPC on a Unix socket that only this process can reach. Measured with grpcio 1.85:
its own options end an idle connection in time, but at a given number of connections it refuses the next one, a rank's
as well as a stranger's.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from bcp.coordinators.hosts import identity
from bcp.coordinators.strangers import Stranger, Strangers

__all__ = ["Gate", "behind"]

_STRANGERS = 32  # besides the children that have still to come; each takes three descriptors once it has sent bytes
_UNPROVED_BYTES = 64 << 10  # that a stranger may send: a TLS handshake, headers and a proof are some 10 KiB
_BACKLOG = 1024
_DRAIN_SECONDS = 1.0  # how long the other side of an ended connection has to take what is still to be sent


class _Side(asyncio.Protocol):
    """One side of a connection through the gate: the other side sends what this one receives."""

    transport: asyncio.Transport
    other: _Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 -- for mypy
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Let the other side send what it has, then end it too."""
        del error
        with suppress(OSError):  # a forked child may hold the socket as well
            self.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.close()
            asyncio.get_running_loop().call_later(_DRAIN_SECONDS, self.other.transport.abort)


class _Outside(_Side):
    """The side of whoever has connected; gRPC hears of it with its first bytes."""

    def __init__(self, gate: Gate, peer: str) -> None:
        self._gate = gate
        self._received = 0
        self.peer = peer
        self.name = ""
        self.stranger: Stranger | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._gate.outside.add(self)
        self.stranger = self._gate.strangers.enter(self.peer, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        if self.stranger is not None:
            self.stranger.spoke = True
            self._received += len(data)
            if self._received > _UNPROVED_BYTES:
                self._gate.strangers.refuse(self.stranger, f"more than {_UNPROVED_BYTES} bytes without a proof")
                return
        if self.other is None:
            self.transport.pause_reading()
            self._gate.connect(self, data)
        else:
            super().data_received(data)

    def admit(self) -> None:
        if self.stranger is not None:
            self._gate.strangers.admit(self.stranger)
            self.stranger = None

    def connection_lost(self, error: Exception | None) -> None:
        self._gate.forget(self)
        super().connection_lost(error)


def behind(door: str) -> str | None:
    """Return gRPC's target for a door of another process, or None if that is not on this host, or not this user's.

    A container with a network of its own is another host: what cuts it off has to cut all its connections.
    """
    path, name, network = door.split(" ") if door else ("", "", "")
    with suppress(OSError):
        if network == identity() and name in os.readlink(path):  # noqa: PTH115 -- the link's text, which is no path any more
            return f"unix:{path}"
    return None


class Gate:
    """Passes connections on to gRPC's server, and closes those that are not admitted in time.

    Attributes:
        strangers: connections that have not proved yet that they belong to the job.
        outside: all connections.
    """

    def __init__(self, rank: int, missing: Callable[[], int]) -> None:
        """Prepare; ``missing`` returns how many children have still to come."""
        self.strangers = Strangers("coordinator", rank, lambda: _STRANGERS + missing())
        self.outside: set[_Outside] = set()
        self._by_name: dict[str, _Outside] = {}
        self._inner = -1
        self._name = ""
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()  # set whenever the last connection has ended

    def __repr__(self) -> str:
        """Show how many connections there are."""
        return f"<Gate: {len(self.outside)} connections, {len(self.strangers)} of strangers>"

    def place(self, bind: Callable[[str], object]) -> None:
        """Let ``bind`` listen on a gRPC address of this process's own. Nothing of it stays on the disk."""
        directory = tempfile.mkdtemp(prefix="bcp-")
        parent = os.open(directory, os.O_PATH | os.O_CLOEXEC)  # short, however long the path of the directory is
        self._name = secrets.token_hex(8)
        path = f"/proc/self/fd/{parent}/{self._name}"
        try:
            bind(f"unix:{path}")
            self._inner = os.open(path, os.O_PATH | os.O_CLOEXEC)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)  # noqa: PTH108 -- by its directory's descriptor
            os.close(parent)
            os.rmdir(directory)  # noqa: PTH106 -- as it was made

    @property
    def door(self) -> str:
        """The way past the gate for processes of this user on this host, see :func:`behind`.

        What goes through the gate costs Python 0.2 ms a message: a round of 9,261 ranks would take 32 ms instead of 8.
        """
        return f"/proc/{os.getpid()}/fd/{self._inner} {self._name} {identity()}"

    async def listen(self, address: str) -> int:
        """Listen on ``host:port``, and return the port. Raises OSError where that is not possible."""
        host, _, port = address.rpartition(":")
        infos = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        failed: OSError | None = None
        for family, _, _, _, at in infos:
            try:
                listener = _listen(family, str(at[0]), int(port))
            except OSError as error:
                failed = error
                if error.errno == errno.EADDRINUSE:
                    raise
            else:
                self._listeners.append(listener)
                self._spawn(self._accept(listener))
                if int(port) == 0:
                    break  # another address of this name would get another port
        if failed is not None and not self._listeners:
            raise failed
        return int(self._listeners[0].getsockname()[1])

    def admit(self, name: str) -> None:
        """Keep a connection, by gRPC's name of its peer: it belongs to the job."""
        if (outside := self._by_name.get(name)) is not None:
            outside.admit()

    def peer(self, name: str) -> str:
        """Return the address behind gRPC's name of a peer."""
        outside = self._by_name.get(name)
        return name if outside is None else outside.peer

    async def aclose(self) -> None:
        """Close all; what gRPC said last is sent before, if that does not take long."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for listener in self._listeners:
            listener.close()
        self.strangers.close()
        self._empty.clear()
        if self.outside:
            with suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_SECONDS):
                    await self._empty.wait()
        for outside in list(self.outside):
            outside.transport.abort()
        if self._inner >= 0:
            os.close(self._inner)
            self._inner = -1

    # -- what its connections need ------------------------------------------------------------

    def connect(self, outside: _Outside, data: bytes) -> None:
        """Connect to gRPC on behalf of a connection, and pass on its first bytes."""
        self._spawn(self._pass_on(outside, data))

    def forget(self, outside: _Outside) -> None:
        """Let go of a connection that has ended."""
        self.outside.discard(outside)
        if not self.outside:
            self._empty.set()
        self._by_name.pop(outside.name, None)
        if outside.stranger is not None:
            self.strangers.leave(outside.stranger)

    # -- tasks --------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, peer = await self.strangers.accept(listener)
            connection.settimeout(0)
            with suppress(OSError):  # it has closed already
                await loop.connect_accepted_socket(partial(_Outside, self, peer), connection)

    async def _pass_on(self, outside: _Outside, data: bytes) -> None:
        loop, connection = asyncio.get_running_loop(), socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(0)
            connection.bind("")  # the kernel gives it a name, by which gRPC knows it
            outside.name = f"unix-abstract:{connection.getsockname()[1:].decode()}"
            self._by_name[outside.name] = outside
            await loop.sock_connect(connection, f"/proc/self/fd/{self._inner}")
            _, inside = await loop.create_unix_connection(_Side, sock=connection)
        except OSError:
            connection.close()
            outside.transport.abort()
            return
        except BaseException:
            connection.close()
            raise
        if outside.transport.is_closing():
            inside.transport.abort()
            return
        inside.other, outside.other = outside, inside
        inside.transport.write(data)
        outside.transport.resume_reading()


def _listen(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    """Return a non-blocking listener; on all addresses of IPv6 it is one on all of IPv4 too, as with gRPC."""
    dual = family == socket.AF_INET6 and address == "::" and socket.has_dualstack_ipv6()
    listener = socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    listener.settimeout(0)
    return listener
