"""All changes of a tree of directories, in the order in which they happen, from outside: inotify."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Change", "Watch"]

MODIFY, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
OVERFLOW, IGNORED, IS_FOLDER = 0x4000, 0x8000, 0x40000000
MASK = MOVED_FROM | MOVED_TO | CREATE | DELETE
_HEAD = struct.Struct("iIII")
_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Change:
    """A name that appears or disappears.

    Attributes:
        path: relative to the tree's root; that of a directory ends in a slash.
        made: whether it appears.
    """

    path: str
    made: bool


class Watch:
    """Watches a tree. Directories that appear are watched as well; names in them are never told twice.

    The kernel puts the changes of all directories into one queue. A file that appears before its new directory is
    watched is told when the watch begins. One that appears and disappears before is missed.
    """

    def __init__(self, root: Path, *, log: Path) -> None:
        """Begin to watch.

        Args:
            root: of the tree; an empty directory.
            log: directory of a file whose growth wakes the reader up, and is not told.

        Raises:
            OSError: inotify is not there, or has no room.

        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._root = root
        self._folders: dict[int, str] = {}
        self._known: set[str] = set()
        self._checked(self._libc.inotify_add_watch(self._fd, os.fsencode(log), MODIFY))
        for _ in self._add(""):
            raise OSError(f"{root} is not empty")

    def fileno(self) -> int:
        """Return what select() waits for."""
        return self._fd

    def close(self) -> None:
        """End the watch."""
        os.close(self._fd)

    def changes(self) -> Iterator[Change]:
        """Return the changes that have happened since the last call; waits for none.

        Raises:
            OSError: the kernel dropped changes, because there were too many of them.

        """
        while True:
            try:
                data = os.read(self._fd, _BYTES)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                number, mask, _, length = _HEAD.unpack_from(data, at)
                name = data[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0")
                at += _HEAD.size + length
                yield from self._told(number, mask, os.fsdecode(name))

    def _told(self, number: int, mask: int, name: str) -> Iterator[Change]:
        """Return the changes of one event."""
        if mask & OVERFLOW:
            raise OSError("inotify has dropped changes")
        if mask & IGNORED:
            self._folders.pop(number, None)
        elif number in self._folders and mask & MASK:
            path = self._folders[number] + name + ("/" if mask & IS_FOLDER else "")
            yield from self._made(path) if mask & (CREATE | MOVED_TO) else self._gone(path)

    def _made(self, path: str) -> Iterator[Change]:
        if path in self._known:
            return
        self._known.add(path)
        yield Change(path, made=True)
        if path.endswith("/"):
            yield from self._add(path)

    def _gone(self, path: str) -> Iterator[Change]:
        if path in self._known:
            self._known.remove(path)
            yield Change(path, made=False)

    def _add(self, path: str) -> Iterator[Change]:
        """Watch a directory, and return the changes for all that is in it already."""
        folder = self._root / path
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), MASK)
        if number < 0 and not folder.exists():
            return  # it has gone since; its event comes later
        self._folders[self._checked(number)] = path
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            yield from self._made(path + entry.name + ("/" if entry.is_dir(follow_symlinks=False) else ""))

    def _checked(self, number: int) -> int:
        if number < 0:
            raise OSError(ctypes.get_errno(), f"inotify: {os.strerror(ctypes.get_errno())}")
        return number
