"""Ranks agree on who reads what. Here they are tasks, and what they tell each other can be damaged on the way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import anyio
import numpy as np
import pytest
import torch
from msgspec import structs
from saved import SavedBox, meta, save

import bcp
from bcp import backends
from bcp._agree import collective_operation
from bcp._load.reads import plan_reads
from bcp._load.targets import LoadRequest
from bcp._messages.planning import LoadAnswer
from bcp.backends import MemoryBackend
from bcp.coordinators import memory_coordinators
from bcp.errors import BcpError, FqnMismatchError, MessageError, PeerError, ShapeMismatchError
from bcp.format.metadata import Commit, Metadata
from bcp.options import LoadOptions
from bcp.plan.box import Box
from bcp.plan.layout import find_all
from bcp.plan.read.reads import wants
from bcp.plan.read.renamed import renamed
from bcp.plan.shards import ShardRow, ShardTable
from bcp.read.source import Source
from bcp.testing.storage_fakes import CountingBackend

BLOCK = 1 << 20
WIDE = meta("a", (8, BLOCK), "uint8")
PAIR = [meta("b.x", (BLOCK // 4,)), meta("b.y", (BLOCK // 4,))]
EXTRA = meta("c", (4,))
SAVED = save(
    [WIDE, *PAIR, EXTRA],
    [
        SavedBox(WIDE, Box.whole(WIDE.shape), [(8 * BLOCK, 0)]),
        SavedBox(PAIR[0], Box.whole(PAIR[0].shape), [(BLOCK // 4, 1)]),
        SavedBox(EXTRA, Box.whole(EXTRA.shape), [(4, 1)]),
    ],
    2,
    BLOCK,
    leaders=[0, 1, 1, 3],
)
COMMIT = Commit(
    operation="0" * 16, created="", framework="", codecs=(), part_bytes=BLOCK, version="", receipts=bytes(32)
)
METADATA = Metadata(SAVED.layout, COMMIT)
Message = Callable[[bytes], bytes]


def same(data: bytes) -> bytes:
    return data


class Room:
    """Where so many ranks meet: rank 0 answers once all have said something."""

    def __init__(self, size: int, asked: Message, answered: Message) -> None:
        self.said: dict[int, bytes] = {}
        self.size, self.asked, self.answered = size, asked, answered
        self.full, self.done = anyio.Event(), anyio.Event()
        self.answer = b""

    async def gather_broadcast(
        self, rank: int, mine: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]
    ) -> bytes:
        self.said[rank] = mine if rank == 0 else mine[:1] + self.asked(mine[1:])
        if len(self.said) == self.size:
            self.full.set()
        await self.full.wait()
        if rank == 0:
            self.answer = await decide([self.said[each] for each in range(self.size)])
            self.done.set()
        await self.done.wait()
        return self.answer if rank == 0 else self.answer[:1] + self.answered(self.answer[1:])


class Seat:
    """One rank's agreement, and the operation around it."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank = room, rank

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def gather_broadcast(
        self, _: str, mine: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]
    ) -> bytes:
        return await self.room.gather_broadcast(self.rank, mine, decide)


def wanted(*tensors: Any) -> LoadRequest:
    """Want whole tensors."""
    table = ShardTable.build([ShardRow(tensor, Box.whole(tensor.shape)) for tensor in tensors])
    found = find_all(SAVED.layout, table.tensors)
    targets = SimpleNamespace(shards=SimpleNamespace(table=table))
    names = renamed(SAVED.layout, None, ["model"])
    return LoadRequest(targets, found, found, (0,), (), wants(SAVED.layout, table), names)  # type: ignore[arg-type]  # a part of it


async def planned(
    asks: Sequence[LoadRequest | BcpError], *, asked: Message = same, answered: Message = same, **options: Any
) -> list[Any]:
    """Let all ranks plan; return what each got, or its error."""
    room = Room(len(asks), asked, answered)
    found: list[Any] = [None] * len(asks)

    async def run(rank: int) -> None:
        try:
            async with collective_operation(Seat(room, rank)) as agreement:  # type: ignore[arg-type]  # one verb is enough
                source = Source(MemoryBackend("none"), "", METADATA, LoadOptions(**options), rank)
                _, found[rank] = await plan_reads(agreement, source, asks[rank], world_size=len(asks))
        except BcpError as error:
            found[rank] = error

    async with anyio.create_task_group() as group:
        for rank in range(len(asks)):
            group.start_soon(run, rank)
    return found


