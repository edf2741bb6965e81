"""Bulk data between the ranks of one operation: an all-to-all over a gloo group of its own.

The group is private: it is not registered with ``torch.distributed``, nobody else ever sees it, and it lives as long
as the operation. A collective that one rank abandons would hold up the others, even at exit, until gloo's timeout. So
every round begins with one byte from everyone to everyone, "go on" or "I leave", and a rank that fails says the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import anyio
import torch
import torch.distributed as dist

from bcp.errors import PeerError
from bcp.pipeline import in_thread
from bcp.protocols import Buffer

__all__ = ["Bulk"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005  # seconds between two looks at a collective; doubles
_FAREWELL_SECONDS = 10.0  # how long a rank that fails waits for the others to notice
_GO_ON, _LEAVE = 0, 1


class Bulk:
    """One rank's end of the group."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        """Connect to all other ranks; blocks until they do the same.

        Args:
            store: for the ranks' addresses; its keys are all the group's own.
            rank: this rank.
            world_size: how many ranks take part.
            timeout: seconds that a collective may take.

        """
        self._world_size = world_size
        self._group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=timeout))

    async def all_to_all(self, send: Sequence[Buffer], receive: Sequence[int]) -> list[memoryview]:
        """Send ``send[r]`` to every rank r, and return ``receive[r]`` bytes from every rank r.

        Once begun, a round is seen through even when cancelled: its buffers are in use until it ends.

        Raises:
            PeerError: a rank has said that it leaves; nothing was sent.

        """
        with anyio.CancelScope(shield=True):
            leaving = await self._status(_GO_ON)
            if leaving is not None:
                raise PeerError(leaving, "it failed while data was exchanged")
            incoming = torch.empty(sum(receive), dtype=torch.uint8)
            outgoing = await in_thread(_joined, send)
            await self._run(incoming, outgoing, list(receive), [len(data) for data in send])
        view, at, parts = memoryview(incoming.numpy().data), 0, []
        for nbytes in receive:
            parts.append(view[at : at + nbytes])
            at += nbytes
        return parts

    async def farewell(self) -> None:
        """Tell the others that this rank fails; takes the place of its next round, and ends when all have noticed."""
        with anyio.move_on_after(_FAREWELL_SECONDS, shield=True):
            await self._status(_LEAVE)

    async def _status(self, mine: int) -> int | None:
        """Tell everyone how it stands here; return the first rank that leaves."""
        incoming = torch.empty(self._world_size, dtype=torch.uint8)
        ones = [1] * self._world_size
        await self._run(incoming, torch.full_like(incoming, mine), ones, ones)
        left = incoming.nonzero()
        return int(left[0]) if len(left) else None

    async def _run(self, incoming: torch.Tensor, outgoing: torch.Tensor, sizes: list[int], mine: list[int]) -> None:
        """Do one all-to-all without blocking the loop, or a thread."""
        group: Any = self._group  # its stub lacks the method
        work = group.alltoall_base(incoming, outgoing, sizes, mine)
        pause = _FIRST_PAUSE
        while not work.is_completed():
            await anyio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        work.wait()


def _joined(send: Sequence[Buffer]) -> torch.Tensor:
    """Return the buffers one behind the other: what gloo wants."""
    joined = bytearray().join(send)
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
