"""The event loop that awaits hdfs-native's reads and writes of large data, on a thread of its own.

hdfs-native's network code runs in threads of Rust. But it copies received bytes within the event loop that awaits them:
eight reads or writes at once stalled that loop for 50 to 80 ms, and for 300 ms on busy cores. Nothing else waits for
the loop of this module: stalls of the caller's loop were 5 to 30 ms (512 MiB, two cores shared with the servers).
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading

from bcp._loop import Loop

__all__ = ["transfer_loop"]

_lock = threading.Lock()
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
    global _lock, _current  # noqa: PLW0603 -- one a process
    if _current is not None:
        _inherited.append(_current)
    _lock = threading.Lock()
    _current = None


def _close_at_exit() -> None:
    if _current is not None:
        _current.close()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_close_at_exit)
