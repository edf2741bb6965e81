from __future__ import annotations

import anyio
import pytest

from bcp.coordinators.peers import PeerInfo
from bcp.coordinators.tree.frames import Frame, FrameError, Kind, pack_number
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
    with anyio.fail_after(60):
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
    with anyio.fail_after(60):
        await link.flushed()  # nobody is there
        async with anyio.create_task_group() as group:
            group.start_soon(pumped, link, 1)
            await anyio.lowlevel.checkpoint()
            await link.flushed()
    assert link.empty


# -- connections that fall silent ------------------------------------------------------------


def numbered(count: int, kind: Kind = Kind.UP) -> list[bytes]:
    return [Frame(kind, 5, step).pack() for step in range(count)]


async def flushed(link: Link, wire: Wire) -> None:
    """Let a connection write all queued frames."""
    async with anyio.create_task_group() as group:
        group.start_soon(link.pump, wire, wire.write)
        with anyio.fail_after(60):
            await link.flushed()
        group.cancel_scope.cancel()


async def renewed(link: Link, received: int, frames: int, told: int = 0) -> list[bytes]:
    """Put a new connection in the place of the present one, let it write so many frames, and return them."""
    wire = Wire(link, frames)
    link.renew(wire, told, pack_number(received))
    with anyio.fail_after(60):
        await link.pump(wire, wire.write)
    return wire.written


async def test_messages_that_did_not_arrive_are_sent_again_in_order() -> None:
    link, sent = Link(3), numbered(6)
    wire = Wire(link, 99)
    link.up(wire, PeerInfo.of(3, ""), "series")
    for frame in sent[:4]:
        link.send(5, frame)
    await flushed(link, wire)
    assert wire.written == sent[:4]
    for frame in sent[4:]:
        link.send(5, frame)  # these wait
    assert await renewed(link, 1, 5) == sent[1:]


async def test_messages_of_the_old_connection_that_came_late_are_not_taken_twice() -> None:
    link, frames = Link(3), numbered(5)
    link.up(object(), PeerInfo.of(3, ""), "series")
    for frame in frames[:2]:
        assert link.received(frame) == frame
    told = link.count
    assert link.received(frames[2]) == frames[2]  # after the neighbour was told of two
    link.renew(object(), told, pack_number(0))
    assert [link.received(frame) for frame in frames[2:]] == [None, *frames[3:]]
    assert link.count == 5


async def test_an_operation_that_has_ended_and_stale_signs_of_life_keep_their_numbers_only() -> None:
    link = Link(3)
    wire = Wire(link, 99)
    link.up(wire, PeerInfo.of(3, ""), "series")
    beat, other = Frame(Kind.BEAT, 6, body=pack_number(0)).pack(), Frame(Kind.UP, 6, 1).pack()
    for operation, frame in [(5, numbered(1)[0]), (6, beat), (6, other)]:
        link.send(operation, frame)
    await flushed(link, wire)
    link.drop(5)
    nothing = Frame(Kind.HEARD).pack()
    assert await renewed(link, 0, 3) == [nothing, nothing, other]


async def test_acknowledged_messages_are_forgotten_and_impossible_counts_are_errors() -> None:
    link = Link(3)
    wire = Wire(link, 99)
    link.up(wire, PeerInfo.of(3, ""), "series")
    for frame in numbered(3):
        link.send(5, frame)
    await flushed(link, wire)
    link.acknowledge(pack_number(2))
    link.acknowledge(pack_number(1))  # an older word, which came late
    with pytest.raises(FrameError, match="2 messages acknowledged, and 1 were sent"):
        link.acknowledge(pack_number(4))
    assert await renewed(link, 2, 1) == numbered(3)[2:]


async def test_much_is_acknowledged_while_it_comes() -> None:
    link = Link(3)
    link.up(object(), PeerInfo.of(3, ""), "series")
    link.received(Frame(Kind.UP, 5, 1, bytes(1 << 19)).pack())
    assert not link.owes_a_word
    link.received(Frame(Kind.UP, 5, 2, bytes(1 << 19)).pack())
    assert link.owes_a_word
    assert link.said() == pack_number(2)
    assert not link.owes_a_word
