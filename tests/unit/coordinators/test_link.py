from __future__ import annotations

import random
from collections import deque

import anyio
import pytest
from anyio.abc import TaskGroup

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


class Held:
    """One direction of a connection: each write waits until the test lets it pass, each message until it is taken."""

    def __init__(self) -> None:
        self.written: deque[bytes] = deque()
        self._free = anyio.Semaphore(0)

    async def write(self, frame: bytes) -> None:
        self.written.append(frame)
        await self._free.acquire()

    async def let_one_pass(self) -> None:
        self._free.release()
        await anyio.wait_all_tasks_blocked()


class End:
    """One end of an :class:`Edge`."""

    def __init__(self, rank: int) -> None:
        self.link = Link(rank)
        self.sent: list[bytes] = []
        self.received: list[bytes] = []
        self.dropped: set[int] = set()

    def send(self, operation: int) -> None:
        self.sent.append(Frame(Kind.UP, operation, len(self.sent)).pack())
        self.link.send(operation, self.sent[-1])

    def drop(self, operation: int) -> None:
        self.dropped.add(operation)
        self.link.drop(operation)

    def take(self, message: bytes) -> None:
        """Take a message as a node does."""
        whole = self.link.received(message)
        if whole is None:
            return
        frame = Frame.unpack(whole)
        if frame.kind is Kind.HEARD:
            if frame.body:
                self.link.acknowledge(frame.body)
        else:
            self.received.append(whole)


class Edge:
    """A child and a parent, and the connections between them, whose every move the test chooses."""

    def __init__(self, chance: random.Random, group: TaskGroup) -> None:
        self.ends = (End(1), End(0))
        self._chance, self._group = chance, group
        self._ways = [Held(), Held()]  # what each end writes to
        self._offer: int | None = None  # the count that the parent has told for a new connection
        self._operation = 0
        for end, way in zip(self.ends, self._ways, strict=True):
            end.link.up(way, PeerInfo.of(end.link.rank, ""), "series")
            group.start_soon(end.link.pump, way, way.write)

    def other(self, end: End) -> End:
        return self.ends[1 - self.ends.index(end)]

    async def step(self) -> None:
        moves = {self._say: 6, self._write: 8, self._deliver: 8, self._word: 3, self._end: 1, self._renew: 1}
        (move,) = self._chance.choices(list(moves), list(moves.values()))
        await move(self._chance.randrange(2))
        await anyio.wait_all_tasks_blocked()

    async def finish(self) -> None:
        """Let all messages arrive."""
        for _ in range(1_000):
            for side in (0, 1):
                await self._write(side)
                await self._deliver(side)

    async def _say(self, side: int) -> None:
        self._operation += self._chance.random() < 0.2
        self.ends[side].send(self._operation)

    async def _write(self, side: int) -> None:
        if not self.ends[side].link.empty:
            await self._ways[side].let_one_pass()

    async def _deliver(self, side: int) -> None:
        if self._ways[side].written:
            self.ends[1 - side].take(self._ways[side].written.popleft())

    async def _word(self, side: int) -> None:
        link = self.ends[side].link
        link.send(0, Frame(Kind.HEARD, body=link.said()).pack())

    async def _end(self, side: int) -> None:
        self.ends[side].drop(self._operation)

    async def _renew(self, _side: int) -> None:
        """The parent tells a count for a new connection; later, at once for the child, both change over to it."""
        child, parent = (end.link for end in self.ends)
        if self._offer is None:
            self._offer = parent.count
            return
        up, down = Held(), Held()
        child.renew(up, child.count, pack_number(self._offer))
        word = child.said()
        for _ in range(self._chance.randrange(3)):
            await self._deliver(0)  # what is still under way to the parent over the silent connection
        parent.renew(down, self._offer, word)
        parent.send(0, Frame(Kind.HEARD, body=parent.said()).pack())
        self._ways, self._offer = [up, down], None
        self._group.start_soon(child.pump, up, up.write)
        self._group.start_soon(parent.pump, down, down.write)


def operation_of(message: bytes) -> int:
    return Frame.unpack(message).operation


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


async def test_a_message_that_is_to_be_sent_again_may_be_acknowledged_before() -> None:
    """The neighbour told a count for the new connection, and the old one still brought it messages."""
    link, wire = Link(3), Held()
    link.up(wire, PeerInfo.of(3, ""), "series")
    for frame in numbered(4):
        link.send(5, frame)
    async with anyio.create_task_group() as group:
        group.start_soon(link.pump, wire, wire.write)
        for _ in range(4):
            await wire.let_one_pass()
        anew = Held()
        link.renew(anew, 0, pack_number(1))
        link.acknowledge(pack_number(3))
        group.start_soon(link.pump, anew, anew.write)
        for _ in range(3):
            await anew.let_one_pass()
        group.cancel_scope.cancel()
    nothing = Frame(Kind.HEARD).pack()
    assert list(anew.written) == [nothing, nothing, numbered(4)[3]]
    link.acknowledge(pack_number(4))
    with pytest.raises(FrameError, match="1 messages acknowledged, and 0 were sent"):
        link.acknowledge(pack_number(5))


@pytest.mark.parametrize("seed", range(100))
async def test_two_ends_agree_on_all_messages_whatever_happens_when(seed: int) -> None:
    """Connections are renewed at random moments, and operations end, while messages are under way both ways."""
    async with anyio.create_task_group() as group:
        edge = Edge(random.Random(seed), group)  # noqa: S311 -- the same for each seed
        for _ in range(300):
            await edge.step()
        await edge.finish()
        group.cancel_scope.cancel()
    for end in edge.ends:
        other = edge.other(end)
        expected = [message for message in end.sent if operation_of(message) not in end.dropped]
        assert [message for message in other.received if operation_of(message) not in end.dropped] == expected
        assert len(set(other.received)) == len(other.received), "one came twice"


async def test_much_is_acknowledged_while_it_comes() -> None:
    link = Link(3)
    link.up(object(), PeerInfo.of(3, ""), "series")
    link.received(Frame(Kind.UP, 5, 1, bytes(1 << 19)).pack())
    assert not link.owes_a_word
    link.received(Frame(Kind.UP, 5, 2, bytes(1 << 19)).pack())
    assert link.owes_a_word
    assert link.said() == pack_number(2)
    assert not link.owes_a_word
