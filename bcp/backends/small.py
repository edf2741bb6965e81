"""Small objects, which are read whole: metadata, receipts, ledgers, markers and recordings. Their sizes are bounded."""

from __future__ import annotations

from bcp.errors import CorruptError
from bcp.protocols import Backend, Buffer

__all__ = ["SMALL_BYTES", "check_small", "get_small"]

SMALL_BYTES = 1 << 30
"""Most bytes of a small object.

Metadata have 16 bytes for each rank's receipt, and a receipt has 16 bytes for each MiB of its data.
"""


def check_small(where: str, nbytes: int, most: int = SMALL_BYTES) -> None:
    """Refuse a small object that is too large, before memory is taken for it.

    Args:
        where: name of the object, for the message.
        nbytes: its size.
        most: the bound.

    Raises:
        CorruptError: ``nbytes`` is larger than the bound.

    """
    if nbytes > most:
        raise CorruptError(
            f"{where} has {nbytes} bytes, and {most} is the most for such a file: it was damaged, or another file has "
            "its name; move it away, and put the right one back"
        )


async def get_small(backend: Backend, key: str, most: int = SMALL_BYTES) -> Buffer:
    """Read a small object whole, whatever its size says.

    Args:
        backend: has the object. bcp's own look at the size before they read.
        key: the object.
        most: bytes that an object of this kind may have.

    Raises:
        CorruptError: the object is larger, or memory does not suffice for it.
        FileNotFoundError: there is no such object.
        StorageError: storage failed.

    """
    where = f"{backend!r}: {key!r}"
    try:
        data = await backend.get(key)
    except MemoryError as error:
        raise CorruptError(
            f"{where} does not fit into the memory of this host, and such a file has {most} bytes at most: compare its "
            "size with that of its neighbours, and put the right file back, or free memory"
        ) from error
    check_small(where, memoryview(data).nbytes, most)
    return data
