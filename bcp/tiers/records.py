"""Records of uploads: a host says in storage that its files of a save are all there, until the save is committed.

Without the records of all hosts nobody commits. So whoever deletes them ends a save that is not committed yet.
"""

from __future__ import annotations

from bcp._deletion import delete_unnamed
from bcp.format.metadata import DRAIN
from bcp.protocols import Backend, ObjectInfo

__all__ = ["forget_records", "record_key", "records_of"]


def record_key(node: str, operation: str) -> str:
    """Return the key of the record of a host, whose files of a save are all in storage.

    Example:
        >>> record_key("9f86d081884c7d65", "0123456789abcdef")
        'drain/9f86d081884c7d65-0123456789abcdef'

    """
    return f"{DRAIN}{node}-{operation}"


async def records_of(store: Backend, operation: str) -> list[ObjectInfo]:
    """List the records of a save, of all hosts.

    Raises:
        StorageError: storage failed.

    """
    return [info for info in await store.list(DRAIN) if info.key.endswith(f"-{operation}")]


async def forget_records(store: Backend, operation: str = "") -> int:
    """Delete the records of a save, or of all saves; return how many there were. They are no files of a checkpoint.

    Raises:
        StorageError: storage failed.

    """
    records = await (records_of(store, operation) if operation else store.list(DRAIN))
    if records:
        await delete_unnamed(store, [info.key for info in records])
    return len(records)
