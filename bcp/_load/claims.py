"""The claims of receipts, checked against the metadata and against storage before any memory is taken for them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch

from bcp._job import LoadJob
from bcp.errors import CorruptError
from bcp.metadata import Metadata, data_key
from bcp.pipeline import Budget, Pipeline, Stage, in_thread
from bcp.plan.columns import Ints
from bcp.plan.load.assign import Chunk
from bcp.plan.shards import KINDS
from bcp.protocols import Backend
from bcp.receipt import FileReceipt, Receipt
from bcp.stages.check import check, decoded
from bcp.stages.flat import bytes_of
from bcp.stages.load_items import ReadItem, Stored

__all__ = ["check_stored", "checked", "fetch", "file_of", "own_item"]


def file_of(metadata: Metadata, receipt: Receipt, kind: int) -> tuple[str, FileReceipt]:
    """Return key and receipt of a rank's data file, if codecs and blocks are those of the commit record.

    Raises:
        CorruptError: the receipt lacks the file, or describes it in another way than the metadata.

    """
    commit = metadata.commit
    key = data_key(kind, receipt.rank, commit.operation, encoded=bool(commit.codecs))
    file = receipt.file(kind)
    if file is None:
        raise CorruptError(
            f"{key} is in the metadata, but the receipt of rank {receipt.rank} does not have it; restore the receipt"
        )
    if file.codecs != commit.codecs:
        raise CorruptError(
            f"the receipt of rank {receipt.rank} says that {key} went through codecs {list(file.codecs)}, the commit "
            f"record {list(commit.codecs)}; restore both"
        )
    most = commit.part_bytes if commit.codecs else metadata.layout.block_bytes
    has_units = KINDS[kind] == "dataloader" and any(of == KINDS[kind] for of, _ in receipt.objects)
    _check_blocks(file, most, key, may_be_shorter=has_units and not commit.codecs)
    return key, file


def _check_blocks(file: FileReceipt, most: int, key: str, *, may_be_shorter: bool) -> None:
    """Check that the data section is cut after every ``most`` bytes; the first block has the header as well.

    A file with units is also cut where a unit ends.
    """
    lengths, rest = file.blocks.raw_length, file.nbytes - file.data_start
    if may_be_shorter:
        lengths = _joined(lengths, most, file.data_start)
    count = max(-(-rest // most), 1)
    if len(lengths) != count:
        raise CorruptError(
            f"the receipt of {key} has {len(lengths)} blocks, and {rest} bytes of data in blocks of {most} bytes are "
            f"{count}; restore the receipt"
        )
    wanted = np.full(count, most, np.int64)
    wanted[-1] = rest - most * (count - 1)
    wanted[0] += file.data_start
    wrong = np.flatnonzero(lengths != wanted)
    if len(wrong):
        row = int(wrong[0])
        raise CorruptError(
            f"the receipt of {key} says that block {row} has {lengths[row]} bytes instead of {wanted[row]}; restore "
            "the receipt"
        )


def _joined(lengths: Ints, most: int, data_start: int) -> Ints:
    """Return the blocks as they are without the cuts at the ends of units."""
    if len(lengths) == 0 or lengths.min() <= 0 or lengths[0] <= data_start:
        return lengths
    ends = np.cumsum(lengths)
    kept = ((ends - data_start) % most == 0) | (np.arange(len(ends)) == len(ends) - 1)
    return np.asarray(np.diff(ends[kept], prepend=0), dtype=np.int64)


def own_item(job: LoadJob, name: str, key: str, file: FileReceipt, start: int, stop: int) -> ReadItem:
    """Return bytes of a file's data section as an item that no other rank needs."""
    chunk = Chunk(file=0, start=start, stop=stop, reader=job.rank, round=-1)
    return ReadItem(name, chunk.nbytes, chunk, -1, key, file)


async def fetch(job: LoadJob, item: ReadItem) -> Stored:
    """Read the blocks of a chunk that no other rank needs into memory of its own."""
    if item.file is None:
        raise TypeError(f"{item.name} has no file to read")
    start = int(item.file.blocks.stored_start[item.rows.start])
    memory = await in_thread(partial(torch.empty, item.stored_nbytes, dtype=torch.uint8))
    try:
        await job.backend.read_into(item.key, start, bytes_of(memory))
    except FileNotFoundError as error:
        raise CorruptError(
            f"{item.key} is missing, but the checkpoint was committed with it (rank {job.rank}, {item.name}); restore "
            "the file, or load another checkpoint"
        ) from error
    return Stored(item, item.stored_nbytes, [bytes_of(memory)], memory)


def checked(job: LoadJob, stored: Stored) -> torch.Tensor:
    """Compare fetched bytes with their checksums, and decode them; return the chunk, uint8."""
    item, image = stored.item, stored.buffer
    if item.file is None or item.chunk is None or image is None:
        raise TypeError(f"{item.name} was not fetched")
    if job.options.verify:
        check(stored, item.file, job.rank)
    if item.file.codecs:
        codecs = {codec.name: codec for codec in job.options.codecs}
        image = decoded(stored, item.file, codecs, job.rank)
    first = item.file.data_start + item.chunk.start - int(item.file.blocks.raw_start[item.rows.start])
    return image[first : first + item.chunk.nbytes]


async def check_stored(backend: Backend, items: Iterable[ReadItem], most: int, workers: int) -> None:
    """Read the last byte of every file of which more than ``2 * most`` bytes are to be read at once.

    Blocks as ``bcp.save`` makes them are far smaller, so that an honest checkpoint costs no read.

    Raises:
        CorruptError: the file is shorter than its receipt says; no memory was taken for it.

    """

    async def look(item: ReadItem) -> None:
        nbytes = 0 if item.file is None else item.file.stored_nbytes
        claim = f"{nbytes} bytes, {item.stored_nbytes} of them in one read from block {item.rows.start} on"
        try:
            await backend.read_into(item.key, nbytes - 1, memoryview(bytearray(1)))
        except FileNotFoundError as error:
            raise CorruptError(f"{item.key} is missing, its receipt says {claim}; restore the file") from error
        except CorruptError as error:
            raise CorruptError(f"{item.key} is too short, its receipt says {claim}; restore both") from error

    large = {item.key: item for item in items if item.file and item.stored_nbytes > 2 * most}
    start: Pipeline[ReadItem, ReadItem] = Pipeline()
    budget = Budget(max(sum(item.nbytes for item in large.values()), 1))
    await start.then(Stage("sizes", look, workers=workers)).run(list(large.values()), budget=budget)
