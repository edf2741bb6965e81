"""The files of one host in one save go from its memory to durable storage (paper sec. 3.1, Gemini's tier).

Marked files do not change, and their names have the operation. So any host that has them may send them, any number of
times. Every step leaves what a repetition finds: digests in a receipt beside the files, the receipt in storage behind
the files that it describes, and a record behind all receipts of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from bcp._messages.tiers import Drained
from bcp._written import encode_written
from bcp.backends.small import get_small
from bcp.errors import CorruptError, MessageError
from bcp.format.metadata import receipt_key
from bcp.format.receipt import FileReceipt, Receipt, decode_receipt, receipt_digest
from bcp.pipeline import Pipeline, Stage
from bcp.protocols import Backend, PartWriter, at_once_of
from bcp.read.windows import Window, windows_of, wrong_block
from bcp.runtime.threads import in_thread
from bcp.tiers.digests import PART_BYTES, digested, key_of, read_window, run_windows
from bcp.tiers.folder import Held
from bcp.tiers.records import record_key

__all__ = ["drain"]


async def drain(
    files: Backend, held: Sequence[Held], store: Backend, node: str, is_left: Callable[[], bool] = bool
) -> None:
    """Make the marked files of one host durable, and say so in a record behind them.

    Args:
        files: the host's memory.
        held: the files of its ranks in one save, which nobody takes away meanwhile.
        store: at the place of the checkpoint.
        node: name of the host, as part of a key.
        is_left: whether the save was given up meanwhile; then no record is written.

    Raises:
        CorruptError: a file in memory is missing, or has other bytes than when it was digested.
        StorageError: storage failed.

    """
    key, ranks = record_key(node, held[0].blank.operation), tuple(each.blank.rank for each in held)
    with suppress(FileNotFoundError, MessageError):
        drained = Drained.decode(bytes(await get_small(store, key)))
        if drained.ranks == ranks and await _are_there(store, [each.blank for each in held]):
            return
    written = [await _drain_rank(files, each.blank, store) for each in held]
    if not await in_thread(is_left):
        await store.put(key, Drained(ranks, tuple(written)).encode())


async def _are_there(store: Backend, blanks: Sequence[Receipt]) -> bool:
    """Whether storage lists all files of these ranks: somebody may have deleted some behind the record."""
    listed = {info.key for info in await store.list()}
    keys = {key_of(blank, file) for blank in blanks for file in blank.files}
    return keys | {receipt_key(blank.rank, blank.operation) for blank in blanks} <= listed


async def _drain_rank(files: Backend, blank: Receipt, store: Backend) -> bytes:
    """Send the files of one rank, and last their receipt; return what the rank would tell rank 0."""
    data = await digested(files, blank)
    receipt = decode_receipt(data, receipt_key(blank.rank, blank.operation))
    if not (await _is_there(store, blank, data) and await _are_there(store, [blank])):
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


# -- the way to storage ----------------------------------------------------------------------------


async def _send(files: Backend, blank: Receipt, file: FileReceipt, store: Backend) -> None:
    """Send a file by parts; every block is compared with its digest on its way."""
    key = key_of(blank, file)
    windows = windows_of(key, file, PART_BYTES)
    number = {window.name: index for index, window in enumerate(windows)}

    async def send(writer: PartWriter, window: Window) -> None:
        memory = await read_window(files, window)
        if wrong := await in_thread(wrong_block, window, memory):
            raise CorruptError(f"a file in memory has changed since its digest was made: {wrong}")
        await writer.write_part(number[window.name], window.start, memory)

    async with store.open_write(key, file.stored_nbytes) as writer:
        start: Pipeline[Window, Window] = Pipeline()
        await run_windows(start.then(Stage("send", partial(send, writer), workers=at_once_of(store))), windows)
