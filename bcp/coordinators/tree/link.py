"""This rank's end of an edge of the tree: a queue of frames that outlives silent connections."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from bcp.coordinators.peers import PeerInfo
from bcp.coordinators.tree.frames import Frame, FrameError, Kind, joined, pack_number, pieces_of, unpack_number

__all__ = ["Link", "Traffic"]

_NOTHING = Frame(Kind.HEARD).pack()  # stands for a message that is not sent again, so that the count stays right
_KEPT_BYTES = 1 << 20  # received bytes after which a neighbour is told that it need not keep them


class Traffic(NamedTuple):
    """Bytes and messages of one edge since it was made: our frames, without the overhead of gRPC and TCP."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0


class Link:
    """This rank's end of the edge to one neighbour; it runs on the coordinators' loop.

    It outlives connections. Frames queued before the first connection are sent once it is up. If a connection breaks,
    queued and in-flight frames are lost, and their operations fail.

    A connection may also fall silent without breaking. :meth:`renew` puts another one in its place, and no frame is
    lost or doubled: both sides count the messages of a *series* of connections. A side keeps each message until the
    other side has acknowledged it, and sends the others again.
    """

    def __init__(self, rank: int, host: str = "") -> None:
        self.rank = rank
        self._host = host
        self.peer: PeerInfo | None = None  # the neighbour's info, once it has been connected
        self.connection: object | None = None  # the present one, an object of the transport's own
        self.series = ""  # name of the present connection and of those whose place it has taken
        self.renewals = 0  # attempts to renew a connection of the series
        self.heard = 0.0  # time.monotonic() when the last message came, or the connection was made
        self.asked = False  # whether the last frame was a question for a sign of life
        self.count = 0  # messages of the series that were received
        self.trouble = ""  # the reason why there is no connection, for messages, if one is known
        self.awaited: object | None = None  # stands for the latest break, while the neighbour may come back
        self.given_up = ""  # the cause of errors if the neighbour has not come back
        self._sent, self._received = [0, 0], [0, 0]
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._unread: deque[tuple[int, bytes]] = deque()  # messages that were sent, and not acknowledged
        self._acknowledged = 0  # messages of the series before these
        self._repeats = 0  # messages to send again, the last of the series that were sent over the connection before
        self._again = 0  # messages to come that were received over the connection before
        self._begun: list[bytes] = []  # pieces of a frame that is coming
        self._unsaid = 0  # bytes received since the neighbour was told a count
        self._writing: object | None = None  # the connection to which a message is being written
        self._watchers: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        state = "up" if self.connection is not None else "down"
        return f"<Link to {self}: {state}, {self._repeats + len(self._waiting)} frames wait>"

    def __str__(self) -> str:
        if self.peer is not None:
            return str(self.peer)
        return f"rank {self.rank} (host {self._host})" if self._host else f"rank {self.rank}"

    @property
    def traffic(self) -> Traffic:
        """The bytes and messages so far."""
        (sent, messages_sent), (received, messages_received) = self._sent, self._received
        return Traffic(sent, received, messages_sent, messages_received)

    @property
    def empty(self) -> bool:
        """Whether all frames have been handed to the transport."""
        return not (self._repeats or self._waiting) and self._writing is None

    def send(self, operation: int, frame: bytes) -> None:
        """Send a frame of an operation, after all earlier ones."""
        self._waiting.extend((operation, piece) for piece in pieces_of(frame))
        self._wake()

    def drop(self, operation: int) -> None:
        """Drop the queued frames of an operation, and the rest of a frame that is partly sent."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != operation)
        self._unread = deque(entry if entry[0] != operation else (operation, _NOTHING) for entry in self._unread)

    def received(self, message: bytes) -> bytes | None:
        """Count a message, and return the frame that is complete with it."""
        self._received[0] += len(message)
        self._received[1] += 1
        self.heard = time.monotonic()
        if self._again:
            self._again -= 1
            return None
        self.count += 1
        self._unsaid += len(message)
        return joined(message, self._begun)

    def said(self) -> bytes:
        """Return the body of a frame that acknowledges all messages so far."""
        self._unsaid = 0
        return pack_number(self.count)

    @property
    def owes_a_word(self) -> bool:
        """Whether so many bytes were received that the neighbour should hear of it."""
        return self._unsaid >= _KEPT_BYTES

    def acknowledge(self, body: bytes) -> None:
        """Forget the messages that the neighbour has received, see :meth:`said`. Raises :class:`FrameError`."""
        count = unpack_number(body, 0)[0] - self._acknowledged
        if count > len(self._unread):
            raise FrameError(f"{count} messages acknowledged, and {len(self._unread)} were sent")
        for _ in range(count):
            self._unread.popleft()
            self._acknowledged += 1

    def up(self, connection: object, peer: PeerInfo, series: str = "") -> None:
        """Record a new connection, the first one of a series."""
        self.connection, self.peer, self.trouble = connection, peer, ""
        self.series, self.heard, self.asked = series, time.monotonic(), False
        self.awaited, self.given_up = None, ""
        self._wake()

    def renew(self, connection: object, told: int, theirs: bytes) -> None:
        """Put another connection in the place of a silent one, and send again what did not arrive over that.

        ``told`` is the count that the neighbour was told for this connection, ``theirs`` the count that it has told.
        Both sides send all messages after these counts again, as both may have received more over the silent
        connection. A message that was acknowledged there is sent again without its content. Raises
        :class:`FrameError`.
        """
        self.acknowledge(theirs)
        self.connection, self.trouble = connection, ""
        self.heard, self.asked = time.monotonic(), False
        self._again = self.count - told
        self._unread, self._waiting = _without_signs(self._unread), _without_signs(self._waiting)
        self._repeats = self._acknowledged + len(self._unread) - unpack_number(theirs, 0)[0]
        self._writing = None
        self._wake()

    def down(self, trouble: str) -> None:
        """Record that the connection is gone, and drop the queued frames."""
        self.connection, self.trouble = None, trouble
        self.series, self.renewals, self.asked = "", 0, False
        self.count = self._acknowledged = self._repeats = self._again = self._unsaid = 0
        self._waiting.clear()
        self._unread.clear()
        self._begun.clear()
        self._wake()

    async def pump(self, connection: object, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write queued frames as they come, as long as this connection is the link's."""
        while self.connection is connection:
            if not (self._repeats or self._waiting):
                await self.changed()
                continue
            message = self._next()
            self._writing = connection
            try:
                await write(message)
            finally:
                if self._writing is connection:
                    self._writing = None
            self._sent[0] += len(message)
            self._sent[1] += 1
            if self.empty:
                self._wake()

    def _next(self) -> bytes:
        """Return the message to write now. A repeated one that was acknowledged meanwhile keeps its number only."""
        if self._repeats:
            index = len(self._unread) - self._repeats
            self._repeats -= 1
            return self._unread[index][1] if index >= 0 else _NOTHING
        self._unread.append(self._waiting.popleft())
        return self._unread[-1][1]

    async def flushed(self) -> None:
        """Wait until all frames have been handed to the transport, or the connection is gone."""
        while self.connection is not None and not self.empty:
            await self.changed()

    async def changed(self) -> None:
        """Wait for the next change of the link."""
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        await watcher

    def _wake(self) -> None:
        """Wake all tasks that wait for a change; later ones wait for the next change."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)


def _without_signs(messages: Iterable[tuple[int, bytes]]) -> deque[tuple[int, bytes]]:
    """Return messages without the signs of life of a connection that has fallen silent; these keep their numbers."""
    return deque(
        (operation, _NOTHING if message[0] in (Kind.BEAT, Kind.ASK) else message) for operation, message in messages
    )
