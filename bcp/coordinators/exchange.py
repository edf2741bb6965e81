"""Bulk data between ranks: the connection and the order of each transfer, and its rate."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import anyio

from bcp._messages.coordination import Card
from bcp._sockets import Wire
from bcp.coordinators.mesh import LANES, PROBE, PROBE_LEAST, PROBE_MOST, Mesh
from bcp.errors import InputError, PeerError
from bcp.runtime.threads import in_pool

__all__ = ["Exchange", "ReportPeerFailure"]


class ReportPeerFailure(Protocol):
    """Tells all ranks that one has failed, and returns the error that ends the operation."""

    async def __call__(self, rank: int, cause: str, *, sure: bool) -> Exception:
        """Report ``rank``; if this rank is not ``sure``, another one may know a better cause."""


_FLOW_BYTES = 16 << 20  # a transfer uses one more connection for each of these, as far as there are lanes for them
_HEAD_BYTES = 8  # the length of a transfer
_PROBE_SECONDS = 0.05  # after these the last message says how fast the way is; a delayed thread costs less


class Exchange:
    """This rank's side of all exchanges of one operation."""

    def __init__(
        self, mesh: Mesh, card_of: Callable[[int], Awaitable[Card]], report_peer_failure: ReportPeerFailure
    ) -> None:
        """Prepare exchanges over a mesh. ``card_of`` waits for the card of a rank, and returns it."""
        self._mesh = mesh
        self._card_of = card_of
        self._report_peer_failure = report_peer_failure

    def __repr__(self) -> str:
        return f"<Exchange over {self._mesh!r}>"

    # -- all to all ---------------------------------------------------------------------------

    async def all_to_all(self, send: Sequence[memoryview], receive: Sequence[memoryview]) -> None:
        """Send ``send[r]`` to every other rank r, and fill ``receive[r]``; pairs without bytes are not connected."""
        # All send to the next rank, then to the one after it, and receive in the same order. So the first transfer in
        # that order that is not done has a thread on both sides, however few there are.
        rank, size = self._mesh.rank, len(send)
        after = [(rank + step) % size for step in range(1, size)]
        before = [(rank - step) % size for step in range(1, size)]
        sends = iter([partial(self._send, peer, *flow) for peer in after for flow in _flows(send[peer], size)])
        receives = iter(
            [partial(self._receive, peer, *flow) for peer in before for flow in _flows(receive[peer], size)]
        )
        try:
            async with anyio.create_task_group() as lanes:
                for transfers in (*[sends] * LANES, *[receives] * LANES):
                    lanes.start_soon(_one_by_one, transfers)
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__

    async def _send(self, peer: int, flow: int, data: memoryview, total: int) -> None:
        """Send a rank its bytes, or the part of them that goes over one connection."""
        async with self._reporting_failures(peer):
            wire = await self._mesh.dialled(peer, flow, await self._card_of(peer))
            await in_pool(self._mesh.threads, _push, wire, data, total, interrupt=wire.hang_up)

    async def _receive(self, peer: int, flow: int, out: memoryview, total: int) -> None:
        """Receive the bytes of a rank, or the part of them that comes over one connection."""
        async with self._reporting_failures(peer):
            wire = await self._mesh.accepted(peer, flow)
            nbytes = await in_pool(self._mesh.threads, _pull, wire, out, total, interrupt=wire.hang_up)
        if nbytes != total:
            raise InputError(f"rank {peer} sent {nbytes} bytes where rank {self._mesh.rank} expected {total}")

    @asynccontextmanager
    async def _reporting_failures(self, peer: int) -> AsyncIterator[None]:
        """Turn a connection that cannot be made, or breaks, into the operation's error.

        The others learn of it before their sockets close, so that they do not report this rank. A peer that hangs up
        may have heard of another cause. A silent network is a cause itself.
        """
        try:
            yield
        except PeerError as error:
            raise await self._report_peer_failure(error.rank, error.cause, sure=False) from error
        except OSError as error:
            card = await self._card_of(peer)
            ends = f"rank {self._mesh.rank} (host {socket.gethostname()}) and rank {peer} (host {card.host})"
            cause = f"the connection between {ends} broke: {error}; look at the network between them if both are alive"
            raise await self._report_peer_failure(peer, cause, sure=not isinstance(error, ConnectionError)) from error

    # -- how fast the way is ------------------------------------------------------------------

    async def bandwidth(self, size: int) -> float:
        """Return the bytes a second that this rank sends to another host; inf if all ``size`` ranks are on this one.

        All ranks measure at once, so that the ranks of one host share its bandwidth.
        """
        rates = [await self._rate(peer) for peer in await self._elsewhere(size)]
        return max(rates, default=math.inf)

    async def _elsewhere(self, size: int) -> list[int]:
        """Return up to two ranks of other hosts, one on each side: the host of one may be slow itself.

        Ranks of one host choose different peers if their numbers follow each other, as they usually do.
        """
        rank = self._mesh.rank
        up = await self._first_elsewhere([(rank + step) % size for step in range(1, size)])
        if up is None:
            return []
        down = await self._first_elsewhere([(rank - step) % size for step in range(1, size)])
        assert down is not None  # noqa: S101 -- for mypy: there is another host
        local_count = (up - rank) % size + (rank - down) % size - 1  # ranks of this host, one after another
        chosen = {(rank + local_count) % size: up, (rank - local_count) % size: down}
        return list(dict.fromkeys([await self._first_elsewhere([wish]) or other for wish, other in chosen.items()]))

    async def _first_elsewhere(self, peers: Sequence[int]) -> int | None:
        """Return the first of these peers that is on another host."""
        for peer in peers:
            if (await self._card_of(peer)).network != self._mesh.network:
                return peer
        return None

    async def _rate(self, peer: int) -> float:
        """Return the bytes a second that reach a peer."""
        async with self._reporting_failures(peer):
            wire = await self._mesh.dialled(peer, PROBE, await self._card_of(peer))
            try:
                return await in_pool(self._mesh.threads, _measure, wire, interrupt=wire.hang_up)
            finally:
                self._mesh.drop(peer, PROBE)


