"""Loads without a checkpoint: layouts made by hand, files in memory, ranks that are tasks of one event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import anyio
import numpy as np
import torch
import xxhash
from saved import Memory, Saved

from bcp.errors import CorruptError
from bcp.format.receipt import Blocks, FileReceipt
from bcp.options import Graph
from bcp.pipeline import Budget
from bcp.plan.read import plan_load
from bcp.plan.read.copies import Assignment, check_complete, copies, zero_copy_reads
from bcp.plan.read.share import BlockIndex
from bcp.plan.shards import ShardTable
from bcp.protocols import Buffer, Codec
from bcp.runtime.device import Lanes
from bcp.runtime.staging import Lease, StagingPool
from bcp.stages.items import ReadItem
from bcp.stages.load import LoadContext, load_graph
from bcp.stages.memcpy import addresses, bytes_of, torch_dtype, writable
from bcp.stages.place import LoadBuffers

HEADER = bytes(range(40))


class Files:
    """The data files of a checkpoint, and what was read of them."""

    def __init__(self, saved: Saved, codec: Codec | None = None) -> None:
        self.objects: dict[str, bytearray] = {}
        self.receipts: list[FileReceipt] = []
        self.scattered: list[list[int]] = []
        self.reads: list[tuple[str, int, int]] = []
        for number, data in enumerate(saved.files):
            raw = HEADER + data.tobytes()
            ends = [0, *range(len(HEADER) + saved.layout.block_bytes, len(raw), saved.layout.block_bytes), len(raw)]
            blocks = [raw[a:b] for a, b in pairwise(ends)]
            stored = [bytes(codec.encode(block)) if codec else block for block in blocks]
            digests = [xxhash.xxh3_128_digest(block) for block in stored]
            table = Blocks.build([len(block) for block in stored], [len(block) for block in blocks], digests)
            kind, codecs = int(saved.layout.file_kind[number]), (codec.name,) if codec else ()
            whole = b"".join(stored)
            self.objects[f"file {number}"] = bytearray(whole)
            self.receipts.append(FileReceipt(kind, len(HEADER), len(raw), len(whole), codecs, table))

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        await anyio.lowlevel.checkpoint()
        self.reads.append((key, start, len(out)))
        data = self.objects[key][start : start + len(out)]
        if len(data) < len(out):
            raise CorruptError(f"{key} is too short")
        out[:] = data

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        self.scattered.append([len(out) for out in outs])
        whole = bytearray(sum(map(len, outs)))
        await self.read_into(key, start, memoryview(whole))
        at = 0
        for out in outs:
            out[:] = whole[at : at + len(out)]
            at += len(out)


class Room:
    """Where ranks exchange bytes; ``before`` is awaited with the number of each round."""

    def __init__(self, size: int, before: Callable[[int, int], Any] | None = None) -> None:
        self.size, self.before = size, before
        self.calls = [0] * size
        self.sent: dict[int, dict[int, list[bytes]]] = {}
        self.full: dict[int, anyio.Event] = {}

    async def all_to_all(self, rank: int, outgoing: Sequence[Buffer], incoming: Sequence[Buffer]) -> None:
        number = self.calls[rank]
        self.calls[rank] += 1
        if self.before is not None:
            await self.before(rank, number)
        said = self.sent.setdefault(number, {})
        said[rank] = [bytes(data) for data in outgoing]
        full = self.full.setdefault(number, anyio.Event())
        if len(said) == self.size:
            full.set()
        await full.wait()
        for peer, out in enumerate(incoming):
            memoryview(out)[:] = said[peer][rank]  # raises where the lengths differ


class Ledger(Lease):
    """A lease that writes down what is borrowed and given back, and how many bytes were out at most."""

    def __init__(self) -> None:
        super().__init__(StagingPool())
        self.taken: list[int] = []
        self.given = 0
        self.most = 0

    def take(self, nbytes: int) -> torch.Tensor:
        buffer = super().take(nbytes)
        self.taken.append(nbytes)
        self.most = max(self.most, sum(each.numel() for each in self.out.values()))
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        self.given += 1
        super().give(buffer)


@dataclass
class Rank:
    """One rank of a load: what it wants, and where it wants it."""

    saved: Saved
    table: ShardTable
    tensors: Sequence[torch.Tensor]
    lanes: Any = field(default_factory=lambda: Lanes([]))
    lease: Ledger = field(default_factory=Ledger)
    plain: bool = True
    context: LoadContext | None = None

    def __post_init__(self) -> None:
        self.memory = Memory(self.saved, self.table)

    @property
    def dtypes(self) -> list[str]:
        return [self.saved.layout.tensors.dtype[self.memory.tensor(row)] for row in range(len(self.table))]

    def targets(self, assignment: Assignment, able: Any) -> LoadBuffers:
        layout, table = self.saved.layout, self.table
        found = copies(layout, table, self.memory.wants, assignment.chunks)
        check_complete(found, table, self.memory.wants)
        sizes = np.array([tensor.element_size() for tensor in self.tensors], dtype=np.int64)
        same = [tensor.dtype is torch_dtype(name) for tensor, name in zip(self.tensors, self.dtypes, strict=True)]
        known = addresses(self.tensors, table) * self.plain
        address = writable(self.tensors, known, (table.stop - table.start) * sizes, np.array(same, np.bool_))
        way = zero_copy_reads(found, able, address > 0)
        return LoadBuffers(self.tensors, sizes, self.dtypes, address, found, way, self.lanes)

    def expected(self, row: int) -> torch.Tensor:
        values = self.memory.expected(row, self.saved.arrays[self.memory.tensor(row)])
        return torch.tensor(values.tolist(), dtype=self.tensors[row].dtype)

    def check(self) -> None:
        for row, tensor in enumerate(self.tensors):
            assert tensor.tolist() == self.expected(row).tolist(), row


def plan(
    saved: Saved, ranks: Sequence[Rank], *, shared: bool, read_bytes: int, exchange_bytes: int
) -> list[Assignment]:
    """Say what every rank reads."""
    ranges = [rank.memory.wants.ranges() for rank in ranks]
    limits = {"read_bytes": read_bytes, "exchange_bytes": exchange_bytes}
    return plan_load(BlockIndex.of(saved.layout), ranges, **limits, shared=shared)


async def load(
    files: Files,
    ranks: Sequence[Rank],
    *,
    go_straight: bool = True,
    shared: bool = True,
    read_bytes: int = 64,
    exchange_bytes: int = 128,
    budget: int = 1 << 20,
    room: Room | None = None,
    codecs: Mapping[str, Codec] | None = None,
    edit: Callable[[Graph], Graph] = lambda graph: graph,
) -> None:
    """Load on all ranks."""
    place = room or Room(len(ranks))
    plans = plan(ranks[0].saved, ranks, shared=shared, read_bytes=read_bytes, exchange_bytes=exchange_bytes)
    async with anyio.create_task_group() as group:
        for number, (rank, mine) in enumerate(zip(ranks, plans, strict=True)):
            able = np.arange(len(mine.chunks)) < (len(mine.private) if go_straight and not codecs else 0)
            targets = rank.targets(mine, able)
            rank.context = LoadContext(
                rank=number,
                world_size=len(ranks),
                backend=files,  # type: ignore[arg-type]  # as much of one as is asked for
                scatter=files,
                lease=rank.lease,
                targets=targets,
                assignment=mine,
                codecs=codecs or {},
                verify=True,
                all_to_all=_own(place, number),
            )
            graph = edit(load_graph(rank.context, copy_workers=2, io_workers=2))
            group.start_soon(_run, graph, _items(files, mine, targets.straight.chunks), budget)


def _own(room: Room, rank: int) -> Any:
    async def all_to_all(outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        await room.all_to_all(rank, [*map(bytes_of, outgoing)], [*map(bytes_of, incoming)])

    return all_to_all


def _items(files: Files, mine: Assignment, way: Any) -> list[ReadItem]:
    return [
        ReadItem(f"round {chunk.round}", 0, None, chunk.round, "", None)
        if chunk.file < 0
        else ReadItem(
            f"file {chunk.file} from {chunk.start}",
            chunk.nbytes,
            chunk,
            chunk.round,
            f"file {chunk.file}",
            files.receipts[chunk.file],
            bool(way[chunk.number]),
        )
        for chunk in mine.items()
    ]


async def _run(graph: Graph, items: list[ReadItem], budget: int) -> None:
    await graph.run(items, budget=Budget(budget))
