"""The written files as ranks tell them to rank 0, and the last check before a commit (paper sec. 5.2)."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator, Sequence

from bcp._messages.base import refused
from bcp._messages.planning import Written
from bcp.errors import CorruptError, StorageError
from bcp.format.metadata import data_key, receipt_key
from bcp.format.receipt import Receipt
from bcp.plan.shards import KINDS
from bcp.protocols import Backend, ObjectInfo
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["check_written", "data_nbytes", "decode_written", "encode_written"]

_FILE = struct.Struct("<BQ")  # code of the kind, bytes as stored
_SHOWN = 3


def encode_written(receipt: Receipt, digest: bytes, nbytes: int) -> bytes:
    """Return a rank's message for the commit: digest and size of its receipt, and its files' sizes."""
    files = [_FILE.pack(file.kind, file.own_nbytes) for file in receipt.files if not file.kept]
    packed = [_FILE.pack(file.kind, file.own_nbytes) for file in receipt.files if file.kept]
    return Written(digest, nbytes, b"".join(files), b"".join(packed), tuple(sorted(receipt.refers))).encode()


def decode_written(messages: Sequence[bytes]) -> list[Written]:
    """Decode :func:`encode_written` of every rank, by rank.

    Raises MessageError if a message cannot be decoded, or has a file of no known kind.
    """
    all_written = Written.decode_all(messages)
    for rank, written in enumerate(all_written):
        if any(kind >= len(KINDS) for kind, _ in _FILE.iter_unpack(written.files + written.packed)):
            raise refused("Written", messages[rank], "a file is of no known kind", rank)
    return all_written


def data_nbytes(all_written: Sequence[Written]) -> int:
    """Return the bytes that all ranks wrote into data files."""
    return sum(stored for written in all_written for _, stored in _FILE.iter_unpack(written.files + written.packed))


async def check_written(
    backend: Backend,
    path: str,
    all_written: Sequence[Written],
    listed: Sequence[ObjectInfo],
    operation: str,
    *,
    encoded: bool,
) -> None:
    """Check that every file is there, with its size.

    A list may be older than the files: clients of a file server keep names and sizes for a while. So a file that the
    list does not have as it was written is read before it counts as missing.

    Raises StorageError, which names the first such files, if files are missing or have another size.
    """
    wrong = await in_thread_gc_paused(_differences, all_written, listed, operation, encoded)
    lost = [info async for info in _lost(backend, wrong)]
    if lost:
        raise StorageError(
            f"{path}: files of operation {operation} are not there as they were written: "
            f"{', '.join(f'{info.key} ({info.nbytes} bytes)' for info in lost)}. The save was not committed. They were "
            "deleted, cut or moved away while it ran; find out by whom, and save again"
        )


def _differences(
    all_written: Sequence[Written],
    listed: Sequence[ObjectInfo],
    operation: str,
    encoded: bool,  # noqa: FBT001 -- for a thread
) -> list[ObjectInfo]:
    """Return the written files that the list does not have as they are."""
    sizes = {info.key: info.nbytes for info in listed}
    written = (
        info for rank, written in enumerate(all_written) for info in _files(rank, written, operation, encoded=encoded)
    )
    return [info for info in written if sizes.get(info.key) != info.nbytes]


def _files(rank: int, written: Written, operation: str, *, encoded: bool) -> Iterator[ObjectInfo]:
    yield ObjectInfo(receipt_key(rank, operation), written.nbytes)
    for kind, stored in _FILE.iter_unpack(written.files):
        yield ObjectInfo(data_key(kind, rank, operation, encoded=encoded), stored)
    for kind, stored in _FILE.iter_unpack(written.packed):
        yield ObjectInfo(data_key(kind, rank, operation, encoded=True), stored)


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
        pass
    return False
