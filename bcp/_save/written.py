"""The files that each rank says it has written, and whether storage has them."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator, Sequence

from bcp.errors import CorruptError, StorageError
from bcp.metadata import data_key, receipt_key
from bcp.pipeline import planning
from bcp.protocols import Backend, ObjectInfo
from bcp.receipt import Receipt

__all__ = ["check_written", "data_nbytes", "encode_written", "receipt_digests"]

_RECEIPT = struct.Struct("<16sI")  # digest, bytes
_FILE = struct.Struct("<BQ")  # code of the kind, bytes as stored
_SHOWN = 3


def encode_written(receipt: Receipt, digest: bytes, nbytes: int) -> bytes:
    """Return a rank's message for the commit: digest and size of its receipt, and its files' sizes.

    20 bytes, and 9 for each file.
    """
    files = [_FILE.pack(file.kind, file.stored_nbytes) for file in receipt.files]
    return _RECEIPT.pack(digest, nbytes) + b"".join(files)


def receipt_digests(messages: Sequence[bytes]) -> bytes:
    """Return the digests of all ranks' receipts, in the order of the ranks."""
    return b"".join(_RECEIPT.unpack_from(message)[0] for message in messages)


def data_nbytes(messages: Sequence[bytes]) -> int:
    """Return the bytes that all ranks wrote into data files."""
    return sum(stored for message in messages for _, stored in _FILE.iter_unpack(message[_RECEIPT.size :]))


async def check_written(
    backend: Backend,
    path: str,
    messages: Sequence[bytes],
    listed: Sequence[ObjectInfo],
    operation: str,
    *,
    encoded: bool,
) -> None:
    """Check that every file is there, with its size.

    A list may be older than the files: clients of a file server keep names and sizes for a while. So a file that the
    list does not have as it was written is read before it counts as missing.

    Raises:
        StorageError: a file is missing or has another size; names the first ones.

    """
    wrong = await planning(_differences, messages, listed, operation, encoded)
    lost = [info async for info in _lost(backend, wrong)]
    if lost:
        raise StorageError(
            f"{path}: files of operation {operation} are not there as they were written: "
            f"{', '.join(f'{info.key} ({info.nbytes} bytes)' for info in lost)}. The save was not committed. They were "
            "deleted, cut or moved away while it ran; find out by whom, and save again"
        )


def _differences(
    messages: Sequence[bytes],
    listed: Sequence[ObjectInfo],
    operation: str,
    encoded: bool,  # noqa: FBT001 -- for a thread
) -> list[ObjectInfo]:
    """Return the written files that the list does not have as they are."""
    sizes = {info.key: info.nbytes for info in listed}
    written = (
        info for rank, message in enumerate(messages) for info in _files(rank, message, operation, encoded=encoded)
    )
    return [info for info in written if sizes.get(info.key) != info.nbytes]


def _files(rank: int, message: bytes, operation: str, *, encoded: bool) -> Iterator[ObjectInfo]:
    _, nbytes = _RECEIPT.unpack_from(message)
    yield ObjectInfo(receipt_key(rank, operation), nbytes)
    for kind, stored in _FILE.iter_unpack(message[_RECEIPT.size :]):
        yield ObjectInfo(data_key(kind, rank, operation, encoded=encoded), stored)


async def _lost(backend: Backend, wrong: Sequence[ObjectInfo]) -> AsyncIterator[ObjectInfo]:
    """Yield the first few files that are not as they were written."""
    count = 0
    for info in wrong:
        if not await _ends_there(backend, info):
            yield info
            count += 1
            if count == _SHOWN:
                return


async def _ends_there(backend: Backend, info: ObjectInfo) -> bool:
    """Return whether an object has that many bytes, by reading the last one and one behind it."""
    try:
        await backend.read_into(info.key, max(info.nbytes - 1, 0), memoryview(bytearray(min(info.nbytes, 1))))
    except (FileNotFoundError, CorruptError):
        return False
    try:
        await backend.read_into(info.key, info.nbytes, memoryview(bytearray(1)))
    except CorruptError:
        return True
    except FileNotFoundError:
        return False
    return False
