"""The stages of a save (paper sec. 4.2).

``d2h`` -> ``serialize`` -> [one stage a codec, and ``place``] -> ``upload`` -> ``checksum``

Checksums come last: only the end of the save needs them, and the save waits for storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import anyio
import numpy as np
import torch

from bcp.errors import BcpError
from bcp.format.checksums import digests
from bcp.pipeline import Pipeline, Stage
from bcp.protocols import Codec, CpuAwareWriter, PartWriter, flat_view
from bcp.runtime.device import Fence
from bcp.runtime.staging import Lease
from bcp.runtime.threads import in_thread, in_thread_of_few
from bcp.stages.gather import gather
from bcp.stages.items import Blob, HostPart, PartReceipt, WriteItem
from bcp.stages.memcpy import bytes_of

__all__ = [
    "PartMemory",
    "SaveContext",
    "Staging",
    "Writers",
    "blocks_of",
    "d2h",
    "digests_of",
    "save_graph",
    "serialize",
    "snapshot_graph",
    "upload",
]


class Writers:
    """The data files, which are opened while the first parts are being copied."""

    def __init__(self) -> None:
        self._opened: Mapping[str, PartWriter] = {}
        self._ready = anyio.Event()

    def opened(self, writers: Mapping[str, PartWriter]) -> None:
        """Take the files, by key, and let those go on who wait for them."""
        self._opened = writers
        self._ready.set()

    async def of(self, key: str) -> PartWriter:
        """Return where the parts of a file go; wait until it is open."""
        await self._ready.wait()
        return self._opened[key]


class PartMemory(Protocol):
    """Host memory for parts."""

    def take(self, item: WriteItem) -> torch.Tensor:
        """Return uint8[m] with m >= the bytes of the part. Blocks, so it is called in a thread."""

    def give(self, buffer: torch.Tensor) -> None:
        """Take memory back whose part is stored."""


@dataclass(frozen=True, slots=True)
class Staging:
    """Memory of a pool, which the next part gets when one is stored."""

    lease: Lease

    def take(self, item: WriteItem) -> torch.Tensor:
        """Borrow memory for a part."""
        return self.lease.take(item.nbytes)

    def give(self, buffer: torch.Tensor) -> None:
        """Give it back."""
        self.lease.give(buffer)


@dataclass(slots=True)
class SaveContext:
    """The context that the stages of one save share.

    Attributes:
        memory: where parts are copied to.
        writers: where the parts of each data file go.
        block_bytes: unit of checksumming.
        fence: an event of each device, which copies from it have to wait for.
        count: how many parts there are whose tensors training changes.
        on_copied: awaited once, when the last of them is in host memory; may raise to refuse the snapshot.
        copies_first: training waits for the copies, and there is memory for all of them: let nothing compete with them
            for the cores.
        copied: how many of them are in host memory.
        snapshot: set when all of them are.
    """

    memory: PartMemory
    writers: Writers
    block_bytes: int
    fence: Fence
    count: int
    on_copied: Callable[[], Awaitable[None]]
    copies_first: bool = False
    copied: int = 0
    snapshot: anyio.Event = field(default_factory=anyio.Event)

    async def let_copies_go_first(self) -> None:
        """Wait, where something that takes a core would hold up the copies."""
        if self.copies_first and self.copied:  # 0: the caller has put another stage in the place of d2h
            await self.snapshot.wait()


def save_graph(
    context: SaveContext, codecs: Sequence[Codec], *, copy_workers: int, io_workers: int
) -> Pipeline[WriteItem, PartReceipt]:
    """Build the graph that stores one rank's parts."""
    start: Pipeline[WriteItem, WriteItem] = Pipeline()
    graph: Pipeline[WriteItem, Blob] = start.then(d2h(context, copy_workers)).then(serialize(context.block_bytes))
    for codec in codecs:
        graph = graph.then(encode(codec, context))
    if codecs:
        graph = graph.then(place())
    return graph.then(upload(context, io_workers)).then(checksum(context))


def snapshot_graph(context: SaveContext, *, copy_workers: int) -> Pipeline[WriteItem, Blob]:
    """Build the graph of a rank whose parts stay in memory: agents send them to storage."""
    start: Pipeline[WriteItem, WriteItem] = Pipeline()
    return start.then(d2h(context, copy_workers)).then(serialize(context.block_bytes))


