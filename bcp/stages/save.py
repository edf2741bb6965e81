"""The stages of a save (paper sec. 4.2).

``d2h`` -> ``serialize`` -> [one stage a codec] -> ``checksum`` -> [``place``, with codecs] -> ``upload``
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from bcp.errors import BcpError
from bcp.pipeline import Pipeline, Stage, in_thread
from bcp.protocols import Buffer, Codec, PartWriter
from bcp.stages.device import Fence, cuda_devices, on_side_stream
from bcp.stages.flat import bytes_of, flat_to_bytes
from bcp.stages.items import Blob, HostPart, PartReceipt, WriteItem
from bcp.stages.staging import Lease

__all__ = ["SaveContext", "save_graph"]


@dataclass(frozen=True, slots=True)
class SaveContext:
    """What the stages of one save share.

    Attributes:
        lease: staging memory.
        writers: for each data file, where its parts go; filled once the graph is known to be one.
        block_bytes: unit of checksumming.
        fence: what the copies from devices have to wait for.
        count: how many parts there are.
        on_snapshot: called once, when the last part is in host memory; may raise to refuse the snapshot.
    """

    lease: Lease
    writers: dict[str, PartWriter]
    block_bytes: int
    fence: Fence
    count: int
    on_snapshot: Callable[[], None]


def save_graph(
    context: SaveContext, codecs: Sequence[Codec], *, copy_workers: int, io_workers: int
) -> Pipeline[WriteItem, PartReceipt]:
    """Build the graph that stores one rank's parts."""
    start: Pipeline[WriteItem, WriteItem] = Pipeline()
    graph: Pipeline[WriteItem, Blob] = start.then(d2h(context, copy_workers)).then(serialize(context.block_bytes))
    for codec in codecs:
        graph = graph.then(encode(codec))
    graph = graph.then(Stage("checksum", checksum, workers=copy_workers))
    if codecs:
        graph = graph.then(place())
    return graph.then(upload(context, io_workers))


def d2h(context: SaveContext, workers: int) -> Stage[WriteItem, HostPart]:
    """Copy a part's elements into staging memory; after the last one training may go on."""
    left = context.count

    async def run(item: WriteItem) -> HostPart:
        nonlocal left
        buffer = context.lease.take(item.nbytes)
        part = HostPart(item, buffer)
        await in_thread(_copy, part, context.fence)
        left -= 1
        if left == 0:
            context.on_snapshot()
        return part

    return Stage("d2h", run, workers=workers)


def _copy(part: HostPart, fence: Fence) -> None:
    """Copy every span of a part to its place in the buffer."""
    item = part.item
    spans = item.part.spans
    with on_side_stream(cuda_devices([item.tensors[span.row] for span in spans]), fence):
        for span in spans:
            tensor = item.tensors[span.row].detach()
            first = int(item.table.start[span.row])
            nbytes = (span.stop - span.start) * tensor.element_size()
            out = part.buffer[span.at : span.at + nbytes]
            flat_to_bytes(tensor, span.start - first, span.stop - first, out)


def serialize(block_bytes: int) -> Stage[HostPart, Blob]:
    """Put the header in front of a file's first part, and name the blocks."""

    async def run(part: HostPart) -> Blob:
        header = part.item.header
        data = bytes_of(part.buffer)[: part.nbytes]
        data[: len(header)] = header
        return Blob(part, data, part.item.part.start, _blocks(len(header), part.nbytes, block_bytes))

    return Stage("serialize", run)


def _blocks(header: int, nbytes: int, block_bytes: int) -> np.ndarray:
    """Cut a part into blocks of its data; the first one also covers the header."""
    cuts = np.arange(header + block_bytes, nbytes, block_bytes, dtype=np.int64)
    edges = np.concatenate(([0], cuts, [nbytes]))
    return np.stack([edges[:-1], np.diff(edges)], axis=1)


def encode(codec: Codec) -> Stage[Blob, Blob]:
    """Make the save half of a codec; an encoded part is one block."""

    async def run(blob: Blob) -> Blob:
        data: Buffer = await in_thread(codec.encode, blob.data)
        return replace(blob, data=data, start=-1, blocks=np.array([[0, len(data)]], np.int64))

    return Stage(codec.name, run, workers=codec.workers)


async def checksum(blob: Blob) -> Blob:
    """Digest every block of what will be stored."""
    return replace(blob, checksums=await in_thread(_digests, blob))


def _digests(blob: Blob) -> tuple[bytes, ...]:
    view = memoryview(blob.data)
    return tuple(xxhash.xxh3_128_digest(view[start : start + length]) for start, length in blob.blocks.tolist())


def place() -> Stage[Blob, Blob]:
    """Put encoded parts one behind the other, in plan order: only now their lengths are known."""
    ends: defaultdict[str, int] = defaultdict(int)

    async def run(blob: Blob) -> Blob:
        key = blob.part.item.key
        start = ends[key]
        ends[key] += blob.nbytes
        return replace(blob, start=start)

    return Stage("place", run, ordered=True)


def upload(context: SaveContext, workers: int) -> Stage[Blob, PartReceipt]:
    """Store a part, and give its staging memory back."""

    async def run(blob: Blob) -> PartReceipt:
        part = blob.part.item.part
        planned = int(blob.blocks[-1].sum())
        if blob.nbytes != planned:
            raise BcpError(
                f"{part.name} has {blob.nbytes} bytes where {planned} were checksummed: a custom stage changed its "
                "length; use SaveOptions(codecs=[bcp.Codec(...)]) for stages that do"
            )
        await context.writers[blob.part.item.key].write_part(part.index, blob.start, blob.data)
        context.lease.give(blob.part.buffer)
        return PartReceipt(part, blob.start, blob.nbytes, blob.blocks, blob.checksums)

    return Stage("upload", run, workers=workers)
