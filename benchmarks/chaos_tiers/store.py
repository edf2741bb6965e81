"""A storage that falls silent: a file system in a file, which the kernel freezes. Writes wait until it is thawed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Self

__all__ = ["Store"]

NBYTES = 256 << 20


class Store:
    """A file system, mounted from when its context is entered until it is left.

    Attributes:
        folder: where it is mounted.
    """

    def __init__(self, folder: Path) -> None:
        """Take a directory that is not there."""
        self.folder, self._image, self._is_silent = folder, folder.with_suffix(".img"), False

    def __enter__(self) -> Self:
        """Make it.

        Raises:
            RuntimeError: this process may not mount, or a program is missing.

        """
        self._image.touch(exist_ok=False)
        with self._image.open("r+b") as file:
            file.truncate(NBYTES)
        self.folder.mkdir()
        _called("mkfs.ext4", "-q", str(self._image))
        _called("mount", "-o", "loop", str(self._image), str(self.folder))
        return self

    def __exit__(self, *_: object) -> None:
        """Take it away; processes that still use it keep it."""
        self.thaw()
        _called("umount", "--lazy", str(self.folder))

    def freeze(self) -> None:
        """Let all writes wait from now on."""
        _called("fsfreeze", "--freeze", str(self.folder))
        self._is_silent = True

    def thaw(self) -> None:
        """Let writes go on."""
        if self._is_silent:
            _called("fsfreeze", "--unfreeze", str(self.folder))
            self._is_silent = False


def _called(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- our own words
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is missing: install e2fsprogs and util-linux") from None
    if done.returncode:
        words = done.stderr.strip()
        raise RuntimeError(f"{' '.join(command)} has said {words!r}: run it as root, on a Linux that allows mounts")
