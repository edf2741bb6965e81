"""The deletion of one checkpoint of a run: its metadata first, so that no half of it looks whole."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from bcp._deletion import delete_unnamed, remove_folders, withdraw
from bcp.backends.cold import ColdPlaces
from bcp.backends.cooled import cooled_child
from bcp.backends.keys import check_key
from bcp.errors import InputError
from bcp.format.metadata import METADATA_KEY, operation_of
from bcp.interop.recognise import is_foreign_folder
from bcp.protocols import Backend, Sweeper, Version, folders_of
from bcp.telemetry.store import FOLDER as TELEMETRY

__all__ = ["delete_checkpoint"]


async def delete_checkpoint(backend: Backend, name: str, commit: Version, places: ColdPlaces) -> None:
    """Delete the objects below a folder, its metadata first, and the empty directories.

    Metadata that are not those of ``commit`` stay with their files: somebody has committed there since. In a folder of
    another library, which may be imported without a copy, only files of bcp's own go.

    Args:
        backend: over the folder of the run.
        name: of the folder.
        commit: version of its metadata; "" if there were none, so that unfinished writes may be left.
        places: cold places of the run. Data files there go, too.

    Raises:
        CorruptError: the run's record of cold places is damaged. Nothing was deleted.
        StorageError: storage failed. Nothing was deleted if a cold place is not there.

    """
    view = cooled_child(backend, name, places)
    keys = _deletable([info.key for info in await view.list()])
    if is_foreign_folder(keys):
        keys = list(filter(_is_own, keys))
    if not await withdraw(view, {METADATA_KEY: commit}):
        return
    roles = [key for key in keys if key != METADATA_KEY and key.rpartition("/")[2] == METADATA_KEY]
    await withdraw(view, dict.fromkeys(roles))
    # the caller has read the ledger and the commits: no step refers to this one
    await delete_unnamed(view, [key for key in keys if key != METADATA_KEY], is_needed=False)
    if commit and name not in await folders_of(backend):
        return
    if isinstance(view, Sweeper):
        await view.discard(await view.unfinished())  # metadata name finished files only
    folders = [name]
    for folder in folders:  # it grows
        below = await folders_of(backend, f"{folder}/")
        folders += _deletable([f"{folder}/{subfolder}" for subfolder in below])
    await remove_folders(backend, reversed(folders))


def _is_own(key: str) -> bool:
    """Whether a file is of bcp's own: metadata, data and receipts of saves, and recordings."""
    return operation_of(key) is not None or key.rpartition("/")[2] == METADATA_KEY or key.startswith(TELEMETRY)


def _deletable(keys: Sequence[str]) -> list[str]:
    """Leave out keys that no backend takes, as a name with a backslash that somebody has put there."""
    valid_keys = []
    for key in keys:
        with suppress(InputError):
            check_key(key)
            valid_keys.append(key)
    return valid_keys