def d2h(context: SaveContext, workers: int) -> Stage[WriteItem, HostPart]:
    """Copy a part's elements into staging memory; after the last one training may go on."""

    async def run(item: WriteItem) -> HostPart:
        part = await in_thread_of_few(workers, _copy, item, context)
        context.copied += not item.is_steady
        if context.copied == context.count and not item.is_steady:
            await context.on_copied()
            context.snapshot.set()
        return part

    return Stage("d2h", run, workers=workers)


def _copy(item: WriteItem, context: SaveContext) -> HostPart:
    """Take memory for a part, and fill it."""
    buffer = context.memory.take(item)
    gather(item, buffer, context.fence)
    return HostPart(item, buffer)


def serialize(block_bytes: int) -> Stage[HostPart, Blob]:
    """Put the header in front of a file's first part, and name the blocks."""

    async def run(part: HostPart) -> Blob:
        header = part.item.header
        data = bytes_of(part.buffer)[: part.nbytes]
        data[: len(header)] = header
        return Blob(part, data, part.item.part.start, blocks_of(part.item, block_bytes))

    return Stage("serialize", run)


def blocks_of(item: WriteItem, block_bytes: int) -> np.ndarray:
    """Cut a part into blocks of its data; the first one also covers the header. int64[n, 2]: start and length."""
    cuts = range(len(item.header) + block_bytes, item.nbytes, block_bytes)
    edges = np.array(sorted({0, *cuts, *item.edges, item.nbytes}), np.int64)
    return np.stack([edges[:-1], np.diff(edges)], axis=1)


def encode(codec: Codec, context: SaveContext) -> Stage[Blob, Blob]:
    """Make the save half of a codec; an encoded part is one block."""

    async def run(blob: Blob) -> Blob:
        await context.let_copies_go_first()
        data = flat_view(await in_thread(codec.encode, blob.data))
        return replace(blob, data=data, start=-1, blocks=np.array([[0, len(data)]], np.int64))

    return Stage(codec.name, run, workers=codec.workers)


def place() -> Stage[Blob, Blob]:
    """Put encoded parts one behind the other, in plan order: only now their lengths are known."""
    ends: defaultdict[str, int] = defaultdict(int)

    async def run(blob: Blob) -> Blob:
        key = blob.part.item.key
        start = ends[key]
        ends[key] += blob.nbytes
        return replace(blob, start=start)

    return Stage("place", run, ordered=True)


def upload(context: SaveContext, workers: int) -> Stage[Blob, Blob]:
    """Store a part; beside the copies, where that does not slow them down."""

    async def run(blob: Blob) -> Blob:
        part, planned = blob.part.item.part, blob.planned_nbytes
        if blob.nbytes != planned:
            raise BcpError(
                f"{part.name} has {blob.nbytes} bytes where {planned} were planned: a custom stage changed its "
                "length; use SaveOptions(codecs=[bcp.extend.Codec(...)]) for stages that do"
            )
        writer = await context.writers.of(blob.part.item.key)
        if not isinstance(writer, CpuAwareWriter) or writer.uses_cpu:
            await context.let_copies_go_first()
        await writer.write_part(part.index if blob.index < 0 else blob.index, blob.start, blob.data)
        return blob

    return Stage("upload", run, workers=workers)


def checksum(context: SaveContext) -> Stage[Blob, PartReceipt]:
    """Digest every stored block, and give the staging memory back.

    One part at a time: that is 7 GB/s. On a machine of two cores, the worst step of a training loop took 2.6 times a
    usual one meanwhile. With two parts it took 3.9 times, and the save was no faster.
    """

    async def run(blob: Blob) -> PartReceipt:
        await context.let_copies_go_first()
        checksums = await in_thread(digests_of, blob)
        context.memory.give(blob.part.buffer)
        return PartReceipt(blob.part.item.part, blob.start, blob.nbytes, blob.blocks, checksums)

    return Stage("checksum", run)


def digests_of(blob: Blob) -> tuple[bytes, ...]:
    """Return the checksum of each block of a part."""
    return tuple(digests([memoryview(blob.data)], blob.blocks[:, 1].tolist()))
