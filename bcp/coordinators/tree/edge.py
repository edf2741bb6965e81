"""Code of both ends of a gRPC stream: introduction, credentials, and the frames that go to and fro."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from bcp.coordinators.hello import Hello
from bcp.coordinators.proof import proof
from bcp.coordinators.tls import Tls
from bcp.coordinators.tree.frames import FrameError
from bcp.coordinators.tree.grpc_import import grpc
from bcp.coordinators.tree.link import Link

__all__ = [
    "METHOD",
    "SERVICE",
    "CredentialsError",
    "Receive",
    "Tls",
    "channel_credentials",
    "channel_options",
    "converse",
    "hello_of",
    "metadata_of",
    "proof_of",
    "server_credentials",
    "server_options",
]

SERVICE, METHOD = "bcp.Coordinator", "Join"

Receive = Callable[[int, bytes], bool]
"""Takes a neighbour's frame; says whether there will be more."""

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
    """The other side lacks what it needs to come in; the message says what."""


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return the credentials of a rank with children."""
    return grpc.ssl_server_credentials([(tls.key, tls.certificate)], root_certificates=tls.ca, require_client_auth=True)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Return the credentials of a rank with a parent."""
    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)


def server_options(children: int) -> Sequence[tuple[str, int]]:
    """Return the options of a server for so many children."""
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


def metadata_of(hello: Hello) -> list[tuple[str, str]]:
    """Return how a rank introduces itself."""
    host = hello.host.encode("ascii", "backslashreplace").decode()
    return [("bcp-rank", str(hello.rank)), ("bcp-host", host), ("bcp-pid", str(hello.pid))]


def hello_of(metadata: Iterable[tuple[str, Any]] | None) -> Hello:
    """Return who introduced itself so. Raises :class:`CredentialsError`."""
    said = dict(iter(metadata or ()))  # grpcio's Metadata iterates over pairs, and has keys() besides
    try:
        return Hello(int(said["bcp-rank"]), "", str(said["bcp-host"]), int(said["bcp-pid"]))
    except (KeyError, ValueError) as error:
        raise CredentialsError("it does not say which rank it is, so it is no coordinator of this bcp") from error


def proof_of(token: str, side: str, said: Mapping[str, str], parent: int, challenge: str) -> bytes:
    """Return the proof by which a side of a new stream shows that it knows the job's token.

    Args:
        token: the job's.
        side: "child" or "parent".
        said: the child's metadata, with its nonce.
        parent: rank of the parent.
        challenge: the parent's nonce.

    """
    facts = [said.get(f"bcp-{name}") for name in ("rank", "session", "node", "nonce")]
    return proof(token.encode(), side, parent, challenge, *facts)


async def converse(
    link: Link,
    connection: object,
    read: Callable[[], Awaitable[Any]],
    write: Callable[[bytes], Awaitable[None]],
    receive: Receive,
) -> str | None:
    """Send what the link has and take what comes, until one side ends it.

    Returns why it ended, or None if the other side has said goodbye. Errors of the transport come through.
    """
    pump = asyncio.create_task(link.pump(connection, write))
    try:
        while True:
            data = await read()
            if data is grpc.aio.EOF:
                return "the other side closed it"
            if link.connection is not connection:
                return "the rank has connected anew"
            if not receive(link.rank, data):
                return None
    except FrameError as error:
        return f"what came over it makes no sense: {error}"
    finally:
        pump.cancel()
        await asyncio.wait([pump])
        if not pump.cancelled():
            pump.exception()  # the reader has met the same error, or the end
