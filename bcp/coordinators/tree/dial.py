"""The child's end: one stream to the parent."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any

from bcp.coordinators.hello import Hello
from bcp.coordinators.hosts import HINT
from bcp.coordinators.tls import Tls
from bcp.coordinators.tree.edge import (
    METHOD,
    SERVICE,
    CredentialsError,
    Receive,
    channel_credentials,
    channel_options,
    converse,
    hello_of,
    metadata_of,
    proof_of,
)
from bcp.coordinators.tree.grpc_import import grpc
from bcp.coordinators.tree.link import Link

__all__ = ["RefusedError", "dial"]

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
    """The parent does not let this rank in, and would not at a second try either."""


async def dial(
    address: str,
    tls: Tls | None,
    hello: Hello,
    credentials: list[tuple[str, str]],
    token: str,
    link: Link,
    *,
    receive: Receive,
    lost: Callable[[int, object, str | None], None],
) -> bool:
    """Connect to the parent and talk to it until the stream ends; say whether there was a connection at all.

    Where there was none, ``link.trouble`` says why. Raises :class:`RefusedError`.
    """
    connection = object()
    code, reason = grpc.StatusCode.UNKNOWN, "the connection broke"
    in_peace = False
    async with _channel(address, tls) as channel:
        said = dict([*metadata_of(hello), *credentials])
        call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=tuple(said.items()))
        try:
            link.up(connection, await _introduced(call, said, token, link.rank))
            why = await converse(link, connection, call.read, call.write, receive)
            in_peace, reason = why is None, why or ""
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, CredentialsError) as error:
            code, reason = await _status(call, error)
        finally:
            call.cancel()
            connected = link.connection is connection
            if connected:
                lost(link.rank, connection, None if in_peace else reason)
    if not connected:
        if "Socket closed" in reason or "handshake failed" in reason:
            reason += _TLS_HINT
        elif code is grpc.StatusCode.UNAVAILABLE:
            reason += f"; {HINT}"
        link.trouble = f"; rank {hello.rank} (host {hello.host}) cannot connect to it at {address}: {reason}"
        if code in _REFUSALS:
            raise RefusedError(f"{link} at {address} refused {hello}: {reason}")
    return connected


async def _introduced(call: Any, said: Mapping[str, str], token: str, parent: int) -> Hello:
    """Prove to the parent that this rank knows the job's token, and return who the parent is, which proves the same."""
    challenge = dict(iter(await call.initial_metadata() or ())).get("bcp-challenge")
    if challenge is None:
        raise CredentialsError("it asks for no proof of the job's token, so it is no coordinator of this bcp")
    await call.write(proof_of(token, "child", said, parent, challenge))
    answer = await call.read()
    expected = proof_of(token, "parent", said, parent, challenge)
    if answer is grpc.aio.EOF or not hmac.compare_digest(answer[: len(expected)], expected):
        raise CredentialsError("it does not know the job's token, so it is no rank of this job")
    return hello_of(map(tuple, json.loads(answer[len(expected) :])))


def _channel(address: str, tls: Tls | None) -> Any:
    """Return a channel, which connects when it is used."""
    options = channel_options(tls)
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options)


async def _status(call: Any, error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return how a call has ended, and why, for messages."""
    try:
        async with asyncio.timeout(_STATUS_SECONDS):
            return await call.code(), f"{(await call.code()).name}: {await call.details()}"
    except TimeoutError:
        return grpc.StatusCode.UNKNOWN, str(error)
