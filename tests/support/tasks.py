"""Ranks that are tasks of one event loop, for tests that need neither processes nor a process group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from bcp.coordinators import memory_coordinators
from bcp.protocols import Coordinator

__all__ = ["on_ranks"]


def on_ranks(count: int, call: Callable[[int, Coordinator], Awaitable[Any]]) -> list[Any]:
    """Make the call on so many ranks; return the results or errors, by rank."""

    async def run() -> list[Any]:
        calls = [call(rank, ranks) for rank, ranks in enumerate(memory_coordinators(count))]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(run())