@pytest.mark.anyio
async def test_ranks_share_what_they_both_want() -> None:
    found = await planned([wanted(WIDE, *PAIR, EXTRA), wanted(WIDE)])
    nbytes = [sum(item.nbytes for item in each.assignment.items()) for each in found]
    assert sum(nbytes) == sum(SAVED.layout.file_nbytes)
    assert max(nbytes) - min(nbytes) <= BLOCK
    assert found[0].assignment.rounds == found[1].assignment.rounds > 0
    assert [each.unexpected for each in found] == [(), ()]


@pytest.mark.anyio
async def test_without_overlap_every_rank_reads_what_it_wants() -> None:
    found = await planned([wanted(WIDE, *PAIR, EXTRA), wanted(WIDE)], overlap_loading=False)
    assert [each.assignment.rounds for each in found] == [0, 0]
    assert sum(item.nbytes for item in found[1].assignment.items()) == 8 * BLOCK


@pytest.mark.anyio
async def test_names_that_nobody_wants_are_told_to_all_ranks() -> None:
    asks = [wanted(WIDE), wanted(PAIR[0])]
    for error in await planned(asks):
        assert isinstance(error, FqnMismatchError)
        assert "2 names that no rank wants: model: b.y; model: c" in str(error)
    found = await planned(asks, strict=False)
    assert [each.unexpected for each in found] == [("model: b.y", "model: c")] * 2


@pytest.mark.anyio
async def test_what_one_rank_cannot_load_no_rank_loads() -> None:
    found = await planned([wanted(WIDE), ShapeMismatchError("mine")], strict=False)
    assert isinstance(found[0], PeerError)
    assert "mine" in str(found[0])
    assert isinstance(found[1], ShapeMismatchError)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:7],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\xff" * 8 + data[8:],
    ],
)
async def test_damaged_messages_are_refused(damage: Message) -> None:
    asks = [wanted(WIDE, *PAIR, EXTRA)] * 2
    assert [type(error) for error in await planned(asks, asked=damage)] == [MessageError] * 2
    first, second = await planned([wanted(WIDE, *PAIR)] * 2, answered=damage, strict=False)
    assert not isinstance(first, BcpError)
    assert isinstance(second, MessageError)


@pytest.mark.anyio
async def test_an_answer_for_another_number_of_ranks_is_refused() -> None:
    def for_more(data: bytes) -> bytes:
        return structs.replace(LoadAnswer.decode(data), world_size=1 << 62).encode()

    _, second = await planned([wanted(WIDE)] * 2, answered=for_more, strict=False)
    assert isinstance(second, MessageError)
    assert f"it is for {1 << 62} ranks, the job has 2" in str(second)


@pytest.mark.anyio
async def test_replicas_read_every_block_once_between_them(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {f"w{n}": torch.rand(1 << 20, generator=generator) for n in range(6)}
    await bcp.asave(tmp_path, {"model": state})
    targets = [{name: torch.zeros(1 << 20) for name in state} for _ in range(4)]
    reports: list[bcp.LoadResult] = []

    async def load(rank: int) -> None:
        backend = CountingBackend(backends.resolve(tmp_path))
        reports.append(await bcp.aload(backend, {"model": targets[rank]}, coordinator=ranks[rank]))

    ranks = memory_coordinators(4)
    async with anyio.create_task_group() as group:
        for rank in range(4):
            group.start_soon(load, rank)
    assert all(torch.equal(target[name], state[name]) for target in targets for name in state)
    read = [report.read_nbytes for report in reports]
    assert 24 << 20 <= sum(read) <= (24 << 20) + 8192  # the header of the one file, too
    assert max(read) <= sum(read) / 4 + BLOCK
    assert np.sum([report.received_nbytes for report in reports]) == 3 * (24 << 20)
