"""The child's end: one stream to the parent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from bcp.coordinators.hello import Hello
from bcp.coordinators.tree.edge import (
    METHOD,
    SERVICE,
    CredentialsError,
    Receive,
    Tls,
    channel_options,
    converse,
    hello_of,
    metadata_of,
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


_STATUS_SECONDS = 1.0  # how long a parent that says nothing sensible may take to say why; it is there already


class RefusedError(Exception):
    """The parent does not let this rank in, and would not at a second try either."""


async def dial(
    address: str,
    tls: Tls | None,
    hello: Hello,
    credentials: list[tuple[str, str]],
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
        call: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=(*metadata_of(hello), *credentials))
        try:
            link.up(connection, hello_of(await call.initial_metadata()))
            why = await converse(link, connection, call.read, call.write, receive)
            in_peace, reason = why is None, why or ""
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, CredentialsError) as error:
            code, reason = await _status(call, error)
        finally:
            call.cancel()
            connected = link.connection is connection
            if connected:
                lost(link.rank, connection, None if in_peace else reason)
    if not connected:
        link.trouble = f"; rank {hello.rank} cannot connect to it at {address}: {reason}"
        if code in _REFUSALS:
            raise RefusedError(f"{link} at {address} refused {hello}: {reason}")
    return connected


def _channel(address: str, tls: Tls | None) -> Any:
    """Return a channel, which connects when it is used."""
    options = channel_options(tls)
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, tls.of_client(), options)


async def _status(call: Any, error: Exception) -> tuple[grpc.StatusCode, str]:
    """Return how a call has ended, and why, for messages."""
    try:
        async with asyncio.timeout(_STATUS_SECONDS):
            return await call.code(), f"{(await call.code()).name}: {await call.details()}"
    except TimeoutError:
        return grpc.StatusCode.UNKNOWN, str(error)
