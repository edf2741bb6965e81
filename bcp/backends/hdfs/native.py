"""The event loop that awaits hdfs-native's reads of large data, on a thread of its own.

hdfs-native's network code runs in threads of Rust, but copies received bytes within the event loop that awaits them.
Eight reads at once stalled that loop for 50 to 80 ms, and for 300 ms on busy cores. Nothing else waits for
the loop of this module: stalls of the caller's loop were 5 to 30 ms (512 MiB, two cores shared with the servers).

Clients of hdfs-native: one a process and cluster, and none that a forked child could drop or mix up.

Three facts about hdfs-native 0.14 make this necessary. A client has threads, which a forked child does not: a client of
the parent hangs there, and so does the garbage collector when it drops one. A connection to a DataNode is kept after a
read, for three seconds and for all clients of a process. A child that read over its parent's connection would take the
parent's bytes, or leave its own there, and no checksum would detect it. A client serves any event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import time
from collections.abc import Mapping
from typing import Any

import anyio

from bcp.backends.hdfs.faults import hdfs_errors
from bcp.errors import MissingExtraError
from bcp.runtime.event_loop import Loop
from bcp.runtime.imports import importing
from bcp.runtime.process import in_forked_child, process_lock

__all__ = ["hdfs_native", "native_client", "transfer_loop", "wait_after_fork"]

KEPT_SECONDS = 3.0
"""How long hdfs-native keeps a connection to a DataNode; no setting of it."""

_clients: dict[tuple[object, ...], Any] = {}
_forked_at: float | None = None


def hdfs_native() -> Any:
    """Return the module hdfs_native."""
    try:
        with importing:
            import hdfs_native as native  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise MissingExtraError("hdfs:// needs hdfs-native: pip install 'bcp-checkpoint[hdfs]'") from error
    return native


def native_client(kind: type, url: str, settings: Mapping[str, str], config_dir: str | None) -> Any:
    """Return this process's client of a class and a cluster. It stays until the process ends."""
    user = os.environ.get("HADOOP_USER_NAME")
    key = (os.getpid(), kind, url, tuple(sorted(settings.items())), config_dir, user)
    client = _clients.get(key)
    if client is None:
        with hdfs_errors(f"connecting to {url}"):
            client = _clients[key] = kind(url, dict(settings), config_dir)
    return client


async def wait_after_fork() -> None:
    """Wait until a forked child has no connection to a DataNode that its parent might use; call before each read."""
    if _forked_at is not None:
        await anyio.sleep(max(_forked_at + KEPT_SECONDS + 0.1 - time.monotonic(), 0))


def _in_child() -> None:
    """Keep the parent's clients for ever: not even the end of the interpreter may drop them."""
    global _forked_at  # noqa: PLW0603 -- of the process, as the fork is
    if _clients:
        _forked_at = time.monotonic()
    for client in _clients.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


in_forked_child(_in_child)


_lock = process_lock()
_current: Loop | None = None
_inherited: list[Loop] = []


def transfer_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process, which the first call starts."""
    global _current  # noqa: PLW0603 -- one a process
    with _lock:
        if _current is None or not _current.thread.is_alive():
            _current = Loop("bcp-hdfs")
        return _current.asyncio_loop


def _forget_in_child() -> None:
    """Give a forked child a fresh start. The parent's loop is kept: both processes have its descriptors open."""
    global _current  # noqa: PLW0603 -- one a process
    if _current is not None:
        _inherited.append(_current)
    _current = None


def _close_at_exit() -> None:
    if _current is not None:
        _current.close()


in_forked_child(_forget_in_child)
atexit.register(_close_at_exit)
