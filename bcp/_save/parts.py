"""Parts go out to files, receipts come in, and the result sums them up.

Units of sharded states in this rank's dataloader file: one behind the other, before its opaque object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch

from bcp._job import SaveJob
from bcp._save.leader import Opening
from bcp._save.local_state import LocalState
from bcp._save.plan import SavePlan
from bcp._save.snapshot import Snapshot
from bcp._written import encode_written
from bcp.events import SaveResult
from bcp.format.kept import KeptRun
from bcp.format.metadata import EXTRA_NAME, data_key, receipt_key
from bcp.format.receipt import Blocks, FileReceipt, Receipt, encode_receipt, receipt_digest
from bcp.options import SaveOptions
from bcp.plan.box import Box
from bcp.plan.columns import Ints
from bcp.plan.shards import KINDS, OPAQUE_KINDS, ShardRow, ShardTable, TensorMeta
from bcp.plan.write.divide import Writes
from bcp.plan.write.files import DataFile, data_files
from bcp.protocols import Backend, ObjectKey, PartWriter, retries_of
from bcp.runtime.device import stream_count
from bcp.runtime.threads import in_thread_gc_paused, thread_count
from bcp.stages.items import PartReceipt, WriteItem
from bcp.stages.keep import BaseFile, Keeping
from bcp.stages.memcpy import addresses
from bcp.state.values import encode_value, encode_values

__all__ = [
    "contents",
    "make_receipt",
    "open_files",
    "owned_values",
    "put_receipt",
    "result",
    "twin_items",
    "write_items",
]


def unit_ends(held: LocalState, plan: SavePlan) -> list[int]:
    """Return where each unit ends in the data section."""
    return list(accumulate(held.units[path].nbytes for path in plan.units))


def places(held: LocalState, plan: SavePlan) -> dict[ObjectKey, str]:
    """Say where this rank's units lie in the data section: first byte and one past the last (paper sec. 3.2)."""
    bounds = pairwise([0, *unit_ends(held, plan)])
    return {("dataloader", path): encode_value(list(place)) for path, place in zip(plan.units, bounds, strict=True)}


