"""Whole tensors from the parts of all ranks: each rank owns some tensors, and gets their bytes from the others.

All ranks take part in rounds of an all-to-all. In a round each owner gets tensors of :data:`ROUND_BYTES` at most, or a
larger one alone. So no rank ever has the whole model, unless it is alone. The next round is under way while owners
look at the tensors of the last one.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import anyio
import numpy as np
import torch

from bcp.plan.box import Box
from bcp.plan.columns import Ints
from bcp.plan.layout import Layout, find_all
from bcp.plan.read.copies import copies
from bcp.plan.read.reads import ReadRequest, wants
from bcp.plan.shards import ShardRow, ShardTable
from bcp.protocols import Agreement
from bcp.publication.batches import batches
from bcp.publication.encoding import Bytes
from bcp.publication.shares import Share
from bcp.publication.sources import Entry, Order, Weights
from bcp.runtime.threads import in_thread_gc_paused
from bcp.stages.memcpy import move, torch_dtype
from bcp.tools.exports.chosen import Chosen

__all__ = ["ROUND_BYTES", "SharedWeights", "owners"]

ROUND_BYTES = 64 << 20
"""Bytes of tensors that an owner gets in a round."""


def owners(nbytes: Sequence[int], world_size: int) -> list[int]:
    """Return the owner of each tensor. Ranks own about equally many bytes, and all ranks find the same.

    Example:
        >>> from bcp.publication.exchange import owners
        >>> owners([8, 3, 4, 1], 2)
        [0, 1, 1, 1]

    """
    loads = [(0, rank) for rank in range(world_size)]
    found = [0] * len(nbytes)
    for index in sorted(range(len(nbytes)), key=lambda index: (-nbytes[index], index)):
        load, rank = heapq.heappop(loads)
        found[index] = rank
        heapq.heappush(loads, (load + nbytes[index], rank))
    return found


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tensors that one rank assembles in a round.

    Attributes:
        chosen: the tensors.
        table: their rows, each a whole tensor.
        request: the places of their bytes in the parts of the ranks.
        sender: int64[n], the rank that has each of these places.
        dtype: the dtype of each tensor in the parts.
        nbytes: int64[n], bytes of each place as they are sent.
    """

    chosen: Sequence[Chosen]
    table: ShardTable
    request: ReadRequest
    sender: Ints
    dtype: Sequence[str]
    nbytes: Ints

    @classmethod
    def of(cls, layout: Layout, chosen: Sequence[Chosen]) -> _Batch:
        """Find the bytes of some tensors."""
        rows = [each.stored for each in chosen]
        table = ShardTable.build([ShardRow(layout.tensors[row], Box.whole(layout.tensors[row].shape)) for row in rows])
        request = wants(layout, table, find_all(layout, table.tensors))
        old = table.tensors.itemsize[table.tensor[request.row]]
        new = np.array([each.itemsize for each in chosen], np.int64)[request.row]
        nbytes = (request.stop - request.start) // old * new
        dtype = [layout.tensors.dtype[row] for row in rows]
        return cls(chosen, table, request, layout.file_rank[request.file], dtype, nbytes)

    def counts(self, world_size: int) -> list[int]:
        """Return the bytes that each rank sends."""
        return [int(count) for count in np.bincount(self.sender, weights=self.nbytes, minlength=world_size)]

    def outgoing(self, share: Share, rank: int) -> Bytes:
        """Return the bytes that a rank sends, cast to the dtypes of the publication."""
        rows = np.flatnonzero(self.sender == rank)
        out, at = np.empty(int(self.nbytes[rows].sum()), np.uint8), 0
        for row in rows.tolist():
            start, stop, tensor = int(self.request.start[row]), int(self.request.stop[row]), self.request.row[row]
            old, new = self.dtype[tensor], self.chosen[tensor].dtype
            target = out[at : at + int(self.nbytes[row])]
            if old == new:
                share.read_into(start, target)
            else:
                data = np.empty(stop - start, np.uint8)
                share.read_into(start, data)
                target[:] = _cast(data, old, new)
            at += len(target)
        return out

    def assembled(self, layout: Layout, received: Sequence[Bytes]) -> list[Bytes]:
        """Return the bytes of the tensors, from those of all ranks."""
        request = self.request
        out = [np.empty(each.nbytes, np.uint8) for each in self.chosen]
        chunks = np.stack((request.file, request.start, request.stop), axis=1)
        found = copies(layout, self.table, request, chunks)
        runs = found.runs(np.arange(len(found)))
        chunk = np.repeat(found.chunk, found.numel // found.run)
        base = np.array([data.ctypes.data for data in received], np.int64)[self.sender]
        for rank in range(len(received)):  # the places of a rank follow each other in what it has sent
            mine = self.sender == rank
            base[mine] += np.cumsum(self.nbytes[mine]) - self.nbytes[mine]
        old = self.table.tensors.itemsize[self.table.tensor[runs.row]]
        new = np.array([each.itemsize for each in self.chosen], np.int64)[runs.row]
        target = np.array([data.ctypes.data for data in out], np.int64)[runs.row] + runs.to // old * new
        source = base[chunk] + (runs.start - request.start[chunk]) // old * new
        move(target, source, runs.nbytes // old * new)
        return out


def _cast(data: Bytes, old: str, new: str) -> Bytes:
    """Return elements in another dtype."""
    tensor = torch.from_numpy(data).view(torch_dtype(old)).to(torch_dtype(new))
    return np.asarray(tensor.view(torch.uint8).numpy())


class SharedWeights:
    """The tensors of a model whose parts all ranks have.

    Args:
        agreement: of the ranks.
        layout: the places of all elements in the parts.
        chosen: the tensors, sorted by name.
        share: the part of this rank.
        rank: this rank.
        world_size: how many ranks take part.

    """

    def __init__(
        self, agreement: Agreement, layout: Layout, chosen: Sequence[Chosen], share: Share, rank: int, world_size: int
    ) -> None:
        self._agreement, self._layout, self._share = agreement, layout, share
        self._rank, self._world_size = rank, world_size
        owner = owners([each.nbytes for each in chosen], world_size)
        self._of_rank: list[list[Chosen]] = [[] for _ in range(world_size)]
        for each, of in zip(chosen, owner, strict=True):
            self._of_rank[of].append(each)
        self._ready: dict[str, _Arrival] = {}

    @property
    def own(self) -> Weights:
        """The tensors that this rank owns, sorted by name. They can be read within :meth:`reading`, each once."""
        return [
            Entry(each.name, each.dtype, each.shape, each.itemsize, each.nbytes, partial(self._read, each.name))
            for each in self._of_rank[self._rank]
        ]

    @asynccontextmanager
    async def reading(self, order: Order) -> AsyncIterator[None]:
        """Let all ranks read their tensors once, in this order.

        Raises:
            PeerError: another rank has failed.

        """
        ordered = [list(batches(order(each), lambda one: one.nbytes, ROUND_BYTES)) for each in self._of_rank]
        self._ready = {each.name: _Arrival() for each in self._of_rank[self._rank]}
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._exchange, list(zip_longest(*ordered, fillvalue=[])))
                yield
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__

    async def _exchange(self, rounds: Sequence[Sequence[Sequence[Chosen]]]) -> None:
        last: Sequence[_Arrival] = ()
        for each in rounds:
            rank = self._rank
            made, send = await in_thread_gc_paused(self._prepared, each)
            own, mine, send[rank] = made[rank], send[rank], _NOTHING
            counts = own.counts(self._world_size)
            receive = [np.empty(0 if r == rank else nbytes, np.uint8) for r, nbytes in enumerate(counts)]
            await self._agreement.all_to_all([data.data for data in send], [data.data for data in receive])
            receive[rank] = mine
            whole = await in_thread_gc_paused(own.assembled, self._layout, receive)
            del send, receive, mine
            for arrival in last:
                await arrival.taken.wait()
            last = [self._ready[chosen.name] for chosen in own.chosen]
            for arrival, data in zip(last, whole, strict=True):
                arrival.data = data
                arrival.came.set()
            del whole

    def _prepared(self, tensors: Sequence[Sequence[Chosen]]) -> tuple[list[_Batch], list[Bytes]]:
        """Return the batches of a round, by owner, and what this rank sends to each of them."""
        made = [_Batch.of(self._layout, each) for each in tensors]
        return made, [batch.outgoing(self._share, self._rank) for batch in made]

    async def _read(self, name: str) -> Bytes:
        arrival = self._ready[name]
        await arrival.came.wait()
        data = arrival.data
        arrival.data = _NOTHING
        arrival.taken.set()
        return data


_NOTHING = np.empty(0, np.uint8)


class _Arrival:
    """A tensor that comes in a round."""

    def __init__(self) -> None:
        self.data: Bytes = _NOTHING
        self.came, self.taken = anyio.Event(), anyio.Event()
