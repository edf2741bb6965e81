"""Bytes of a data file that one rank reads for itself: values that are no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch

from bcp.errors import CorruptError
from bcp.format.receipt import FileReceipt
from bcp.pipeline import Budget, Pipeline, Stage, unwrap_stage_errors
from bcp.plan.read.copies import Chunk
from bcp.read.source import Source
from bcp.runtime.threads import in_thread
from bcp.stages.items import ReadItem, Stored
from bcp.stages.load import check, decoded, require_codecs
from bcp.stages.memcpy import bytes_of

__all__ = ["check_sizes", "range_item", "read_ranges"]

T = TypeVar("T")


def range_item(source: Source, name: str, key: str, file: FileReceipt, start: int, stop: int) -> ReadItem:
    """Return bytes of a file's data section as an item that no other rank needs."""
    chunk = Chunk(file=0, start=start, stop=stop, reader=source.rank, round=-1)
    return ReadItem(name, chunk.nbytes, chunk, -1, key, file)


async def read_ranges(
    source: Source, items: Sequence[ReadItem], unpack: Callable[[ReadItem, torch.Tensor], T]
) -> list[T]:
    """Read ranges, several at once; return what ``unpack`` makes of the checked bytes of each, uint8, in a thread.

    Raises CorruptError if a file is missing, too short or damaged.
    """

    async def fetch(item: ReadItem) -> Stored:
        return await _fetch(source, item)

    async def make(stored: Stored) -> T:
        return await in_thread(lambda: unpack(stored.item, _checked(source, stored)))

    await check_sizes(source, items)
    start: Pipeline[ReadItem, ReadItem] = Pipeline()
    graph = start.then(Stage("read", fetch, workers=source.io_workers)).then(Stage("unpack", make))
    budget = Budget(max(sum(item.nbytes for item in items), 1))  # all of it goes to the caller
    with unwrap_stage_errors():
        return await graph.run(items, budget=budget)


async def _fetch(source: Source, item: ReadItem) -> Stored:
    """Read the blocks of a range into memory of its own."""
    if item.file is None:
        raise TypeError(f"{item.name} has no file to read")
    start = int(item.file.blocks.stored_start[item.rows.start])
    memory = await in_thread(partial(torch.empty, item.stored_nbytes, dtype=torch.uint8))
    try:
        await source.backend.read_into(item.key, start, bytes_of(memory))
    except FileNotFoundError as error:
        raise CorruptError(
            f"{item.key} is missing, but the checkpoint names it (rank {source.rank}, {item.name}); "
            "restore the file, or load another checkpoint"
        ) from error
    return Stored(item, item.stored_nbytes, [bytes_of(memory)], memory)


def _checked(source: Source, stored: Stored) -> torch.Tensor:
    """Compare fetched bytes with their checksums, and decode them; return the range, uint8."""
    item, image = stored.item, stored.buffer
    if item.file is None or item.chunk is None or image is None:
        raise TypeError(f"{item.name} was not fetched")
    if source.options.verify:
        check(stored, item.file, source.rank)
    if item.file.codecs:
        codecs = require_codecs(item.file.codecs, source.options.codecs)
        image = decoded(stored, item.file, codecs, source.rank)
    first = item.file.data_start + item.chunk.start - int(item.file.blocks.raw_start[item.rows.start])
    return image[first : first + item.chunk.nbytes]


async def check_sizes(source: Source, items: Iterable[ReadItem]) -> None:
    """Read the last byte of every file with more than two largest reads to read at once.

    Blocks as ``bcp.save`` makes them are far smaller, so that an honest checkpoint costs no read.

    Raises CorruptError if the file is shorter than its receipt says; no memory was taken for it.
    """

    async def look(item: ReadItem) -> None:
        nbytes = 0 if item.file is None else item.file.stored_nbytes
        claim = f"{nbytes} bytes, {item.stored_nbytes} of them in one read from block {item.rows.start} on"
        try:
            await source.backend.read_into(item.key, nbytes - 1, memoryview(bytearray(1)))
        except FileNotFoundError as error:
            raise CorruptError(f"{item.key} is missing, its receipt says {claim}; restore the file") from error
        except CorruptError as error:
            raise CorruptError(f"{item.key} is too short, its receipt says {claim}; restore both") from error

    most = 2 * source.options.read_bytes
    large = {item.key: item for item in items if item.file and item.stored_nbytes > most}
    start: Pipeline[ReadItem, ReadItem] = Pipeline()
    budget = Budget(max(sum(item.nbytes for item in large.values()), 1))
    with unwrap_stage_errors():
        await start.then(Stage("sizes", look, workers=source.io_workers)).run(list(large.values()), budget=budget)
