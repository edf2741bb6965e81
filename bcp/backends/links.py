"""Folders that are symbolic links: a backend over directories alone has them.

A user moves a checkpoint to another disk, and leaves a link in its place. Keys stay within a backend's root, so the
checkpoint behind the link is read through a backend of its own. A deletion takes the link, and never its target.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from bcp.backends.prefixed import child
from bcp.protocols import Backend

__all__ = ["LinkFollower", "followed", "links_of", "names_behind"]

_MOST_LINKS = 40  # Linux follows as many
_ENDS = (errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES)  # the first: no link, but the target


@runtime_checkable
class LinkFollower(Protocol):
    """Optional methods of a backend whose folders may be symbolic links."""

    async def links(self) -> Sequence[str]:
        """List the names of symbolic links directly below the root, in order, wherever they lead."""

    async def behind(self, name: str) -> Sequence[str]:
        """List the names directly below the root through which a symbolic link leads, the nearest first.

        A link to a link leads through several. The link itself is none of them.

        Raises:
            StorageError: storage failed.

        """

    async def unlink(self, name: str) -> None:
        """Remove a symbolic link, but not its target. An absent one is no error.

        Raises:
            StorageError: the name belongs to something else than a link, or storage failed.

        """

    def beyond(self, name: str) -> Backend:
        """Return a backend over the folder of that name, to which a link may lead."""


async def links_of(backend: Backend) -> Sequence[str]:
    """Return the names of symbolic links below the root of a backend; none if it knows no links."""
    return await backend.links() if isinstance(backend, LinkFollower) else ()


def followed(backend: Backend, name: str) -> Backend:
    """Return a backend over a folder, also where a symbolic link leads to the folder. It needs no closing."""
    return backend.beyond(name) if isinstance(backend, LinkFollower) else child(backend, name)


def names_behind(top: Path, name: str) -> list[str]:
    """Follow a link directly below ``top``; return each name directly below ``top`` on the way.

    A link without a target ends the way. OSError if the file system does not answer.
    """
    return list(_names_behind(Path(os.path.realpath(top)), name))


def _names_behind(top: Path, name: str) -> Iterator[str]:
    path = top / name
    for _ in range(_MOST_LINKS):
        try:
            target = path.parent / path.readlink()
            path = Path(os.path.realpath(target.parent, strict=True)) / target.name
        except OSError as error:
            if error.errno in _ENDS:
                return
            raise
        if path != top and path.is_relative_to(top):
            yield path.relative_to(top).parts[0]
