"""The stages of a load: ``read`` -> ``deserialize`` -> ``h2d`` -> ``exchange`` (paper sec. 4.2, Fig. 10)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from bcp.errors import CorruptError, MissingCodecError
from bcp.pipeline import Pipeline, Stage, in_thread
from bcp.plan.layout import Layout
from bcp.plan.load.assign import Assignment
from bcp.plan.load.reads import Wants, placements
from bcp.plan.shards import ShardTable
from bcp.protocols import Backend, Buffer, Codec
from bcp.receipt import FileReceipt
from bcp.stages.device import cuda_devices, on_side_stream
from bcp.stages.flat import block_of, bytes_of, torch_dtype, typed
from bcp.stages.items import Loaded, ReadItem, Stored
from bcp.stages.staging import Lease

__all__ = ["LoadContext", "load_graph"]

AllToAll = Callable[[Sequence[Buffer], Sequence[int]], Awaitable[Sequence[Buffer]]]


@dataclass(slots=True)
class LoadContext:
    """What the stages of one load share.

    Attributes:
        rank: this rank.
        world_size: how many ranks load together.
        backend: where the data files are.
        lease: staging memory.
        layout: where everything lies.
        table: the shards that this rank wants.
        tensors: their live memory.
        dtypes: for each of them, the dtype that was saved.
        wants: where their bytes are.
        assignment: what this rank reads, sends and receives.
        codecs: the ones that the caller passed, by name.
        verify: whether to check the blocks.
        all_to_all: bytes to every rank for bytes from every rank.
        touched: whether any tensor may have been written to; set before the first copy.
        placed_nbytes: bytes that are in their tensors by now.
        read_nbytes: bytes read from storage by now.
        received_nbytes: bytes received from other ranks by now.
    """

    rank: int
    world_size: int
    backend: Backend
    lease: Lease
    layout: Layout
    table: ShardTable
    tensors: Sequence[torch.Tensor]
    dtypes: Sequence[str]
    wants: Wants
    assignment: Assignment
    codecs: Mapping[str, Codec]
    verify: bool
    all_to_all: AllToAll
    touched: bool = field(default=False)
    placed_nbytes: int = field(default=0)
    read_nbytes: int = field(default=0)
    received_nbytes: int = field(default=0)


def load_graph(context: LoadContext, *, copy_workers: int, io_workers: int) -> Pipeline[ReadItem, None]:
    """Build the graph that fills one rank's tensors."""
    start: Pipeline[ReadItem, ReadItem] = Pipeline()
    loaded = start.then(read(context, io_workers)).then(deserialize(context, copy_workers))
    return loaded.then(h2d(context, copy_workers)).then(exchange(context))


def read(context: LoadContext, workers: int) -> Stage[ReadItem, Stored]:
    """Fetch the stored bytes of a chunk; whole blocks, so that they can be checked."""

    async def run(item: ReadItem) -> Stored:
        if item.chunk is None or item.file is None:
            return Stored(item, None, 0, slice(0, 0))
        file, chunk = item.file, item.chunk
        first = 0 if chunk.start == 0 else file.data_start + chunk.start
        rows = file.covering(first, file.data_start + chunk.stop)
        start = int(file.blocks.stored_start[rows][0])
        nbytes = int(file.blocks.stored_length[rows].sum())
        buffer = context.lease.take(nbytes)
        try:
            await context.backend.read_into(item.key, start, bytes_of(buffer)[:nbytes])
        except FileNotFoundError as error:
            raise CorruptError(
                f"{item.key} is missing, but the checkpoint was committed with it (rank {context.rank}, {item.name}); "
                "restore the file, or load another checkpoint"
            ) from error
        context.read_nbytes += nbytes
        return Stored(item, buffer, nbytes, rows)

    return Stage("read", run, workers=workers)


def deserialize(context: LoadContext, workers: int) -> Stage[Stored, Loaded]:
    """Check every block, undo the codecs, drop the header."""

    async def run(stored: Stored) -> Loaded:
        return await in_thread(_deserialize, context, stored)

    return Stage("deserialize", run, workers=workers)


def _deserialize(context: LoadContext, stored: Stored) -> Loaded:
    item = stored.item
    if item.file is None or item.chunk is None or stored.buffer is None:
        return Loaded(item, torch.empty(0, dtype=torch.uint8), None)
    if context.verify:
        _verify(stored, item.file, bytes_of(stored.buffer), context.rank)
    file, chunk, rows = item.file, item.chunk, stored.blocks
    raw_start = int(file.blocks.raw_start[rows][0])
    image = stored.buffer[: stored.nbytes]
    if file.codecs:
        image = _decode(context, stored, file, bytes_of(stored.buffer))
    skip = file.data_start + chunk.start - raw_start
    return Loaded(item, image[skip : skip + chunk.stop - chunk.start], stored.buffer)


