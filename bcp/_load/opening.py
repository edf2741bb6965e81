"""The table of contents: found, checked, given to all ranks; and the receipts behind it.

The claims of receipts, checked against the metadata and against storage before any memory is taken for them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bcp._agree import gather_broadcast
from bcp._deletion import read_committed
from bcp._job import LoadJob
from bcp._load.foreign import foreign_words
from bcp._messages.planning import Opened
from bcp.backends.small import get_small
from bcp.errors import BcpError, CorruptError, NotACheckpointError, UncommittedError
from bcp.format.metadata import METADATA_KEY, Metadata, data_key, decode_metadata, operation_of, receipt_key
from bcp.format.receipt import FileReceipt, Receipt, decode_receipt, receipt_digest
from bcp.pipeline import Budget, Pipeline, Stage
from bcp.plan.columns import Ints
from bcp.plan.read.copies import Chunk
from bcp.plan.shards import KINDS
from bcp.protocols import Agreement, Backend
from bcp.runtime.threads import in_thread, in_thread_gc_paused
from bcp.stages.items import ReadItem, Stored
from bcp.stages.load import check, decoded
from bcp.stages.memcpy import bytes_of
from bcp.telemetry.store import FOLDER as TELEMETRY

__all__ = [
    "RESTARTS",
    "asks_if_replaced",
    "check_stored",
    "checked",
    "fetch",
    "fetch_receipts",
    "file_of",
    "open_checkpoint",
    "own_item",
    "say_if_replaced",
]


def file_of(metadata: Metadata, receipt: Receipt, kind: int) -> tuple[str, FileReceipt]:
    """Return key and receipt of a rank's data file, if codecs and blocks are those of the commit record.

    Raises CorruptError if the receipt lacks the file, or describes it in another way than the metadata.
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
    has_units = KINDS[kind] == "dataloader" and any(object_kind == KINDS[kind] for object_kind, _ in receipt.objects)
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
    """Read the last byte of every file with more than ``2 * most`` bytes to read at once.

    Blocks as ``bcp.save`` makes them are far smaller, so that an honest checkpoint costs no read.

    Raises CorruptError if the file is shorter than its receipt says; no memory was taken for it.
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


SHOWN = 10  # names in an error message
STEP = re.compile(r"\d$|^(latest|last|best|final)$")
"""Names of checkpoints of a run: ``step-1000``, ``100``, ``latest``. Others may be roles: ``actor``."""

RECEIPTS_AT_ONCE = 16
RESTARTS = 8
"""Times that a load begins again because a save has replaced the checkpoint under it."""


async def open_checkpoint(agreement: Agreement, job: LoadJob) -> Metadata:
    """Let rank 0 read the metadata, check it, and send it to all ranks: one GET for the whole job."""

    async def answer(_: Sequence[bytes]) -> bytes:
        data = await _read_metadata(job.backend, job.path)
        await in_thread_gc_paused(decode_metadata, data, where)
        return Opened(job.watch.trace, data).encode()

    where = f"{job.path}/{METADATA_KEY}"
    opened = Opened.decode(await gather_broadcast(agreement, "open", job.rank, b"", answer), sender=0)
    metadata = await in_thread_gc_paused(decode_metadata, opened.metadata, where)
    job.watch.join(metadata.commit.operation, opened.trace, metadata.commit.created)
    return metadata


async def _read_metadata(backend: Backend, path: str) -> bytes:
    try:
        return bytes(await get_small(backend, METADATA_KEY))
    except FileNotFoundError:
        keys = [info.key for info in await backend.list()]
    below = {key.removesuffix("/" + METADATA_KEY) for key in keys if key.endswith("/" + METADATA_KEY)}
    if below:
        raise NotACheckpointError(f"{path} holds {_below(path, below)}")
    saved = [key for key in keys if not key.startswith(TELEMETRY)]
    if any(operation_of(key) for key in saved):
        raise UncommittedError(
            f"{path} holds data of a save that never committed ({len(saved)} files, no {METADATA_KEY}): the job died "
            "or is still saving; load an older checkpoint"
        )
    words = await foreign_words(backend, path, saved)
    raise NotACheckpointError(words or f"{path} is not a checkpoint: it has no {METADATA_KEY}; check the path")


def _below(path: str, names: Collection[str]) -> str:
    """Say which checkpoints lie below a path, and how to load one: steps of a run are not taken for roles."""
    checkpoints = {name.partition("/")[0] for name in names}
    ordered = sorted(checkpoints, key=lambda name: [(len(run), run) for run in re.split(r"(?<=\D)(?=\d)", name)])
    if any("/" in name or STEP.search(name) for name in names):
        return f"checkpoints {_first(ordered)}; pass one of them, as in {path}/{ordered[-1]}"
    return f"no checkpoint of its own, but roles below it: {_first(ordered)}; pass role=..."


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def asks_if_replaced(job: LoadJob, metadata: Metadata, *, is_last: bool) -> Callable[[], Awaitable[bool]]:
    """Return a function that asks storage whether another save has replaced the opened checkpoint.

    If ``is_last``, it answers no: the load is not begun again, and raises what it meets.
    """

    async def ask() -> bool:
        return not is_last and await _winner(job.backend, metadata) != ""

    return ask


async def _winner(backend: Backend, metadata: Metadata) -> str:
    """Return the operation that has replaced a checkpoint; empty if there is none, or none that is known."""
    try:
        now = await read_committed(backend)
    except (BcpError, OSError):
        return ""
    return "" if now.operation == metadata.commit.operation else now.operation


@asynccontextmanager
async def say_if_replaced(backend: Backend, metadata: Metadata, path: str) -> AsyncIterator[None]:
    """Add a note to a CorruptError if a save has replaced the checkpoint meanwhile, and deleted its files."""
    try:
        yield
    except CorruptError as error:
        if winner := await _winner(backend, metadata):
            error.add_note(
                f"Operation {winner} has replaced the checkpoint at {path} during this load, and its files were "
                f"deleted, {RESTARTS + 1} times in a row. Nothing has to be restored: load again when fewer saves go "
                "there."
            )
        raise


@dataclass(frozen=True, slots=True)
class _ReceiptToFetch:
    """A receipt to fetch, as an item of a graph."""

    rank: int
    name: str
    nbytes: int = 1


async def fetch_receipts(backend: Backend, metadata: Metadata, ranks: Iterable[int]) -> dict[int, Receipt]:
    """Read the receipts of those ranks, and check them against the commit record."""

    async def fetch(wanted: _ReceiptToFetch) -> Receipt:
        return await _fetch_receipt(backend, metadata, wanted.rank)

    start: Pipeline[_ReceiptToFetch, _ReceiptToFetch] = Pipeline()
    wanted = [_ReceiptToFetch(rank, receipt_key(rank, metadata.commit.operation)) for rank in sorted(set(ranks))]
    graph = start.then(Stage("receipts", fetch, workers=RECEIPTS_AT_ONCE))
    receipts = await graph.run(wanted, budget=Budget(max(len(wanted), 1)))
    return {receipt.rank: receipt for receipt in receipts}


async def _fetch_receipt(backend: Backend, metadata: Metadata, rank: int) -> Receipt:
    commit = metadata.commit
    key = receipt_key(rank, commit.operation)
    try:
        data = await get_small(backend, key)
    except FileNotFoundError as error:
        raise CorruptError(
            f"{key} is missing, but operation {commit.operation} was committed with it; restore it"
        ) from error
    if receipt_digest(data) != commit.receipt(rank):
        raise CorruptError(f"{key} is not the receipt that operation {commit.operation} was committed with; restore it")
    receipt = decode_receipt(data, key)
    if receipt.rank != rank:
        raise CorruptError(f"{key} is the receipt of rank {receipt.rank}, not of rank {rank}; restore it")
    return receipt
