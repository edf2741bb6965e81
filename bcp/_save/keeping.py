"""The blocks that a save leaves out, because an earlier checkpoint of its run has them: each rank in its own files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from bcp._job import Earlier, SaveJob
from bcp._log import log
from bcp._messages.planning import Base, EqualBlocks
from bcp._save.leader import BLOCK_BYTES, Planned, broadcast_step
from bcp.backends.objects.retry import in_turns
from bcp.backends.siblings import folder_name
from bcp.backends.small import get_small
from bcp.errors import BcpError, CorruptError
from bcp.format.kept import kept_blocks
from bcp.format.metadata import data_key, receipt_key
from bcp.format.receipt import FileReceipt, Receipt, decode_receipt
from bcp.plan.columns import Ints
from bcp.plan.shards import KINDS, OPAQUE_KINDS
from bcp.protocols import Agreement
from bcp.runtime.threads import in_thread_gc_paused
from bcp.stages.items import WriteItem
from bcp.stages.keep import BaseFile, Keeping, Source

__all__ = ["base_file", "choose_base", "remember_blocks"]


async def choose_base(
    agreement: Agreement, job: SaveJob, planned: Planned | None, items: list[WriteItem]
) -> tuple[Planned | None, list[WriteItem], Keeping | None]:
    """Agree with all ranks on the earlier checkpoint, and find out what this rank may leave out.

    Returns rank 0's step, the parts under the keys of their files, and the blocks that the earlier checkpoint has; None
    for a rank that stores everything.
    """
    earlier = job.earlier
    if earlier is None:
        return planned, items, None
    find = None if planned is None else planned.find_base
    answer, chosen = await broadcast_step(agreement, "base", job.rank, EqualBlocks(*earlier.compared).encode(), find)
    if not answer:
        return chosen, items, None
    base = Base.decode(answer, sender=0)
    large = _large_files(items)
    try:
        receipt = await _receipt(earlier, job.rank, base)
        files = {
            key: base_file(receipt, file, base.step, base.refers)
            for key, kind in large.items()
            if (file := receipt.file(kind)) is not None and not earlier.is_new.get(kind, False)
        }
        await in_turns(partial(_look, earlier, *each) for each in _ends(files.values()).items())
    except (BcpError, FileNotFoundError) as error:
        log.warning("a rank stores everything, for it cannot read the checkpoint before", error=repr(error))
        return chosen, items, None
    packed = {key: data_key(large[key], job.rank, _operation(key), encoded=True) for key in files}
    items = [replace(item, key=packed.get(item.key, item.key)) for item in items]
    keeping = Keeping.of({packed[key]: file for key, file in files.items()}, items, BLOCK_BYTES)
    return chosen, items, keeping if files else None


def remember_blocks(job: SaveJob, receipt: Receipt) -> None:
    """Tell the run what this rank has written, and how many blocks are as they were in the save before."""
    if job.earlier is None:
        return
    before, equal, blocks, is_new = job.earlier.receipt, 0, 0, dict[int, bool]()
    for file in receipt.files:
        old = None if before is None else before.file(file.kind)
        if old is None or KINDS[file.kind] in OPAQUE_KINDS or len(old.blocks) != len(file.blocks):
            continue
        same = sum(map(bytes.__eq__, old.blocks.checksum, file.blocks.checksum))
        equal, blocks, is_new[file.kind] = equal + same, blocks + len(file.blocks), same == 0
    job.earlier.saved(receipt, (equal, blocks), is_new)


def base_file(receipt: Receipt, file: FileReceipt, step: int, refers: Iterable[int]) -> BaseFile:
    """Return the true places of the blocks of a file, so that no reference leads to another one.

    Args:
        receipt: of the rank, in the earlier save.
        file: one of its files.
        step: of the earlier save.
        refers: steps that may be referred to.

    """
    count, allowed = len(file.blocks), set(refers)
    length = file.blocks.stored_length
    is_kept = kept_blocks(file.kept, count)
    own = np.where(is_kept, 0, length)
    source, start = np.zeros(count, np.int64), np.cumsum(own) - own
    sources: list[Source] = [(step, receipt.operation, file.kind, receipt.rank, bool(file.kept))]
    for run in file.kept:
        rows = slice(run.first, run.first + run.count)
        sources.append((run.step, run.operation, run.kind, run.rank, run.packed))
        source[rows] = len(sources) - 1 if run.step in allowed else -1
        start[rows] = run.start + np.cumsum(length[rows]) - length[rows]
    return BaseFile(file.blocks.checksum, length, sources, _first_of(sources, source), start)


def _first_of(sources: Sequence[Source], source: Ints) -> Ints:
    """Return the numbers of sources, with one number for each file."""
    first = {each: number for number, each in reversed(list(enumerate(sources)))}
    numbers = np.array([*(first[each] for each in sources), -1], np.int64)
    return numbers[source]


def _large_files(items: Sequence[WriteItem]) -> dict[str, int]:
    """Return the files of tensors that have several blocks, by key: their kinds."""
    ends: dict[str, int] = {}
    headers = {item.key: len(item.header) for item in items if item.header}
    kinds = {item.key: item.part.kind for item in items}
    for item in items:
        ends[item.key] = max(ends.get(item.key, 0), item.part.stop)
    return {
        key: KINDS.index(kind)
        for key, kind in kinds.items()
        if kind not in OPAQUE_KINDS and ends[key] - headers[key] > BLOCK_BYTES
    }


def _operation(key: str) -> str:
    return key.rpartition("-")[2].partition(".")[0]


async def _receipt(earlier: Earlier, rank: int, base: Base) -> Receipt:
    """Return what this rank has written in the earlier save: from memory, but for the first save of a life."""
    if earlier.receipt is not None and earlier.receipt.operation == base.operation:
        return earlier.receipt
    folder, key = await earlier.folder(folder_name(base.step)), receipt_key(rank, base.operation)
    receipt = await in_thread_gc_paused(decode_receipt, await get_small(folder, key), key)
    if (receipt.rank, receipt.operation) != (rank, base.operation):
        raise CorruptError(f"{key} is the receipt of rank {receipt.rank} in operation {receipt.operation}")
    earlier.receipt = receipt
    return receipt


def _ends(files: Iterable[BaseFile]) -> Mapping[tuple[int, str], int]:
    """Return the files to which blocks may refer, and the end of the last such block."""
    ends: dict[tuple[int, str], int] = {}
    for file in files:
        for number, (step, operation, kind, rank, packed) in enumerate(file.sources):
            rows = file.source == number
            if rows.any():
                key = step, data_key(kind, rank, operation, encoded=packed)
                ends[key] = max(ends.get(key, 0), int((file.start + file.length)[rows].max()))
    return ends


async def _look(earlier: Earlier, source: tuple[int, str], stop: int) -> None:
    """Read the last byte to which a block may refer. A file that is not there is found now, and not by a load."""
    step, key = source
    await (await earlier.folder(folder_name(step))).read_into(key, stop - 1, memoryview(bytearray(1)))
