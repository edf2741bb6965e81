"""One edge of the tree: what is still to be sent over it, whether it is up, and what has passed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from bcp.coordinators.hello import Hello
from bcp.coordinators.tree.frames import joined, pieces_of

__all__ = ["Link", "Traffic"]


class Traffic(NamedTuple):
    """Bytes and messages of one edge since it was made: our frames, without what gRPC and TCP add."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0


class Link:
    """This rank's end of the edge to one neighbour; lives on the coordinators' loop.

    It outlives connections. Frames that are sent before the first one wait for it; those that wait or are on their way
    when one breaks are lost, which ends their operations.

    Attributes:
        rank: the neighbour.
        hello: who the neighbour is, once it has been connected.
        connection: the present one, an object of the transport's own; None while there is none.
        trouble: why there is none, for messages; empty where nothing is known.
        awaited: that it broke, as an object of its own, while the neighbour may come back; None otherwise.
        given_up: what to say of a neighbour that has not come back; empty where there is no reason to.
    """

    def __init__(self, rank: int, host: str = "") -> None:
        """Make an end that is not connected; ``host`` is the neighbour's, as far as it is known."""
        self.rank = rank
        self._host = host
        self.hello: Hello | None = None
        self.connection: object | None = None
        self.trouble = ""
        self.awaited: object | None = None
        self.given_up = ""
        self._sent, self._received = [0, 0], [0, 0]
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._begun: list[bytes] = []  # pieces of a frame that is coming
        self._writing = False
        self._watchers: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        """Show the neighbour, and whether it is there."""
        state = "up" if self.connection is not None else "down"
        return f"<Link to {self}: {state}, {len(self._waiting)} frames wait>"

    def __str__(self) -> str:
        """Name the neighbour, with host and process where they are known."""
        if self.hello is not None:
            return str(self.hello)
        return f"rank {self.rank} (host {self._host})" if self._host else f"rank {self.rank}"

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages that have passed."""
        (sent, messages_sent), (received, messages_received) = self._sent, self._received
        return Traffic(sent, received, messages_sent, messages_received)

    @property
    def empty(self) -> bool:
        """Say whether all frames have been handed to the transport."""
        return not self._waiting and not self._writing

    def send(self, operation: int, frame: bytes) -> None:
        """Send a frame of an operation, after all earlier ones."""
        self._waiting.extend((operation, piece) for piece in pieces_of(frame))
        self._wake()

    def drop(self, operation: int) -> None:
        """Forget the frames of an operation that still wait, and what is left of one."""
        self._waiting = deque(each for each in self._waiting if each[0] != operation)

    def received(self, message: bytes) -> bytes | None:
        """Count a message, and return the frame that is complete with it."""
        self._received[0] += len(message)
        self._received[1] += 1
        return joined(message, self._begun)

    def up(self, connection: object, hello: Hello) -> None:
        """Take note of a new connection."""
        self.connection, self.hello, self.trouble = connection, hello, ""
        self.awaited, self.given_up = None, ""
        self._wake()

    def down(self, trouble: str) -> None:
        """Take note that there is none any more, and forget what waited for it."""
        self.connection, self.trouble = None, trouble
        self._waiting.clear()
        self._begun.clear()
        self._wake()

    async def pump(self, connection: object, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write the frames that wait, as they come, as long as the connection is this one."""
        while self.connection is connection:
            if not self._waiting:
                await self.changed()
                continue
            _, frame = self._waiting.popleft()
            self._writing = True
            try:
                await write(frame)
            finally:
                self._writing = False
            self._sent[0] += len(frame)
            self._sent[1] += 1
            if not self._waiting:
                self._wake()

    async def flushed(self) -> None:
        """Return once all frames have been handed to the transport, or the connection is gone."""
        while self.connection is not None and not self.empty:
            await self.changed()

    async def changed(self) -> None:
        """Return at the next change of anything here."""
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.append(watcher)
        await watcher

    def _wake(self) -> None:
        """Wake those who wait for a change; whoever waits from now on waits for the next."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)
