"""Process-wide state in forked children: bcp's one hook after a fork. And an end that waits for nothing.

Dataloaders fork while a save runs in the background. A child has a copy of the memory, but of all threads only the one
that forked. A lock that another thread held at this moment would stay locked in the child for ever. So every lock of
bcp is made here, and is open in a child. Caches, loops and pools that belong to the parent register a hook. Work that
a child could not do again makes forks wait.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakSet

__all__ = ["cached_property", "fork_lock", "in_forked_child", "leave", "process_lock", "process_rlock"]

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


def fork_lock() -> threading.RLock:
    """Return a re-entrant lock that forks wait for: no child begins in the middle of another thread's work under it.

    The thread that holds it may fork, and its child holds it as well.
    """
    lock = threading.RLock()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property:  # noqa: N801 -- read as the standard library's
        """Compute an attribute at its first use, without a lock.

        Until Python 3.12, ``functools.cached_property`` has one lock for all objects of a class. A child that is forked
        while a thread computes the attribute inherits the lock as it is: taken for ever. Without a lock two threads may
        compute a value at once. All readers get the same object, which is the one stored first.
        """

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute = compute
            self._name = ""
            self.__doc__ = compute.__doc__

        def __set_name__(self, _owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, _owner: type | None = None) -> Any:
            return self if instance is None else vars(instance).setdefault(self._name, self._compute(instance))


def in_forked_child(hook: Hook) -> Hook:
    """Call a function in every forked child, in the order of registration, once the locks are open."""
    _hooks.append(hook)
    return hook


def leave(status: int) -> NoReturn:
    """End the process at once, without a wait for threads that hang in a file system or in a store."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it may be closed, and None if it was from the start
            stream.flush()
    os._exit(status)


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # noqa: SLF001 -- as in the standard library: a new lock would not reach those who use it
    for hook in _hooks:
        hook()


os.register_at_fork(after_in_child=_after_fork_in_child)
