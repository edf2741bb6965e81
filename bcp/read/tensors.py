"""Fill tensors from a checkpoint: where the bytes are, which chunks are read, and the graph that reads them.

:func:`fill` does all of it for one process. A load of many ranks takes the same steps, and shares chunks between ranks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from operator import eq

import numpy as np
import torch

from bcp.format.metadata import Metadata
from bcp.format.receipt import FileReceipt
from bcp.options import unchanged
from bcp.pipeline import Budget, unwrap_stage_errors
from bcp.plan.columns import Ints
from bcp.plan.layout import rows_of
from bcp.plan.read.copies import Assignment, Chunk, ZeroCopyReads, assign, check_complete, copies, zero_copy_reads
from bcp.plan.read.reads import ReadRequest, wants
from bcp.plan.read.share import BlockIndex, SharedReads
from bcp.plan.shards import KINDS, TensorTable
from bcp.protocols import LocalShards, ScatterReader, checks_blocks
from bcp.read.ranges import check_sizes
from bcp.read.receipts import foreign_range, key_of
from bcp.read.source import Source
from bcp.runtime.device import Lanes, accelerators
from bcp.runtime.staging import Lease, pool_for
from bcp.runtime.threads import in_thread_gc_paused
from bcp.stages.items import ReadItem
from bcp.stages.load import SEAL_BYTES, AllToAll, LoadContext, load_graph, never_replaced, require_codecs
from bcp.stages.memcpy import addresses, writable
from bcp.stages.place import LoadBuffers
from bcp.state.guard import being_loaded

__all__ = [
    "Wanted",
    "both_names",
    "fill",
    "lay_out",
    "line_of",
    "load_context",
    "read_items",
    "tensor_name",
    "tensors_in",
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Tensors to fill, and where their bytes are in the checkpoint."""

    shards: LocalShards  # live memory
    saved: Ints  # int64[n], the checkpoint's row of each tensor; -1 where it has none
    reads: ReadRequest  # where the bytes are


async def fill(source: Source, shards: LocalShards, saved: Ints) -> None:
    """Fill shards in one process, without other ranks.

    Args:
        source: the checkpoint.
        shards: the memory to fill.
        saved: int64[n], the checkpoint's row of each tensor of the shards.

    Raises:
        CorruptError: a file or receipt is missing or damaged.
        MissingCodecError: the options lack a codec that the checkpoint needs.
        StorageError: storage failed.

    """
    require_codecs(source.metadata.commit.codecs, source.options.codecs)
    wanted = Wanted(shards, saved, await in_thread_gc_paused(wants, source.metadata.layout, shards.table, saved))
    line, options = line_of(source.metadata), source.options
    runs = await in_thread_gc_paused(line.runs, wanted.reads.ranges())
    assignment = assign(line, source.rank, runs, SharedReads.nothing(), read_bytes=options.read_bytes)
    devices = accelerators(shards.tensors, shards.address)
    async with AsyncExitStack() as stack:
        stack.enter_context(unwrap_stage_errors())
        lease = await stack.enter_async_context(pool_for(devices).borrowed(keep=False))
        lanes = await stack.enter_async_context(Lanes(devices))
        targets = await in_thread_gc_paused(lay_out, source, wanted, assignment, lanes)
        stack.enter_context(being_loaded(list(targets.tensors)))
        items = await read_items(source, wanted, assignment, targets.straight)
        context = load_context(source, assignment, targets, lease)
        graph = load_graph(context, copy_workers=options.copy_workers, io_workers=source.io_workers)
        await graph.run(items, budget=Budget(options.budget_bytes))


def line_of(metadata: Metadata) -> BlockIndex:
    """Return the blocks of all data files: the smallest ranges that can be verified and decoded.

    Foreign files can be read exactly; their blocks are as long as the longest element.
    """
    layout, commit = metadata.layout, metadata.commit
    if metadata.foreign is not None:
        return BlockIndex.of(layout, int(layout.tensors.itemsize.max(initial=1)))
    return BlockIndex.of(layout, commit.part_bytes if commit.codecs else layout.block_bytes)


def lay_out(source: Source, wanted: Wanted, assignment: Assignment, lanes: Lanes) -> LoadBuffers:
    """Say where every byte goes that this rank reads or receives, and which chunks need no staging memory on their way.

    Every chunk does where codecs have to decode it, and where the caller edits the graph: the stages that were put in
    may look at the bytes, and may change them.
    """
    metadata, shards = source.metadata, wanted.shards
    layout, table, tensors, chunks = metadata.layout, shards.table, shards.tensors, assignment.chunks
    all_copies = copies(layout, table, wanted.reads, chunks)
    check_complete(all_copies, table, wanted.reads)
    saved = layout.tensors.dtypes_of(wanted.saved)
    same = np.fromiter(map(eq, saved, table.tensors.dtype), np.bool_, len(saved))[table.tensor]
    dtypes = list(map(saved.__getitem__, table.tensor.tolist()))
    known = addresses(tensors, table) if shards.address is None else shards.address
    address = writable(tensors, known, table.nbytes, same)
    able = isinstance(source.backend, ScatterReader) and source.options.edit is unchanged and not metadata.commit.codecs
    private = np.arange(len(chunks)) < (len(assignment.private) if able else 0)
    way = zero_copy_reads(all_copies, private, address > 0)
    return LoadBuffers(tensors, table.tensors.itemsize[table.tensor], dtypes, address, all_copies, way, lanes)


