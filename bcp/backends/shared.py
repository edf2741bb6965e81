"""Shared file systems: their names, and the caches of their clients. Everything here blocks.

A client of a file server keeps names, absent names and attributes for up to some minutes. It asks the server when it
opens a file or a directory (close-to-open). It repeats a call if the answer was lost, and the second answer then tells
of the first call's work: ENOENT for a rename, EEXIST for a link. A file or directory that another host has deleted is
stale (ESTALE).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from bcp.backends.libc import file_system_type

__all__ = ["Tries", "certain", "is_shared", "open_anew"]

T = TypeVar("T")

_FUSE = 0x65735546
_SHARED = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    0x5346414F: "AFS",
    0x6B414653: "kAFS",
    0x01021997: "9P",
    _FUSE: "FUSE",
}
"""``f_type`` of statfs(2). Not Lustre, CephFS, GPFS and other cluster file systems: they are made for direct I/O."""

_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs")
"""FUSE file systems over a disk of this host; all others are taken for shared ones."""

_TRIES = 3
_known: dict[int, bool] = {}


def is_shared(path: Path | int) -> bool:
    """Return whether a file or directory, or its descriptor, is on a file server. The first call for each asks it."""
    device = os.stat(path).st_dev  # noqa: PTH116 -- a descriptor, too
    if device not in _known:
        kind = file_system_type(path)
        _known[device] = kind in _SHARED and not (kind == _FUSE and _mounted_as(device) in _LOCAL_FUSE)
    return _known[device]


def _mounted_as(device: int) -> str:
    """Return the type of a mount, as in ``fuse.sshfs``; empty if it cannot be found."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2] == number:
                return after.split()[0]
    return ""


def open_anew(folder: Path) -> None:
    """Open a directory and close it: a client then asks the server for its names again."""
    with suppress(OSError):  # it is absent, or may not be read
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


class Tries:
    """Decides whether a call is to be made again, after an error that a client's memory may have caused.

    Once for an absent file, a few times for a stale one. The directories above are opened anew before.
    """

    def __init__(self, path: Path) -> None:
        """Take the file that is looked for."""
        self._path = path
        self._absent = 1
        self._stale = _TRIES - 1

    def again(self, error: OSError) -> bool:
        """Return whether to try again. Blocks."""
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            self._absent -= 1
            left = self._absent
        elif error.errno == errno.ESTALE:
            self._stale -= 1
            left = self._stale
        else:
            return False
        if left < 0:
            return False
        for folder in reversed(self._path.parents):
            open_anew(folder)
        return True


def certain(path: Path, call: Callable[[], T]) -> T:
    """Return ``call()``, which finds or reads ``path``, whatever the client remembers. It begins anew each time."""
    tries = Tries(path)
    while True:
        try:
            return call()
        except OSError as error:
            if not tries.again(error):
                raise
