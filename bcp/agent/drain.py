"""The files of one host in one save go from its memory to durable storage (paper sec. 3.1, Gemini's tier).

Marked files do not change, and their names have the operation. So any host that has them may send them, any number of
times. Every step leaves what a repetition finds: digests in a receipt beside the files, the receipt in storage behind
the files that it describes, and a record behind all receipts of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from bcp._messages.tiers import Drained
from bcp._written import encode_written
from bcp.backends.small import get_small
from bcp.errors import CheckpointError, CorruptError, MessageError
from bcp.format.checksums import digests
from bcp.format.metadata import data_key, receipt_key
from bcp.format.receipt import Blocks, FileReceipt, Receipt, decode_receipt, encode_receipt, receipt_digest
from bcp.pipeline import Budget, Pipeline, Stage, unwrap_stage_errors
from bcp.protocols import Backend, PartWriter, at_once_of
from bcp.read.windows import Window, windows_of, wrong_block
from bcp.runtime.threads import in_thread
from bcp.tiers.folder import Held

__all__ = ["DRAIN", "PART_BYTES", "drain", "record_key"]

T = TypeVar("T")

DRAIN = "drain/"
"""Where records are, until their save is committed."""

PART_BYTES = 8 << 20
"""Bytes that are read, compared and sent at once. An agent has about so many for each part on its way."""


@dataclass(frozen=True, slots=True)
class Digested:
    """The digests of the blocks of a window."""

    window: Window
    checksums: tuple[bytes, ...]


def record_key(node: str, operation: str) -> str:
    """Return the key of the record of a host, whose files of a save are all in storage."""
    return f"{DRAIN}{node}-{operation}"


async def drain(files: Backend, held: Sequence[Held], store: Backend, node: str) -> None:
    """Make the marked files of one host durable, and say so in a record behind them.

    Args:
        files: the host's memory.
        held: the files of its ranks in one save, which nobody takes away meanwhile.
        store: at the place of the checkpoint.
        node: name of the host, as part of a key.

    Raises:
        CorruptError: a file in memory is missing, or has other bytes than when it was digested.
        StorageError: storage failed.

    """
    key, ranks = record_key(node, held[0].blank.operation), tuple(each.blank.rank for each in held)
    with suppress(FileNotFoundError, MessageError):
        if Drained.decode(bytes(await get_small(store, key))).ranks == ranks:
            return
    written = [await _drain_rank(files, each.blank, store) for each in held]
    await store.put(key, Drained(ranks, tuple(written)).encode())


async def _drain_rank(files: Backend, blank: Receipt, store: Backend) -> bytes:
    """Send the files of one rank, and last their receipt; return what the rank would tell rank 0."""
    data = await _digested(files, blank)
    receipt = decode_receipt(data, receipt_key(blank.rank, blank.operation))
    if not await _is_there(store, blank, data):
        for file in receipt.files:
            await _send(files, blank, file, store)
        await store.put(receipt_key(blank.rank, blank.operation), data)
    return encode_written(receipt, receipt_digest(data), len(data))


async def _is_there(store: Backend, blank: Receipt, data: bytes) -> bool:
    """Whether this receipt is in storage, and so are its files, which were sent before."""
    try:
        return bytes(await get_small(store, receipt_key(blank.rank, blank.operation))) == data
    except (FileNotFoundError, CorruptError):
        return False


# -- digests ---------------------------------------------------------------------------------------


async def _digested(files: Backend, blank: Receipt) -> bytes:
    """Return the receipt of a rank; digest its files, unless that was done before."""
    key = receipt_key(blank.rank, blank.operation)
    try:
        data = bytes(await get_small(files, key))
        if _is_of(decode_receipt(data, key), blank):
            return data
    except (FileNotFoundError, CheckpointError):
        pass
    made = [await _digested_file(files, blank, file) for file in blank.files]
    data = encode_receipt(replace(blank, files=made))
    await files.put(key, data)
    return data


def _is_of(receipt: Receipt, blank: Receipt) -> bool:
    """Whether a receipt differs from a blank one in nothing but digests."""
    return encode_receipt(replace(receipt, files=[_blanked(file) for file in receipt.files])) == encode_receipt(blank)


def _blanked(file: FileReceipt) -> FileReceipt:
    return replace(file, blocks=replace(file.blocks, checksum=[bytes(16)] * len(file.blocks)))


async def _digested_file(files: Backend, blank: Receipt, file: FileReceipt) -> FileReceipt:
    windows = windows_of(_key(blank, file), file, PART_BYTES)

    async def run(window: Window) -> Digested:
        memory = await _read(files, window)
        return Digested(window, await in_thread(_digests, window, memory))

    start: Pipeline[Window, Window] = Pipeline()
    done = await _run(start.then(Stage("digest", run, workers=2)), windows)
    checksums = [checksum for each in done for checksum in each.checksums]
    return replace(file, blocks=Blocks.build(file.blocks.stored_length, file.blocks.raw_length, checksums))


def _digests(window: Window, memory: memoryview) -> tuple[bytes, ...]:
    return tuple(digests([memory], window.file.blocks.stored_length[window.rows].tolist()))


# -- the way to storage ----------------------------------------------------------------------------


async def _send(files: Backend, blank: Receipt, file: FileReceipt, store: Backend) -> None:
    """Send a file by parts; every block is compared with its digest on its way."""
    key = _key(blank, file)
    windows = windows_of(key, file, PART_BYTES)
    number = {window.name: index for index, window in enumerate(windows)}

    async def send(writer: PartWriter, window: Window) -> None:
        memory = await _read(files, window)
        if wrong := await in_thread(wrong_block, window, memory):
            raise CorruptError(f"a file in memory has changed since its digest was made: {wrong}")
        await writer.write_part(number[window.name], window.start, memory)

    async with store.open_write(key, file.stored_nbytes) as writer:
        start: Pipeline[Window, Window] = Pipeline()
        await _run(start.then(Stage("send", partial(send, writer), workers=at_once_of(store))), windows)


def _key(blank: Receipt, file: FileReceipt) -> str:
    return data_key(file.kind, blank.rank, blank.operation, encoded=bool(file.codecs))


async def _read(files: Backend, window: Window) -> memoryview:
    memory = memoryview(bytearray(window.nbytes))
    try:
        await files.read_into(window.key, window.start, memory)
    except FileNotFoundError as error:
        raise CorruptError(f"{window.key} has gone from {files!r}, though its mark is there") from error
    return memory


async def _run(graph: Pipeline[Window, T], windows: Sequence[Window]) -> list[T]:
    """Run windows through a graph, with room for so many as its stage works on at once."""
    largest = max((window.nbytes for window in windows), default=1)
    with unwrap_stage_errors():
        return await graph.run(windows, budget=Budget(max(largest, PART_BYTES) * 4))
