"""The parent's end of a stream: a server for children that know the job's token, behind a gate.

gRPC's server cannot bound the number of connections that never show a token. So the gate listens on the network, and
gRPC on a Unix socket that only this process can reach. Measured with grpcio 1.85: its own options end an idle
connection in time. But at a given number of connections it refuses the next one, a rank's as well as a stranger's.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from bcp._messages.coordination import Introduction
from bcp._sockets import Tls
from bcp.coordinators.hosts import identity
from bcp.coordinators.peers import PeerInfo
from bcp.coordinators.strangers import Stranger, Strangers
from bcp.coordinators.tree.frames import Frame, FrameError, Kind
from bcp.coordinators.tree.link import Link
from bcp.coordinators.tree.rendezvous import Invitation
from bcp.coordinators.tree.transport import (
    METHOD,
    SERVICE,
    CredentialsError,
    Receive,
    converse,
    grpc,
    info_of,
    proof_of,
    server_credentials,
)
from bcp.coordinators.tree.transport import server_options as options_for
from bcp.errors import InputError

__all__ = ["Server", "behind", "credentials_of"]

_STRANGERS = 32  # besides the children that have still to come; each takes three descriptors once it has sent bytes
_UNPROVED_BYTES = 64 << 10  # that a stranger may send: a TLS handshake, headers and a proof are some 10 KiB
_BACKLOG = 1024
_DRAIN_SECONDS = 1.0  # how long the other side of an ended connection has to take what is still to be sent


class _Side(asyncio.Protocol):
    """One side of a connection through the gate: the other side sends the bytes that this one receives."""

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
        """Let the other side send its buffered bytes, then end it too."""
        del error
        with suppress(OSError):  # a forked child may hold the socket as well
            self.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.close()
            asyncio.get_running_loop().call_later(_DRAIN_SECONDS, self.other.transport.abort)


class _Outside(_Side):
    """The side of a peer that has connected; gRPC hears of it with its first bytes."""

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
    """Return gRPC's target for a door of another process; None if that is on another host, or another user's.

    A container with a network of its own is another host: a cut of its network has to cut all its connections.
    """
    path, name, network = door.split(" ") if door else ("", "", "")
    with suppress(OSError):
        if network == identity() and name in os.readlink(path):  # noqa: PTH115 -- the link's text, which is no path any more
            return f"unix:{path}"
    return None


class Gate:
    """Passes connections on to gRPC's server, and closes those that are not admitted in time."""

    def __init__(self, rank: int, missing: Callable[[], int]) -> None:
        self.strangers = Strangers("coordinator", rank, lambda: _STRANGERS + missing())
        self.outside: set[_Outside] = set()  # all connections
        self._by_name: dict[str, _Outside] = {}
        self._inner = -1
        self._name = ""
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()  # set whenever the last connection has ended

    def __repr__(self) -> str:
        return f"<Gate: {len(self.outside)} connections, {len(self.strangers)} of strangers>"

    def place(self, bind: Callable[[str], object]) -> None:
        """Let ``bind`` listen on a private gRPC address of this process. No file stays on the disk."""
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

        The gate costs 0.2 ms a message in Python: a step of 9,261 ranks would take 32 ms instead of 8.
        """
        return f"/proc/{os.getpid()}/fd/{self._inner} {self._name} {identity()}"

    async def listen(self, address: str) -> int:
        """Listen on ``host:port``, and return the port. Raises OSError if that is not possible."""
        host, _, port = address.rpartition(":")
        infos = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        failed: OSError | None = None
        for family, _, _, _, sockaddr in infos:
            try:
                listener = _listen(family, str(sockaddr[0]), int(port))
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
        """Keep a connection that belongs to the job, by gRPC's name of its peer."""
        if (outside := self._by_name.get(name)) is not None:
            outside.admit()

    def peer(self, name: str) -> str:
        """Return the address behind gRPC's name of a peer."""
        outside = self._by_name.get(name)
        return name if outside is None else outside.peer

    async def aclose(self) -> None:
        """Close all connections; the last bytes of gRPC are sent before, if that does not take long."""
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

    # -- for its connections ------------------------------------------------------------------

    def connect(self, outside: _Outside, data: bytes) -> None:
        """Connect to gRPC on behalf of a connection, and pass on its first bytes."""
        self._spawn(self._pass_on(outside, data))

    def forget(self, outside: _Outside) -> None:
        """Forget a connection that has ended."""
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


_STOP_SECONDS = 1.0  # how long streams have to end by themselves


def credentials_of(invitation: Invitation, node: str) -> list[tuple[str, str]]:
    """Return the metadata of a rank that connects; ``node`` tells it from others that claim its rank.

    The job's token is not in it. The nonce is for the parent's proof of the token, see :func:`~.transport.proof_of`.
    """
    return [
        ("bcp-nonce", secrets.token_hex(16)),
        ("bcp-session", invitation.session),
        ("bcp-world-size", str(invitation.place.world_size)),
        ("bcp-node", node),
    ]


