"""The gRPC stream of one edge of the tree, from the child to the parent.

The file has the code of both ends (introduction, credentials, frames) and the child's end; the parent's is in
:mod:`~bcp.coordinators.tree.server`. Import gRPC from here: it is set up for a process that forks.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

# Before the import, which reads it. gRPC's own handlers cannot work while a loop is polling: with them, every fork, as
# of a dataloader's workers, prints "skipping fork() handlers" and nothing else happens (grpcio 1.85).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import grpc.aio

from bcp._messages.coordination import Introduction
from bcp._sockets import Tls, proof
from bcp.coordinators.hosts import HINT
from bcp.coordinators.peers import PeerInfo
from bcp.coordinators.tree.frames import Frame, FrameError, Kind, pack_number
from bcp.coordinators.tree.link import Link
from bcp.errors import MessageError

__all__ = [
    "METHOD",
    "SERVICE",
    "CredentialsError",
    "Receive",
    "RefusedError",
    "Renewal",
    "Tls",
    "converse",
    "dial",
    "grpc",
    "info_of",
    "metadata_of",
    "proof_of",
    "server_credentials",
    "server_options",
]

SERVICE, METHOD = "bcp.extend.Coordinator", "Join"

Receive = Callable[[int, bytes], bool]
"""Takes a neighbour's frame; returns False after the last one."""

_UNLIMITED = -1
_COMMON: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", _UNLIMITED),
    ("grpc.max_receive_message_length", _UNLIMITED),
    # A host that lost its power or its network closes no connection. In an operation it falls silent; this is for the
    # time between two, and has patience, since a process that was stopped for a minute is not dead.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 120_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 120_000),  # 60 s by default, and counts as well
]