def unit_rows(held: LocalState, plan: SavePlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and memory of all that the units consist of, in the order of the file."""
    for path in plan.units:
        image = held.units[path]
        yield from ((f"{path}#{number}", tensor) for number, tensor in enumerate(image.tensors))
        yield path, torch.frombuffer(bytearray(image.tail), dtype=torch.uint8)


def owned_values(job: SaveJob, held: LocalState, plan: SavePlan) -> dict[ObjectKey, str]:
    """Write down the values that this rank owns, as they are now: training will change them."""
    with job.caller.streams_in_use():
        values = encode_values(held.shards.objects, plan.objects, allow_pickle=job.options.allow_pickle)
    return values | places(held, plan)


def write_items(held: LocalState, plan: SavePlan, operation: str, rank: int, options: SaveOptions) -> list[WriteItem]:
    """List the parts of all of this rank's files, in the order in which they enter the graph.

    Last come opaque objects and units, whose memory nobody changes: training does not wait until they are copied.
    """
    encoded = bool(options.codecs)
    shards = held.shards
    items = _items(plan.files, shards.table, shards.tensors, held.address, operation, rank, encoded=encoded)
    for kind in OPAQUE_KINDS:
        rows = [*unit_rows(held, plan)] if kind == "dataloader" else []
        ends = unit_ends(held, plan) if rows else ()
        if kind in held.extras:
            rows.append((EXTRA_NAME, torch.frombuffer(bytearray(held.extras[kind]), dtype=torch.uint8)))
        if rows:
            tensors = [tensor for _, tensor in rows]
            table, writes = _one_file(kind, rows)
            files = data_files(table, writes, rank=rank, part_bytes=options.part_bytes)
            more = _items(files, table, tensors, addresses(tensors, table), operation, rank, encoded=encoded)
            items += [replace(item, edges=_edges(item, ends, files[0]), is_steady=True) for item in more]
    return items


def twin_items(held: LocalState, files: Sequence[DataFile], operation: str, rank: int) -> list[WriteItem]:
    """List the parts of files that this rank writes for another one, whose shards are equal."""
    shards = held.shards
    items = _items(files, shards.table, shards.tensors, held.address, operation, rank, encoded=False)
    return [replace(item, part=replace(item.part, name=f"{item.name} of rank {rank}")) for item in items]


def _items(
    files: Sequence[DataFile],
    table: ShardTable,
    tensors: Sequence[torch.Tensor],
    address: Ints,
    operation: str,
    rank: int,
    *,
    encoded: bool,
) -> list[WriteItem]:
    return [
        WriteItem(
            part=part,
            key=data_key(KINDS.index(file.kind), rank, operation, encoded=encoded),
            header=file.header if part.index == 0 else b"",
            table=table,
            tensors=tensors,
            address=address,
        )
        for file in files
        for part in file.parts
    ]


def _one_file(kind: str, rows: Sequence[tuple[str, torch.Tensor]]) -> tuple[ShardTable, Writes]:
    """Lay tensors into one file, one behind the other."""
    metas = [
        TensorMeta(kind, name, str(tensor.dtype).removeprefix("torch."), tensor.itemsize, tuple(tensor.shape))
        for name, tensor in rows
    ]
    table = ShardTable.build([ShardRow(meta, Box.whole(meta.shape)) for meta in metas])
    count = np.array([tensor.numel() for _, tensor in rows], np.int64)
    ends = np.cumsum([tensor.nbytes for _, tensor in rows])
    starts = ends - [tensor.nbytes for _, tensor in rows]
    return table, Writes(np.arange(len(rows)), np.zeros_like(count), count, starts)


def _edges(item: WriteItem, ends: Sequence[int], file: DataFile) -> tuple[int, ...]:
    """Return at which bytes of a part a unit ends that is not the last one: a block of checksums ends there, too."""
    shift = len(file.header) - item.part.start
    return tuple(end + shift for end in ends if 0 < end + shift < item.part.nbytes)


def contents(items: Mapping[str, WriteItem], name: str) -> tuple[str, Sequence[str]]:
    """Return the file and the tensors of a part, by the name of its item; both empty if there is none."""
    item = items.get(name)
    if item is None:
        return "", ()
    tensors = dict.fromkeys(int(item.table.tensor[span.row]) for span in item.part.spans)
    return item.key, [item.table.tensors.fqn[row] for row in tensors]


@asynccontextmanager
async def open_files(
    backend: Backend, items: Sequence[WriteItem], of_any_size: Collection[str]
) -> AsyncIterator[dict[str, PartWriter]]:
    """Open every data file; they appear when the context ends well, and not at all otherwise.

    ``of_any_size`` are the keys of files whose sizes nobody knows before.
    """
    nbytes: dict[str, int] = {}
    for item in items:
        nbytes[item.key] = max(nbytes.get(item.key, 0), item.part.stop)
    async with AsyncExitStack() as stack:
        yield {
            key: await stack.enter_async_context(backend.open_write(key, None if key in of_any_size else size))
            for key, size in nbytes.items()
        }


def make_receipt(
    items: Sequence[WriteItem],
    stored: Sequence[PartReceipt],
    objects: Mapping[ObjectKey, str],
    operation: str,
    rank: int,
    options: SaveOptions,
    keeping: Keeping | None = None,
) -> Receipt:
    """Make the receipt of the files that this rank wrote; ``objects`` are the values it owns, as text."""
    by_file: dict[str, list[PartReceipt]] = {}
    for item, receipt in zip(items, stored, strict=True):
        by_file.setdefault(item.key, []).append(receipt)
    headers = {item.key: len(item.header) for item in items if item.header}
    codecs = tuple(codec.name for codec in options.codecs)
    bases = {} if keeping is None else keeping.files
    files = []
    for key, parts in by_file.items():
        file = _file_receipt(headers[key], parts, codecs)
        files.append(replace(file, kept=_kept(bases[key], parts, file, rank, operation)) if key in bases else file)
    return Receipt(rank, operation, files, objects)


def _kept(
    base: BaseFile, parts: Sequence[PartReceipt], file: FileReceipt, rank: int, operation: str
) -> tuple[KeptRun, ...]:
    """Return where the blocks lie that a packed file lacks; one empty run for a file that lacks none."""
    is_kept = [np.zeros(len(part.blocks), bool) if part.is_kept is None else part.is_kept for part in parts]
    runs = base.runs(np.concatenate(is_kept))
    return runs or (KeptRun(1, 0, 0, operation, file.kind, rank, packed=True, start=0),)


def _file_receipt(data_start: int, parts: Sequence[PartReceipt], codecs: tuple[str, ...]) -> FileReceipt:
    """Sum up one file; parts are in file order."""
    stored = np.concatenate([part.blocks[:, 1] for part in parts])
    raw = np.array([part.part.nbytes for part in parts], np.int64) if codecs else stored
    return FileReceipt(
        kind=KINDS.index(parts[0].part.kind),
        data_start=data_start,
        nbytes=parts[-1].part.stop,
        stored_nbytes=int(stored.sum()),
        codecs=codecs,
        blocks=Blocks.build(stored, raw, [digest for part in parts for digest in part.checksums]),
    )


async def put_receipt(backend: Backend, receipt: Receipt) -> bytes:
    """Store the receipt; return this rank's message for the commit."""
    data = await in_thread_gc_paused(encode_receipt, receipt)
    await backend.put(receipt_key(receipt.rank, receipt.operation), data)
    return encode_written(receipt, receipt_digest(data), len(data))


def result(
    job: SaveJob, held: LocalState, opening: Opening, receipt: Receipt, items: Sequence[WriteItem], snapshot: Snapshot
) -> SaveResult:
    """Sum up the save for the caller."""
    data_nbytes = sum(file.nbytes - file.data_start for file in receipt.files)
    return SaveResult(
        path=job.path,
        operation=opening.operation,
        rank=job.rank,
        world_size=job.world_size,
        nbytes=sum(file.own_nbytes for file in receipt.files),
        state_nbytes=held.nbytes,
        dedup_saved_bytes=held.nbytes - data_nbytes,
        seconds=job.watch.seconds,
        blocking_seconds=snapshot.seconds,
        step_wait_seconds=snapshot.step_wait_seconds,
        stage_seconds=job.watch.stage_seconds,
        budget_wait_seconds=snapshot.budget.waited_seconds,
        plan_cached=opening.cached,
        files=tuple(dict.fromkeys(item.key for item in items)),
        retries=retries_of(job.backend),
        threads=thread_count(),
        streams=stream_count(),
        pinned_nbytes=snapshot.pinned_nbytes,
    )