def _verify(stored: Stored, file: FileReceipt, view: memoryview, rank: int) -> None:
    """Compare the digest of every block with the one that was written down when it was saved."""
    item, blocks, at = stored.item, file.blocks, 0
    for row in range(stored.blocks.start, stored.blocks.stop):
        length = int(blocks.stored_length[row])
        found = xxhash.xxh3_128_digest(view[at : at + length])
        wanted = blocks.checksum[row]
        if found != wanted:
            start = int(blocks.stored_start[row])
            raise CorruptError(
                f"{item.key} is corrupt: bytes {start} to {start + length} have checksum {found.hex()}, "
                f"saved as {wanted.hex()} (rank {rank}, {item.name}); restore the file, or load another checkpoint"
            )
        at += length


def _decode(context: LoadContext, stored: Stored, file: FileReceipt, view: memoryview) -> torch.Tensor:
    """Undo the codecs of every part, last one first."""
    blocks, at = file.blocks, 0
    pieces: list[np.ndarray] = []
    for row in range(stored.blocks.start, stored.blocks.stop):
        length, wanted = int(blocks.stored_length[row]), int(blocks.raw_length[row])
        data: Buffer = view[at : at + length]
        for name in reversed(file.codecs):
            data = context.codecs[name].decode(data)
        if len(data) != wanted:
            raise CorruptError(
                f"{stored.item.key}: codecs {list(file.codecs)} decoded part {row} to {len(data)} bytes, {wanted} were "
                f"encoded (rank {context.rank}); decode() must be the exact inverse of encode()"
            )
        pieces.append(np.frombuffer(data, np.uint8))
        at += length
    return torch.from_numpy(np.concatenate(pieces))


def require_codecs(names: Sequence[str], codecs: Sequence[Codec]) -> dict[str, Codec]:
    """Return the codecs by name, or say which one of those that the checkpoint needs is missing."""
    known = {codec.name: codec for codec in codecs}
    missing = [name for name in names if name not in known]
    if missing:
        raise MissingCodecError(
            f"the checkpoint was saved with codec {', '.join(map(repr, missing))}, which this load does not have "
            f"(it has {sorted(known)}); pass LoadOptions(codecs=[...])"
        )
    return known


def h2d(context: LoadContext, workers: int) -> Stage[Loaded, Loaded]:
    """Put what this rank wants of its own chunk into its tensors, on whatever device they are."""

    async def run(loaded: Loaded) -> Loaded:
        chunk = loaded.item.chunk
        if chunk is not None:
            placed = await in_thread(_place, context, loaded.data, chunk.file, chunk.start, chunk.stop)
            context.placed_nbytes += placed  # apart from the await: other workers count too
        return loaded

    return Stage("h2d", run, workers=workers)


def exchange(context: LoadContext) -> Stage[Loaded, None]:
    """Send this chunk to the ranks that want it too, and take what they read for this one.

    Rounds are collective: they run one at a time, in plan order, as often on every rank.
    """

    async def run(loaded: Loaded) -> None:
        item = loaded.item
        if item.round >= 0:
            await _round(context, loaded)
        if loaded.buffer is not None:
            context.lease.give(loaded.buffer)

    return Stage("exchange", run, ordered=True)


async def _round(context: LoadContext, loaded: Loaded) -> None:
    """Take part in one all-to-all."""
    assignment, number = context.assignment, loaded.item.round
    outgoing: list[Buffer] = [b""] * context.world_size
    for peer in assignment.sends(number):
        outgoing[peer] = bytes_of(loaded.data)
    chunks = assignment.receives(number)
    sizes = [0] * context.world_size
    for chunk in chunks:
        sizes[chunk.reader] = chunk.nbytes
    incoming = await context.all_to_all(outgoing, sizes)
    for chunk in chunks:
        data = torch.frombuffer(incoming[chunk.reader], dtype=torch.uint8)
        context.received_nbytes += data.numel()
        placed = await in_thread(_place, context, data, chunk.file, chunk.start, chunk.stop)
        context.placed_nbytes += placed


def _place(context: LoadContext, data: torch.Tensor, file: int, lo: int, hi: int) -> int:
    """Copy everything that this rank wants of data-section bytes [lo, hi) of a file; return how many bytes."""
    nbytes = 0
    context.touched = True
    found = list(placements(context.layout, context.table, context.wants, file, lo, hi))
    with on_side_stream(cuda_devices([context.tensors[p.row] for p in found]), {}):
        for p in found:
            dtype = torch_dtype(context.dtypes[p.row])
            source = block_of(typed(data, p.source_at, p.source_lengths, dtype), p.source_box)
            target = context.tensors[p.row].detach()
            if p.target_at is not None:
                target = target[p.target_at : p.target_at + int(np.prod(p.target_lengths))].view(p.target_lengths)
            block_of(target, p.target_box).copy_(source, non_blocking=True)
            nbytes += source.numel() * target.element_size()
    return nbytes
