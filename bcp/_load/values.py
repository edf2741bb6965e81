"""What is not a tensor: values of leaves, and the opaque objects of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bcp._job import LoadJob
from bcp._load.claims import check_stored, file_of
from bcp._load.opening import fetch_receipts
from bcp._load.reads import Reading
from bcp._load.targets import Wanted, extra_ranks, find_targets
from bcp.errors import CorruptError
from bcp.metadata import Metadata
from bcp.options import LoadOptions
from bcp.pipeline import Budget, Pipeline, in_thread, planning
from bcp.plan.layout import Layout
from bcp.plan.load.assign import Chunk
from bcp.plan.shards import KINDS, OPAQUE_KINDS
from bcp.planners.extras import restore, unpack
from bcp.planners.values import decode_values
from bcp.protocols import ObjectKey, States
from bcp.receipt import Receipt
from bcp.stages.flat import bytes_of
from bcp.stages.load import LoadContext, deserialize, read
from bcp.stages.load_items import ReadItem

__all__ = ["Read", "ask", "extra_sources", "needed_receipts", "put_values", "read_extras"]


@dataclass(frozen=True, slots=True)
class Read:
    """What was read on this rank: tensors are in place, opaque objects still have to be set."""

    context: LoadContext
    extras: Mapping[str, Any]


def extra_sources(layout: Layout, states: States, rank: int) -> dict[str, int]:
    """Say whose opaque objects this rank takes: its own; with another world size, those of rank modulo the old one."""
    sources = {}
    for kind in OPAQUE_KINDS:
        saved = extra_ranks(layout, kind) if kind in states else []
        if saved:
            sources[kind] = rank if rank in saved else saved[rank % len(saved)]
    return sources


def needed_receipts(reading: Reading, wanted: Wanted, layout: Layout, extras: Mapping[str, int]) -> set[int]:
    """Return the ranks whose receipts this rank still has to read."""
    files = {chunk.file for chunk in reading.assignment.items() if chunk.stop > chunk.start}
    return ({int(layout.file_rank[file]) for file in files} | set(extras.values())) - set(wanted.receipts)


async def ask(job: LoadJob, metadata: Metadata) -> Wanted:
    """Find what this rank wants, with the values of what is no tensor; raises what keeps it from being loaded."""
    layout = metadata.layout
    wanted = await planning(find_targets, job, metadata)
    rows = {key: row for key, row in wanted.renamed.objects.items() if KINDS.index(key[0]) in wanted.kinds}
    owners = np.unique(layout.object_rank[np.fromiter(rows.values(), np.int64)]).tolist()
    receipts = await fetch_receipts(job.backend, metadata, owners)
    objects = await planning(_read_objects, rows, layout, receipts, job.options)
    await in_thread(wanted.targets.check, objects)
    return replace(wanted, receipts=receipts, objects=objects)


async def read_extras(
    context: LoadContext,
    metadata: Metadata,
    receipts: Mapping[int, Receipt],
    sources: Mapping[str, int],
    options: LoadOptions,
) -> dict[str, Any]:
    """Read and unpack the opaque objects of this rank, whole."""
    start: Pipeline[ReadItem, ReadItem] = Pipeline()
    graph = start.then(read(context, options.io_workers)).then(deserialize(context, options.copy_workers))
    loaded: dict[str, Any] = {}
    for kind, source in sources.items():
        key, file = file_of(metadata, receipts[source], KINDS.index(kind))
        size = file.nbytes - file.data_start
        item = ReadItem(f"{key} ({kind} of rank {source})", size, Chunk(0, 0, size, context.rank, -1), -1, key, file)
        await check_stored(context.backend, [item], options.read_bytes, options.io_workers)
        (whole,) = await graph.run([item], budget=Budget(size))
        data = bytes(bytes_of(whole.data))
        if whole.buffer is not None:
            context.lease.give(whole.buffer)
        loaded[kind] = await in_thread(_unpack, data, key, options)
    return loaded


def _unpack(data: bytes, key: str, options: LoadOptions) -> Any:
    return unpack(data, trust=options.trust, where=key)


def _read_objects(
    rows: Mapping[ObjectKey, int], layout: Layout, receipts: Mapping[int, Receipt], options: LoadOptions
) -> dict[ObjectKey, Any]:
    """Decode the values of the leaves that are not tensors; ``rows`` are their rows in ``layout.objects``."""
    return decode_values(_texts(rows, layout, receipts), trust=options.trust)


def _texts(
    rows: Mapping[ObjectKey, int], layout: Layout, receipts: Mapping[int, Receipt]
) -> Iterator[tuple[ObjectKey, str, str]]:
    """Find the texts of these values, by what they are called in the checkpoint."""
    owners = layout.object_rank.tolist()
    for name, row in rows.items():
        kind, path = layout.objects[row]
        text = receipts[owners[row]].objects.get((kind, path))
        if text is None:
            raise CorruptError(
                f"the receipt of rank {owners[row]} lacks the value of {kind}: {path}; restore the receipt"
            )
        yield name, text, f"{kind}: {path}"


def put_values(wanted: Wanted, states: States, read: Read) -> None:
    """Set what is not a tensor in the target; called when every rank has all its tensors."""
    wanted.targets.finish(wanted.objects)
    for kind, value in read.extras.items():
        restore(states[kind], value, kind)
