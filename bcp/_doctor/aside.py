"""Work that may hang in the kernel, as that of a file system whose server is gone, and must not hold up the doctor."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

from bcp._loop import Loop

__all__ = ["aside"]

T = TypeVar("T")

_loops: list[Loop] = []


async def aside(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Let a coroutine run in an event loop on another thread; return its result.

    Work that has to end and does not is left alone: its thread ends with the process, by
    :func:`bcp._doctor.leave`.

    Raises:
        TimeoutError: it takes longer.

    """
    if not _loops:
        _loops.append(Loop())
    future = asyncio.run_coroutine_threadsafe(work, _loops[0].asyncio_loop)
    with anyio.fail_after(seconds):
        return await asyncio.wrap_future(future)
