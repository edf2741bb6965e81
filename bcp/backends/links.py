"""Folders that are symbolic links: a backend over directories alone has them.

A user moves a checkpoint to another disk, and leaves a link in its place. Keys stay within a backend's root, so the
checkpoint behind the link is read through a backend of its own. A deletion takes the link, and never its target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from bcp.backends.prefixed import child
from bcp.protocols import Backend

__all__ = ["LinkFollower", "followed", "links_of"]


@runtime_checkable
class LinkFollower(Protocol):
    """Optional methods of a backend whose folders may be symbolic links."""

    async def links(self) -> Sequence[str]:
        """List the names of symbolic links directly below the root, in order, wherever they lead."""

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
