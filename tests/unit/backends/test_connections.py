"""Connections that are dropped at any time of their life."""

from __future__ import annotations

import asyncio
import socket

import pytest

from bcp.backends.objects.session import drop_connection

pytestmark = pytest.mark.anyio
MANY = 8 << 20
"""Bytes: more than the buffers of a socket."""


class Watched(asyncio.Protocol):
    """Tells when the connection is gone, and why."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


async def test_a_connection_that_has_sent_the_rest_and_closed_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    transport, watched = await asyncio.get_running_loop().create_connection(Watched, sock=ours)
    transport.write(bytes(MANY))
    transport.close()
    with theirs:
        theirs.settimeout(0)
        while not watched.lost.done():
            await asyncio.get_running_loop().sock_recv(theirs, MANY)
            await asyncio.sleep(0)
    assert await watched.lost is None
    drop_connection(transport)


@pytest.mark.parametrize("closes_first", [False, True])
async def test_a_connection_with_something_to_send_is_dropped(*, closes_first: bool) -> None:
    ours, theirs = socket.socketpair()
    transport, watched = await asyncio.get_running_loop().create_connection(Watched, sock=ours)
    with theirs:
        transport.write(bytes(MANY))
        if closes_first:
            transport.close()
        drop_connection(transport)
        assert transport.get_write_buffer_size() == 0
        assert await watched.lost is None
