"""The memory of another host, read through its agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from bcp._messages.tiers import Post, Posted, Want
from bcp._sockets import Wire
from bcp.backends.small import check_small
from bcp.errors import CorruptError, StorageError
from bcp.protocols import Backend, Buffer, flat_view
from bcp.runtime.process import process_lock
from bcp.runtime.threads import in_thread
from bcp.tiers.refusals import ReadOnly
from bcp.tiers.wire import Status, StrangerError, connected, dial, pull_head, push_request, split_address

__all__ = ["NoAgent", "PeerMemory", "peer_at"]

T = TypeVar("T")

SECONDS = 30.0
"""Silence after which an agent counts as gone; the next copy is read then."""


class NoAgent(ReadOnly):
    """The memory of a host whose agent serves nobody: each read leads to the next copy."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"NoAgent({self._name!r})"

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Raise StorageError."""
        del start, out
        raise self._away(key)

    async def get(self, key: str) -> Buffer:
        """Raise StorageError."""
        raise self._away(key)

    def _away(self, key: str) -> StorageError:
        return StorageError(f"host {self._name} has {key}, and its agent serves no other host: start it with --listen")


class PeerMemory(ReadOnly):
    """A :class:`~bcp.protocols.Backend` that reads marked files of another host; it writes and lists nothing."""

    at_once = 4

    def __init__(self, address: tuple[str, int], token: bytes, *, seconds: float = SECONDS) -> None:
        """Take an agent's address. The first read connects.

        Args:
            address: host and port.
            token: the job's secret.
            seconds: silence after which the agent counts as gone.

        """
        self._address, self._token, self._seconds = address, token, seconds
        self._free: list[Wire] = []
        self._lock = process_lock()

    def __repr__(self) -> str:
        return f"PeerMemory({self._address[0]}, port {self._address[1]})"

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` from a file's bytes."""
        await self.read_scattered(key, start, [flat_view(out)])

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill the buffers, one after the other, from a file's bytes."""
        await self.read_pieces(key, start, [outs], lambda _: None)

    async def read_pieces(
        self, key: str, start: int, pieces: Sequence[Sequence[memoryview]], arrived: Callable[[int], None]
    ) -> None:
        """Fill buffers piece by piece, in a thread, where ``arrived`` is called with the number of each full piece."""
        want = Want(key, start, sum(len(out) for piece in pieces for out in piece))

        def receive(wire: Wire, nbytes: int) -> None:
            if nbytes != want.nbytes:
                raise StorageError(f"{self!r} sends {nbytes} bytes of {key} instead of {want.nbytes}")
            for number, piece in enumerate(pieces):
                for out in piece:
                    wire.pull(out)
                arrived(number)

        if want.nbytes:
            await in_thread(self._ask, want, receive)

    async def get(self, key: str) -> Buffer:
        """Read a small file whole."""
        return await in_thread(self._ask, Want(key, 0, 0), self._small(key))

    async def post(self, post: Post) -> Posted:
        """Leave a note for a meeting, and return the notes of others."""
        return Posted.decode(bytes(await in_thread(self._ask, post, self._small(post.key))))

    def _small(self, key: str) -> Callable[[Wire, int], bytearray]:
        """Return what receives a small file or an answer."""

        def receive(wire: Wire, nbytes: int) -> bytearray:
            check_small(f"{self!r}: {key}", nbytes)
            wire.pull(memoryview(data := bytearray(nbytes)))
            return data

        return receive

    def _ask(self, want: Want | Post, receive: Callable[[Wire, int], T]) -> T:
        """Ask over a connection of its own; a connection that fails is closed. Blocks."""
        wire = self._taken()
        try:
            push_request(wire, want)
            status, nbytes, words = pull_head(wire)
            received = [receive(wire, nbytes)] if status is Status.OK else []
        except BaseException as error:
            wire.close()
            if isinstance(error, OSError):
                raise self._failed(error) from error
            raise
        with self._lock:
            self._free.append(wire)
        if status is Status.MISSING:
            raise FileNotFoundError(f"{self!r}: {words}")
        if status is Status.DAMAGED:
            raise CorruptError(f"{self!r}: {words}")
        if status is Status.FAILED:
            raise StorageError(f"{self!r}: {words}")
        return received[0]

    def _taken(self) -> Wire:
        """Return a free connection, or a new one that has proved itself."""
        with self._lock:
            if self._free:
                return self._free.pop()
        try:
            wire = Wire(connected(self._address, self._seconds))
            wire.block(self._seconds)
            try:
                dial(wire, self._token)
            except BaseException:
                wire.close()
                raise
        except (OSError, StrangerError) as error:
            raise self._failed(error) from error
        return wire

    def _failed(self, error: Exception) -> StorageError:
        return StorageError(f"{self!r} does not serve this job: {error}")

    async def aclose(self) -> None:
        """Close the connections."""
        with self._lock:
            free, self._free = self._free, []
        for wire in free:
            with suppress(OSError):
                wire.close()


def peer_at(name: str, address: str, token: bytes) -> Backend:
    """Return the memory of another host, read through its agent.

    Args:
        name: of the host, for messages.
        address: of its agent, as ``host:port``; empty if it serves nobody.
        token: the job's secret.

    """
    host, port = split_address(address)
    return PeerMemory((host, port), token) if port else NoAgent(name)
