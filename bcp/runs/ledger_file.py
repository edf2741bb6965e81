"""The file ``run.json`` in storage: read with its version, kept aside where it is broken, replaced conditionally."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from bcp._log import log
from bcp.backends.small import get_small
from bcp.errors import CorruptError, StorageError
from bcp.format.metadata import LEDGER_KEY
from bcp.protocols import Backend, Version
from bcp.runs.ledger import MOST_BYTES, Ledger
from bcp.runs.words import moment

__all__ = ["FIRST_KEY", "TRIES", "busy", "decoded", "put_ledger", "stored_ledger", "versioned"]

FIRST_KEY = "run.json.new"
"""Put beside the first ledger: ``put_if`` makes no directory."""

TRIES = 30


def busy(url: str, key: str = LEDGER_KEY) -> StorageError:
    """Return the error of a file that others change in every attempt."""
    return StorageError(
        f"{url}: {key} was changed by others in each of {TRIES} attempts; let one job at a time use the folder of a run"
    )


async def versioned(
    backend: Backend, url: str, key: str, read: Callable[[], Awaitable[bytes]]
) -> tuple[bytes | None, Version | None]:
    """Read a file that others may replace meanwhile; return it with a version that is not newer. None for no file.

    Args:
        backend: has the file.
        url: of the folder, for the message.
        key: name of the file.
        read: reads it.

    Raises:
        StorageError: storage failed, or the file was deleted between the two looks of each attempt.

    """
    for _ in range(TRIES):
        version = await backend.version(key)
        if version is None:
            return None, None
        with suppress(FileNotFoundError):  # deleted since
            return await read(), version
    raise busy(url, key)


async def stored_ledger(backend: Backend, url: str) -> tuple[bytes | None, Version | None]:
    """Return the stored ledger and a version that is not newer than it; None for none.

    A file too large to be read whole is no ledger. Its head is returned, with one byte more than a ledger may have.

    Raises:
        StorageError: storage failed.

    """

    async def read() -> bytes:
        try:
            return bytes(await get_small(backend, LEDGER_KEY))
        except CorruptError as error:
            head = bytearray(MOST_BYTES + 1)
            await backend.read_into(LEDGER_KEY, 0, memoryview(head))
            log.warning("only the head of a run's ledger is read", run=url, error=str(error))
            return bytes(head)

    return await versioned(backend, url, LEDGER_KEY, read)


async def decoded(backend: Backend, url: str, stored: bytes | None, now: float) -> Ledger | None:
    """Return the ledger of these bytes; None if they are none, after a copy of them was kept.

    Raises:
        FormatVersionError: a newer bcp has written the ledger.
        StorageError: storage failed.

    """
    if stored is None:
        return None
    try:
        return Ledger.from_bytes(stored, f"{url}/{LEDGER_KEY}")
    except CorruptError as error:
        copy = f"{LEDGER_KEY}.broken-{moment(now, '%Y%m%dT%H%M%S%f')}"
        log.warning(
            "the ledger of a run cannot be read and is made anew, without metrics and marks",
            run=url,
            error=str(error),
            copy=copy,
        )
        await backend.put(copy, stored)
        return None


async def put_ledger(backend: Backend, data: bytes, version: Version | None) -> Version | None:
    """Store a ledger in the place of that version; for the first one its directory is made.

    Returns:
        The new version; None if another ledger is there.

    Raises:
        StorageError: storage failed.

    """
    try:
        return await backend.put_if(LEDGER_KEY, data, version)
    except (StorageError, FileNotFoundError):
        if version is not None:
            raise
    await backend.put(FIRST_KEY, b"")
    made = await backend.put_if(LEDGER_KEY, data, None)
    await backend.delete([FIRST_KEY])
    return made
