"""Many buffers filled by one read, from any backend."""

from __future__ import annotations

from collections.abc import Sequence

from bcp.backends.keys import scatter
from bcp.protocols import Backend, ScatterReader
from bcp.runtime.threads import in_thread

__all__ = ["read_scattered"]


async def read_scattered(backend: Backend, key: str, start: int, outs: Sequence[memoryview]) -> None:
    """Fill flat buffers; by one read and a copy where the backend fills only one at a time.

    One read, for to a backend over a network every read is a request.
    """
    if isinstance(backend, ScatterReader):
        await backend.read_scattered(key, start, outs)
    elif len(outs) == 1:
        await backend.read_into(key, start, outs[0])
    else:
        data = memoryview(bytearray(sum(map(len, outs))))
        await backend.read_into(key, start, data)
        await in_thread(scatter, data, outs)