class Server:
    """Listens on one address for this rank's children."""

    def __init__(
        self,
        info: PeerInfo,
        invitation: Invitation,
        links: Mapping[int, Link],
        *,
        receive: Receive,  # takes a child's frame
        lost: Callable[[int, object, str | None], None],  # (child, connection, reason); None: closed in peace
    ) -> None:
        """Prepare the server; nothing listens before :meth:`start`."""
        self._info = info
        self._invitation = invitation
        self._links = links
        self._receive = receive
        self._lost = lost
        self._nodes: dict[int, str] = {}
        self._server: Any = None
        self._gate: Gate

    def __repr__(self) -> str:
        children = self._invitation.place.children
        connected = sum(self._links[child].connection is not None for child in children)
        return f"<Server of {self._info}: {connected} of {len(children)} children are here>"

    async def start(self, address: str, tls: Tls | None) -> int:
        """Listen on an address, and return the port. Raises InputError if that is not possible."""
        self._gate = Gate(self._info.rank, self._missing)
        self._server = grpc.aio.server(options=options_for(len(self._invitation.place.children)))
        handler = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        try:
            if tls is None:
                self._gate.place(self._server.add_insecure_port)
            else:
                self._gate.place(partial(self._server.add_secure_port, server_credentials=server_credentials(tls)))
            await self._server.start()
            return await self._gate.listen(address)
        except (OSError, RuntimeError, ValueError) as error:
            await self.aclose()
            raise InputError(f"{self._info} cannot listen on {address}: {error}; give it another address") from error

    @property
    def door(self) -> str:
        """The way in for children on this host."""
        return self._gate.door

    async def aclose(self) -> None:
        """End all connections, and stop listening."""
        if self._server is not None:
            await self._server.stop(_STOP_SECONDS)  # all at once would make gRPC print a line on the other side
            await self._gate.aclose()

    def _missing(self) -> int:
        return sum(self._links[child].connection is None for child in self._invitation.place.children)

    async def _join(self, _requests: object, context: Any) -> None:
        """Serve one stream from beginning to end."""
        metadata = {key: str(value) for key, value in context.invocation_metadata()}
        proof = await self._proved(context, metadata)
        link, child = await self._admit(context, metadata)
        self._gate.admit(context.peer())
        connection = object()
        received = link.count if _renews(link, metadata) else None
        await context.write(proof + Introduction(self._info.rank, self._info.host, self._info.pid, received).encode())
        if received is None:
            link.up(connection, child, metadata.get("bcp-series", ""))
        elif not _renewed(link, metadata, connection, received, await context.read()):
            return
        reason: str | None = "the connection broke"
        try:
            reason = await converse(link, connection, context.read, context.write, self._receive)
        finally:
            self._lost(link.rank, connection, reason)

    async def _proved(self, context: Any, metadata: Mapping[str, str]) -> bytes:
        """Let a child prove that it knows the job's token; return this rank's proof."""
        if "bcp-nonce" not in metadata:
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, "a proof of the job's token is missing")
        challenge = secrets.token_hex(16)
        await context.send_initial_metadata([("bcp-challenge", challenge)])
        shown = await context.read()
        token, rank = self._invitation.token, self._info.rank
        expected = proof_of(token, "child", metadata, rank, challenge)
        if shown is grpc.aio.EOF or not hmac.compare_digest(shown, expected):
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, "the job's token is wrong")
        return proof_of(token, "parent", metadata, rank, challenge)

    async def _admit(self, context: Any, metadata: Mapping[str, str]) -> tuple[Link, PeerInfo]:
        """Return the link and the info of a child that joins; refuse any other peer."""
        try:
            child = info_of(metadata.items())
        except CredentialsError as error:
            await self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        expected = (self._invitation.session, str(self._invitation.place.world_size))
        if (metadata.get("bcp-session"), metadata.get("bcp-world-size")) != expected:
            session = f"session {metadata.get('bcp-session')} of {metadata.get('bcp-world-size')} ranks"
            reason = f"{child} is of {session}, this is session {expected[0]} of {expected[1]} ranks"
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason)
        if child.rank not in self._invitation.place.children:
            reason = f"{child} is no child of rank {self._info.rank}"
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, reason)
        return await self._link_of(context, child, metadata), child

    async def _link_of(self, context: Any, child: PeerInfo, metadata: Mapping[str, str]) -> Link:
        """Admit a child whose earlier stream has ended or is silent, or which has given that stream up itself."""
        link, node = self._links[child.rank], metadata.get("bcp-node", "")
        if link.connection is not None:
            if self._nodes[child.rank] != node:
                reason = f"{child} has joined already, as {link}: two processes claim to be one rank"
                await self._refuse(context, grpc.StatusCode.ALREADY_EXISTS, reason)
            if not _renews(link, metadata):
                self._lost(child.rank, link.connection, "it has connected anew")
        self._nodes[child.rank] = node
        return link

    async def _refuse(self, context: Any, code: grpc.StatusCode, reason: str) -> None:
        """End a stream with an error; gRPC raises at this."""
        self._gate.strangers.count(self._gate.peer(context.peer()), reason)
        await context.abort(code, reason)


def _renews(link: Link, metadata: Mapping[str, str]) -> bool:
    """Whether a child dials anew beside a connection that has fallen silent."""
    if link.connection is None or not link.series or metadata.get("bcp-series") != link.series:
        return False
    return _renewal_of(metadata) > link.renewals


def _renewal_of(metadata: Mapping[str, str]) -> int:
    number = metadata.get("bcp-renewal", "")
    return int(number) if number.isdecimal() else 0


def _renewed(link: Link, metadata: Mapping[str, str], connection: object, told: int, first: Any) -> bool:
    """Change over to a new connection with the child's first message; return False if either side has given it up."""
    if first is grpc.aio.EOF or not _renews(link, metadata):
        return False
    with suppress(FrameError):
        link.renew(connection, told, Frame.unpack(first).body)
        link.renewals = _renewal_of(metadata)
        link.send(0, Frame(Kind.HEARD, body=link.said()).pack())
        return True
    return False
