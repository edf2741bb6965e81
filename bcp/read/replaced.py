"""A save may replace a checkpoint while it is read, and delete its files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from bcp._deletion import read_committed
from bcp.errors import BcpError, CorruptError
from bcp.read.source import Source

__all__ = ["asks_if_replaced", "say_if_replaced"]


def asks_if_replaced(source: Source, *, is_last: bool) -> Callable[[], Awaitable[bool]]:
    """Return a function that asks storage whether another save has replaced the opened checkpoint.

    If ``is_last``, it answers no: the load is not begun again, and raises what it meets.
    """

    async def ask() -> bool:
        return not is_last and await _winner(source) != ""

    return ask


async def _winner(source: Source) -> str:
    """Return the operation that has replaced a checkpoint; empty if there is none, or none that is known."""
    try:
        now = await read_committed(source.backend)
    except (BcpError, OSError):
        return ""
    return "" if now.operation == source.metadata.commit.operation else now.operation


@asynccontextmanager
async def say_if_replaced(source: Source, times: int = 1) -> AsyncIterator[None]:
    """Add a note to a CorruptError if a save has replaced the checkpoint since it was opened, and deleted its files.

    ``times``: how often the reader has opened it and met this.
    """
    try:
        yield
    except CorruptError as error:
        if winner := await _winner(source):
            often = f", {times} times in a row" if times > 1 else ""
            error.add_note(
                f"Operation {winner} has replaced the checkpoint at {source.path} since it was opened, and its files "
                f"were deleted{often}. Nothing has to be restored: open it again when fewer saves go there."
            )
        raise
