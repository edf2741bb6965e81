from __future__ import annotations

import anyio
import pytest

from bcp.coordinators.peers import PeerInfo
from bcp.coordinators.tree.link import Link, Traffic

pytestmark = pytest.mark.anyio


class Wire:
    """Takes what a link writes, and ends the connection after so many frames."""

    def __init__(self, link: Link, frames: int) -> None:
        self.written: list[bytes] = []
        self._link = link
        self._frames = frames

    async def write(self, frame: bytes) -> None:
        self.written.append(frame)
        if len(self.written) == self._frames:
            self._link.down("the end")


async def pumped(link: Link, frames: int) -> list[bytes]:
    """Connect a link, let it write so many frames, and return them."""
    wire = Wire(link, frames)
    link.up(wire, PeerInfo.of(3, ""))
    with anyio.fail_after(5):
        await link.pump(wire, wire.write)
    return wire.written


async def test_frames_wait_for_the_first_connection() -> None:
    link = Link(3)
    link.send(0, b"one")
    link.send(1, b"three")
    assert not link.empty
    assert str(link) == "rank 3"
    assert await pumped(link, 2) == [b"one", b"three"]
    assert link.traffic == Traffic(bytes_sent=8, messages_sent=2)
    assert str(link).startswith("rank 3 (host ")


async def test_frames_of_an_operation_that_has_ended_are_not_sent() -> None:
    link = Link(3)
    for operation, frame in [(0, b"join"), (1, b"other"), (0, b"up")]:
        link.send(operation, frame)
    link.drop(0)
    link.send(0, b"abort")
    assert await pumped(link, 2) == [b"other", b"abort"]


async def test_frames_are_lost_with_their_connection() -> None:
    link = Link(3)
    for frame in (b"sent", b"lost"):
        link.send(0, frame)
    assert await pumped(link, 1) == [b"sent"]
    assert link.empty
    assert "down" in repr(link)
    link.send(1, b"next")
    assert await pumped(link, 1) == [b"next"]


async def test_all_is_flushed_when_it_is_written_or_can_never_be() -> None:
    link = Link(3)
    link.send(0, b"frame")
    with anyio.fail_after(5):
        await link.flushed()  # nobody is there
        async with anyio.create_task_group() as group:
            group.start_soon(pumped, link, 1)
            await anyio.lowlevel.checkpoint()
            await link.flushed()
    assert link.empty