class CredentialsError(ValueError):
    """The other side lacks a credential, which the message names."""


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return the credentials of a rank with children."""
    return grpc.ssl_server_credentials([(tls.key, tls.certificate)], root_certificates=tls.ca, require_client_auth=True)


def server_options(children: int) -> Sequence[tuple[str, int]]:
    """Return the options of a server for this number of children."""
    return [
        *_COMMON,
        # above 1,000 calls that are not accepted yet gRPC drops some, above 3,000 all; they would see CANCELLED
        ("grpc.server.max_pending_requests", 2 * children + 1_000),
        ("grpc.server.max_pending_requests_hard_limit", 4 * children + 3_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def channel_options(tls: Tls | None) -> Sequence[tuple[str, int | str]]:
    """Return the options of a channel."""
    name = [] if tls is None or tls.target_name is None else [("grpc.ssl_target_name_override", tls.target_name)]
    # a pool of its own: channels of one process to one address would share a connection
    return [*_COMMON, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0), *name]


def metadata_of(info: PeerInfo) -> list[tuple[str, str]]:
    """Return the metadata with which a rank introduces itself."""
    host = info.host.encode("ascii", "backslashreplace").decode()
    return [("bcp-rank", str(info.rank)), ("bcp-host", host), ("bcp-pid", str(info.pid))]


def info_of(metadata: Iterable[tuple[str, Any]] | None) -> PeerInfo:
    """Return the info of a rank with this metadata. Raises :class:`CredentialsError`."""
    fields = dict(iter(metadata or ()))  # grpcio's Metadata iterates over pairs, and has keys() besides
    try:
        return PeerInfo(int(fields["bcp-rank"]), "", str(fields["bcp-host"]), int(fields["bcp-pid"]))
    except (KeyError, ValueError) as error:
        raise CredentialsError("it does not say which rank it is, so it is no coordinator of this bcp") from error


def proof_of(token: str, side: str, metadata: Mapping[str, str], parent: int, challenge: str) -> bytes:
    """Return the proof that one side of a new stream knows the job's token.

    ``side`` is "child" or "parent", ``metadata`` the child's metadata with its nonce, ``challenge`` the parent's nonce.
    """
    facts = [metadata.get(f"bcp-{name}") for name in ("rank", "session", "node", "nonce", "series", "renewal")]
    return proof(token.encode(), side, parent, challenge, *facts)


async def converse(
    link: Link,
    connection: object,
    read: Callable[[], Awaitable[Any]],
    write: Callable[[bytes], Awaitable[None]],
    receive: Receive,
) -> str | None:
    """Send the frames of the link, and receive those of the other side, until one side ends the stream.

    Returns the reason of the end, or None if the other side has said goodbye. Errors of the transport come through.
    """
    pump = asyncio.create_task(link.pump(connection, write))
    try:
        while True:
            data = await read()
            if data is grpc.aio.EOF:
                return "the other side closed it"
            if link.connection is not connection:
                continue  # another one has taken its place, and the child ends this one
            if not receive(link.rank, data):
                return None
    except (FrameError, MessageError) as error:
        return f"what came over it makes no sense: {error}"
    finally:
        pump.cancel()
        await asyncio.wait([pump])
        if not pump.cancelled():
            pump.exception()  # the reader has met the same error, or the end


_REFUSALS = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


_TLS_HINT = "; check tls= of both ranks: without TLS, or with a certificate that is not accepted, one is just closed"
_STATUS_SECONDS = 1.0  # how long a parent that says nothing sensible may take to say why; it is there already


class RefusedError(Exception):
    """The parent refuses this rank, and would refuse it again."""


async def dial(
    address: str,
    tls: Tls | None,
    info: PeerInfo,
    credentials: list[tuple[str, str]],
    token: str,
    link: Link,
    *,
    receive: Receive,
    lost: Callable[[int, object, str | None], None],
    renewal: Renewal | None = None,
) -> bool:
    """Connect to the parent, and talk to it until the stream ends; return whether there was a connection at all.

    With a ``renewal`` the stream takes the place of the link's silent connection. If there was no connection,
    ``link.trouble`` has the reason. Raises :class:`RefusedError`.
    """
    connection = object()
    code, reason = grpc.StatusCode.UNKNOWN, "the connection broke"
    connected = in_peace = False
    async with _channel(address, tls) as channel:
        metadata = dict([*metadata_of(info), *credentials, *_series_of(link, renewal)])
        call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=tuple(metadata.items()))
        try:
            async with asyncio.timeout(None if renewal is None else renewal.patience):
                introduction = await _introduced(call, metadata, token, link.rank)
                if renewal is not None and not renewal.begin(introduction.received is not None):
                    return False
                connected = True
                await _connect(call, link, connection, introduction, metadata["bcp-series"])
            read = call.read if renewal is None else partial(_read_on, call, renewal)
            why = await converse(link, connection, read, call.write, receive)
            in_peace, reason = why is None, why or ""
        except TimeoutError:
            code, reason = grpc.StatusCode.UNAVAILABLE, "it has not answered"
        except (
            grpc.aio.AioRpcError,
            grpc.aio.UsageError,
            asyncio.InvalidStateError,
            CredentialsError,
            FrameError,
            MessageError,
        ) as error:
            code, reason = await _status(call, error)
        finally:
            call.cancel()
            if link.connection is connection:
                lost(link.rank, connection, None if in_peace else reason)
    if not connected:
        if "Socket closed" in reason or "handshake failed" in reason:
            reason += _TLS_HINT
        elif code is grpc.StatusCode.UNAVAILABLE:
            reason += f"; {HINT}"
        link.trouble = f"; rank {info.rank} (host {info.host}) cannot connect to it at {address}: {reason}"
        if code in _REFUSALS:
            raise RefusedError(f"{link} at {address} refused {info}: {reason}")
    return connected


@dataclass(frozen=True, slots=True)
class Renewal:
    """A new stream beside a silent one."""

    patience: float  # seconds until the other side has to have answered
    # called once it has: with False if the other side has lost the silent connection, so that nothing can be resumed.
    # Returns whether the new stream is still wanted.
    begin: Callable[[bool], bool]
    settle: Callable[[], object]  # called once the other side talks over the new stream: the silent one may end


async def _read_on(call: Any, renewal: Renewal) -> Any:
    """Read a message, after which the silent stream may end: its end must not reach the parent before the new one."""
    data = await call.read()
    renewal.settle()
    return data


def _series_of(link: Link, renewal: Renewal | None) -> list[tuple[str, str]]:
    """Return the metadata that tell a new series of connections from a renewed connection of the present one."""
    if renewal is None:
        return [("bcp-series", secrets.token_hex(8))]
    link.renewals += 1
    return [("bcp-series", link.series), ("bcp-renewal", str(link.renewals))]


async def _connect(call: Any, link: Link, connection: object, introduction: Introduction, series: str) -> None:
    """Make this stream the link's connection; the parent changes over with the first message."""
    if introduction.received is None:
        link.up(connection, PeerInfo(introduction.rank, "", introduction.host, introduction.pid), series)
    else:
        link.renew(connection, link.count, pack_number(introduction.received))
        await call.write(Frame(Kind.HEARD, body=link.said()).pack())


async def _introduced(call: Any, metadata: Mapping[str, str], token: str, parent: int) -> Introduction:
    """Prove the job's token to the parent, check the parent's proof, and return the parent's introduction."""
    challenge = dict(iter(await call.initial_metadata() or ())).get("bcp-challenge")
    if challenge is None:
        raise CredentialsError("it asks for no proof of the job's token, so it is no coordinator of this bcp")
    await call.write(proof_of(token, "child", metadata, parent, challenge))
    answer = await call.read()
    expected = proof_of(token, "parent", metadata, parent, challenge)
    if answer is grpc.aio.EOF or not hmac.compare_digest(answer[: len(expected)], expected):
        raise CredentialsError("it does not know the job's token, so it is no rank of this job")
    return Introduction.decode(answer[len(expected) :], parent)


def _channel(address: str, tls: Tls | None) -> Any:
    """Return a channel, which connects at its first use."""
    options = channel_options(tls)
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.aio.secure_channel(address, credentials, options)


async def _status(call: Any, error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call that has ended, and its reason for messages."""
    try:
        async with asyncio.timeout(_STATUS_SECONDS):
            return await call.code(), f"{(await call.code()).name}: {await call.details()}"
    except TimeoutError:
        return grpc.StatusCode.UNKNOWN, str(error)
