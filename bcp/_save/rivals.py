"""Other jobs that save to the same path: their commit is the true reason of many a failure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bcp.errors import BcpError, CheckpointError, ExistsError, StorageError
from bcp.metadata import METADATA_KEY, decode_metadata
from bcp.pipeline import planning
from bcp.protocols import Backend, Version

__all__ = ["check_not_replaced", "not_replaced", "taken"]


@asynccontextmanager
async def not_replaced(backend: Backend, path: str, operation: str, found: Version | None) -> AsyncIterator[None]:
    """Raise ExistsError in place of a storage error if another job has committed meanwhile.

    A commit deletes the files of older saves, so writes of a save that cannot commit any more may fail in any way.
    """
    try:
        yield
    except StorageError as error:
        await check_not_replaced(backend, path, operation, found, error)
        raise


async def check_not_replaced(
    backend: Backend, path: str, operation: str, found: Version | None, error: StorageError
) -> None:
    """Raise ExistsError because of ``error`` if the metadata is not the one that this save found."""
    try:
        now = await backend.version(METADATA_KEY)
    except BcpError:  # storage does not answer at all; the first error says why
        return
    if now not in (found, None):
        raise await taken(backend, path, operation, found) from error


async def taken(backend: Backend, path: str, operation: str, found: Version | None) -> CheckpointError | StorageError:
    """Return the error of a save whose place another job has taken."""
    advice = "this save was not committed. Give every job a path of its own, or save again with overwrite=True"
    try:
        data = await backend.get(METADATA_KEY)
    except FileNotFoundError:
        return StorageError(
            f"{path}: the checkpoint that operation {operation} was to replace was deleted or moved away meanwhile; "
            "this save was not committed. Save again"
        )
    if await backend.version(METADATA_KEY) == found:
        return ExistsError(f"another job is committing a checkpoint at {path}, as is operation {operation}; {advice}")
    try:
        winner = f"operation {(await planning(decode_metadata, data, path)).commit.operation}"
    except CheckpointError:
        winner = "an operation with metadata that cannot be read"
    return ExistsError(
        f"another job committed a checkpoint at {path}, {winner}, while operation {operation} was saving there; "
        f"{advice}"
    )
