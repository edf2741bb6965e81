"""Deletion of versions that no kept one needs, and of what dead publishers have left."""

from __future__ import annotations

from collections.abc import Iterable

from bcp.backends import child
from bcp.errors import CorruptError
from bcp.protocols import Backend, Sweeper
from bcp.publication.chain import Chain
from bcp.publication.index import FOLDERS, INDEX, folder_of, version_in

__all__ = ["needed", "retain", "sweep"]

DATA = ".safetensors"


async def sweep(backend: Backend, chain: Chain, newest: int, claimed: int) -> None:
    """Delete the data of versions that were never committed. The caller has the claim, so their publishers are dead.

    A committed version keeps every file that its index names. In the folder of the claimed version, files beside
    weights stay: a later publisher of that version has the same names, and this one may be slow.

    Args:
        backend: the publication.
        chain: its committed versions.
        newest: the newest one; 0 if there is none.
        claimed: the version that the caller has claimed.

    Raises:
        StorageError: storage failed.

    """
    if isinstance(backend, Sweeper):
        left = [each for each in await backend.unfinished() if each.key.startswith(FOLDERS)]
        if left:
            await backend.discard(left)
    folders = await _listed(backend)
    for version, keys in folders.items():
        if INDEX not in keys:
            doomed = [key for key in keys if version != claimed or key.endswith(DATA)]
            await child(backend, folder_of(version)).delete(doomed)
    if INDEX in folders.get(newest, ()):
        try:
            named = (await chain.version(newest)).index.keys
        except CorruptError:  # it may name any
            return
        strays = [key for key in folders[newest] if key.endswith(DATA) and key not in named]
        if strays:
            await child(backend, folder_of(newest)).delete(strays)


async def retain(backend: Backend, chain: Chain, keep: int) -> list[int]:
    """Delete all versions but the newest ones and those that they need: their anchors, and the deltas between.

    The index goes first, so nobody finds a version without its data.

    Args:
        backend: the publication.
        chain: its committed versions.
        keep: how many versions stay readable.

    Returns:
        The versions that were deleted.

    Raises:
        CorruptError: an index is damaged; nothing was deleted.
        StorageError: storage failed.

    """
    folders = await _listed(backend)
    committed = [version for version, keys in folders.items() if INDEX in keys]
    kept = sorted(committed)[-keep:]
    wanted = needed([((await chain.version(version)).index.anchor, version) for version in kept])
    doomed = [version for version in sorted(committed) if version not in wanted]
    for version in doomed:
        folder = child(backend, folder_of(version))
        await folder.delete([INDEX])
        await folder.delete([key for key in folders[version] if key != INDEX])
    return doomed


def needed(spans: Iterable[tuple[int, int]]) -> set[int]:
    """Return the versions that some versions need, from (anchor, version) of each.

    Example:
        >>> from bcp.publication.retention import needed
        >>> sorted(needed([(3, 5), (6, 6)]))
        [3, 4, 5, 6]

    """
    return {each for anchor, version in spans for each in range(anchor, version + 1)}


async def _listed(backend: Backend) -> dict[int, list[str]]:
    """Return the names of the files of each version."""
    found: dict[int, list[str]] = {}
    for info in await backend.list(FOLDERS):
        folder, _, key = info.key.partition("/")
        if (version := version_in(folder)) is not None and key:
            found.setdefault(version, []).append(key)
    return found