async def _alone(send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> None:
    """Exchange nothing: there is one rank."""


def load_context(
    source: Source,
    assignment: Assignment,
    targets: LoadBuffers,
    lease: Lease,
    *,
    world_size: int = 1,
    all_to_all: AllToAll = _alone,
    device: torch.device | None = None,
    is_replaced: Callable[[], Awaitable[bool]] = never_replaced,
) -> LoadContext:
    """Build the context that the stages of the load share."""
    return LoadContext(
        rank=source.rank,
        world_size=world_size,
        backend=source.backend,
        scatter=source.backend if isinstance(source.backend, ScatterReader) else None,
        lease=lease,
        targets=targets,
        assignment=assignment,
        codecs=require_codecs(source.metadata.commit.codecs, source.options.codecs),
        verify=source.options.verify,
        all_to_all=all_to_all,
        device=device,
        edited=source.options.edit is not unchanged,
        checked=checks_blocks(source.backend) and source.options.edit is unchanged,
        is_replaced=is_replaced,
        file_name=partial(key_of, source.metadata),
    )


async def read_items(source: Source, wanted: Wanted, assignment: Assignment, straight: ZeroCopyReads) -> list[ReadItem]:
    """List the chunks that this rank reads, whose files are there as their receipts say.

    Raises:
        CorruptError: a receipt or a file is missing or damaged.
        StorageError: storage failed.

    """
    layout = source.metadata.layout
    files = {chunk.file for chunk in assignment.items() if chunk.stop > chunk.start}
    await source.read_receipts(int(layout.file_rank[file]) for file in files)
    items = await in_thread_gc_paused(_items, source, wanted, assignment, straight)
    await check_sizes(source, items)
    return items


def _items(source: Source, wanted: Wanted, assignment: Assignment, straight: ZeroCopyReads) -> list[ReadItem]:
    """List the chunks that this rank reads, and the rounds in which it only receives, in plan order.

    Chunks that are not read straight to where they belong borrow staging memory of one size. So a buffer serves any of
    them, and the byte budget bounds them all.
    """
    layout, past_staging, foreign = source.metadata.layout, straight.chunks.tolist(), source.metadata.foreign
    files: dict[int, tuple[str, FileReceipt]] = {}
    items = []
    for chunk in assignment.items():
        if chunk.file < 0:
            items.append(ReadItem(f"round {chunk.round}", 0, None, chunk.round, "", None))
            continue
        if foreign is not None:
            kind = int(layout.file_kind[chunk.file])
            files[chunk.file] = foreign.key[chunk.file], foreign_range(foreign, kind, chunk)
        elif chunk.file not in files:
            place = (int(column[chunk.file]) for column in (layout.file_rank, layout.file_kind, layout.file_nbytes))
            files[chunk.file] = source.file_of(*place)
        key, file = files[chunk.file]
        name = f"{key} data bytes {chunk.start} to {chunk.stop}: {_first_name(wanted, layout.tensors, chunk)}"
        items.append(ReadItem(name, chunk.nbytes, chunk, chunk.round, key, file, past_staging[chunk.number]))
    staged = [item for item in items if item.file is not None and not item.straight]
    room = max((item.stored_nbytes for item in staged), default=0)
    if any(item.round >= 0 for item in staged):
        room += SEAL_BYTES
    decoded = max((item.nbytes for item in staged), default=0) if source.metadata.commit.codecs else 0
    return [
        item if item.file is None or item.straight else replace(item, nbytes=room + decoded, room=room)
        for item in items
    ]


def _first_name(wanted: Wanted, saved: TensorTable, chunk: Chunk) -> str:
    """Name the first tensor that this rank wants of a chunk."""
    tensors = tensors_in(wanted, chunk)
    if not tensors:
        return "for other ranks"
    name = both_names(wanted.shards.table.tensors, tensors[0], saved, int(wanted.saved[tensors[0]]))
    return name if len(tensors) == 1 else f"{name} and {len(tensors) - 1} more"


def tensors_in(wanted: Wanted, chunk: Chunk) -> list[int]:
    """Return the tensors that this rank wants of a chunk, as rows of its table."""
    table, needed = wanted.shards.table, wanted.reads
    first, last = rows_of(needed.file, chunk.file)
    hits = first + np.flatnonzero((needed.start[first:last] < chunk.stop) & (needed.stop[first:last] > chunk.start))
    return list(dict.fromkeys(table.tensor[needed.row[hits]].tolist()))


def tensor_name(tensors: TensorTable, row: int) -> str:
    """Name a tensor, as in ``model: layers.0.weight``."""
    return f"{KINDS[int(tensors.kind[row])]}: {tensors.fqn[row]}"


def both_names(target: TensorTable, row: int, saved: TensorTable, origin: int) -> str:
    """Name a tensor of the target, and the one of the checkpoint that it is read from where that is named otherwise."""
    new, old = tensor_name(target, row), tensor_name(saved, origin)
    return new if new == old else f"{new} (saved as {old})"
