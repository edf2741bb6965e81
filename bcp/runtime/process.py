"""Process-wide state in forked children: bcp's one hook after a fork.

Dataloaders fork while a save runs in the background. A child has a copy of the memory, but of all threads only the one
that forked. A lock that another thread held at this moment would stay locked in the child for ever. So every lock of
bcp is made here, and is open in a child. Caches, loops and pools that belong to the parent register a hook.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

__all__ = ["in_forked_child", "process_lock", "process_rlock"]

Hook = TypeVar("Hook", bound=Callable[[], object])

_locks: WeakSet[Any] = WeakSet()
_hooks: list[Callable[[], object]] = []


def process_lock() -> threading.Lock:
    """Return a lock that is open in a forked child, even if a thread of the parent holds it."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def process_rlock() -> threading.RLock:
    """Return a re-entrant lock of this kind, for code that a signal handler may interrupt and enter again."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def in_forked_child(hook: Hook) -> Hook:
    """Call a function in every forked child, in the order of registration, once the locks are open."""
    _hooks.append(hook)
    return hook


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # noqa: SLF001 -- as in the standard library: a new lock would not reach those who use it
    for hook in _hooks:
        hook()


os.register_at_fork(after_in_child=_after_fork_in_child)