async def _one_by_one(transfers: Iterator[Callable[[], Awaitable[None]]]) -> None:
    """Run the remaining transfers one after another; other tasks take from the same iterator."""
    for transfer in transfers:
        await transfer()


def _flows(data: memoryview, size: int) -> Iterator[tuple[int, memoryview, int]]:
    """Cut a transfer into about equal parts, one for each connection: yield (flow, part, bytes of all parts).

    Both sides get the same parts. With many ranks each pair has one connection, as all lanes are busy anyway.
    """
    total = len(data)
    count = min(-(-total // _FLOW_BYTES), max(1, LANES // (size - 1)))
    for flow in range(count):
        yield flow, data[flow * total // count : (flow + 1) * total // count], total


def _push(wire: Wire, data: memoryview, total: int) -> None:
    """Send the size of the whole transfer, then a part of it; blocks."""
    wire.block()
    wire.push(memoryview(total.to_bytes(_HEAD_BYTES, "big")))
    wire.push(data)


def _pull(wire: Wire, out: memoryview, total: int) -> int:
    """Fill a buffer if the sender's transfer has ``total`` bytes; return the sender's total. Blocks."""
    wire.block()
    head = bytearray(_HEAD_BYTES)
    wire.pull(memoryview(head))
    nbytes = int.from_bytes(head, "big")
    if nbytes == total:
        wire.pull(out)
    return nbytes


def _measure(wire: Wire) -> float:
    """Return the bytes a second that a peer receives; blocks for some hundredths of a second.

    Each message is twice as long as the one before, as the listener expects. Buffers of the network may take the
    first ones at once.
    """
    wire.block()
    ack, block = memoryview(bytearray(1)), memoryview(bytes(PROBE_MOST))
    nbytes, ends = PROBE_LEAST, time.perf_counter() + _PROBE_SECONDS
    while True:
        began = time.perf_counter()
        wire.push(block[:nbytes])
        wire.pull(ack)
        now = time.perf_counter()
        if now >= ends or nbytes == PROBE_MOST:
            return nbytes / (now - began)
        nbytes *= 2
