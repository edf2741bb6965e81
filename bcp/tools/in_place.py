"""Import files of another library without a copy: ``metadata.arrow`` is written into their folder, and nothing else."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from bcp._deletion import read_committed
from bcp._messages.tools import Imported
from bcp._version import __version__
from bcp.backends.place import Place
from bcp.errors import BcpError, ExistsError, InputError, NotACheckpointError, StorageError
from bcp.format.foreign_files import is_foreign
from bcp.format.metadata import (
    METADATA_KEY,
    Metadata,
    as_stored,
    decode_commit,
    decode_metadata,
    encode_foreign,
    encode_layout,
    is_over_foreign,
    operation_of,
)
from bcp.interop.recognise import foreign_metadata
from bcp.options import LoadOptions
from bcp.protocols import Version
from bcp.read.objects import values_of
from bcp.read.opening import read_metadata
from bcp.read.source import Source
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["commit_in_place"]


async def commit_in_place(place: Place, *, values: bool, overwrite: bool, user: Mapping[str, Any]) -> Imported:
    """Write ``metadata.arrow`` into a folder of another library.

    Args:
        place: the folder.
        values: take over the values that are not tensors.
        overwrite: replace the metadata of an older import.
        user: user metadata, beside those that the files have.

    Raises:
        As :func:`bcp.tools.import_files`.

    """
    version = await place.backend.version(METADATA_KEY)
    data = await _contents(place, version, overwrite=overwrite)
    where = f"{place.path}/{METADATA_KEY}"
    found = await in_thread_gc_paused(decode_metadata, data, where)
    _check_folder(found, place.path)
    if values:
        await in_thread_gc_paused(_check_values, Source.of(place.backend, place.path, found, LoadOptions()))
    else:
        found = _without_values(found)
    stored = await in_thread_gc_paused(_stored, found, user)
    metadata = await in_thread_gc_paused(decode_metadata, stored, where)  # proves that it can be opened
    await _put(place, stored, version)
    return Imported(metadata.commit.operation, len(metadata.layout.tensors), len(metadata.layout.objects))


async def _contents(place: Place, version: Version | None, *, overwrite: bool) -> bytes:
    """Make the table of contents of a folder. Raise if the import must not replace the metadata of that version."""
    backend, path = place.backend, place.path
    if version is None:
        contents = await read_metadata(backend, path)
        if is_foreign(contents):
            return contents
        raise _overtaken(path)  # metadata have come since
    data = (await read_committed(backend)).data
    if data is None:
        raise _overtaken(path)
    commit = await in_thread_gc_paused(decode_commit, data, f"{path}/{METADATA_KEY}")
    if not is_over_foreign(data):
        raise InputError(
            f"{path} is a checkpoint of bcp, of operation {commit.operation}: an import does not replace it. "
            "bcp.tools.copy (bcp cp) copies it"
        )
    if not overwrite:
        raise ExistsError(
            f"{path} was imported at {commit.created[:19]}; pass overwrite=True (--overwrite) to read its files again"
        )
    infos = [info for info in await backend.list() if info.key != METADATA_KEY]
    made = await foreign_metadata(backend, path, infos)
    if made is None:
        raise NotACheckpointError(
            f"{path} has no files of a library that bcp reads beside {METADATA_KEY}; put them back, or delete the "
            "checkpoint (bcp rm)"
        )
    return made


def _overtaken(path: str) -> ExistsError:
    return ExistsError(
        f"{path}: somebody else has committed there, or deleted the checkpoint, since the import began; nothing was "
        "replaced"
    )


def _check_folder(found: Metadata, path: str) -> None:
    """Raise InputError if metadata cannot lie beside the files."""
    assert found.foreign is not None  # noqa: S101 -- for type checkers
    if found.foreign.is_file:
        raise InputError(
            f"{path} is one file, and an import without a copy needs a folder for its {METADATA_KEY}: pass the folder, "
            "if it holds one checkpoint; or pass a target, for an import with a copy"
        )
    for key in found.foreign.key:
        if key == METADATA_KEY or operation_of(key) is not None:
            raise InputError(
                f"{path} has its data in {key}, and bcp gives such names to files of its own, which a save may delete: "
                "rename the file, or pass a target, for an import with a copy"
            )


def _check_values(source: Source) -> None:
    """Raise CheckpointError if a value cannot be read."""
    values_of(source, {name: row for row, name in enumerate(source.metadata.layout.objects)})


def _without_values(found: Metadata) -> Metadata:
    assert found.foreign is not None  # noqa: S101 -- for type checkers
    layout = replace(found.layout, objects=(), object_rank=np.zeros(0, np.int64))
    return Metadata(layout, found.commit, replace(found.foreign, values={}))


def _stored(found: Metadata, user: Mapping[str, Any]) -> bytes:
    """Return the contents of ``metadata.arrow``."""
    assert found.foreign is not None  # noqa: S101 -- for type checkers
    commit = replace(
        found.commit,
        operation=secrets.token_hex(8),
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        version=__version__,
        user={**found.commit.user, **user},
    )
    return as_stored(encode_foreign(encode_layout(found.layout), commit, found.foreign))


async def _put(place: Place, stored: bytes, version: Version | None) -> None:
    """Put the metadata, if they are still those of that version."""
    try:
        made = await place.backend.put_if(METADATA_KEY, stored, version)
    except StorageError as error:
        if await _is_there(place, stored):  # the answer was lost
            return
        raise StorageError(
            f"{place.path} was not imported: {error}. A folder that cannot be written to is imported with a copy: pass "
            "a target"
        ) from error
    if made is None and not await _is_there(place, stored):
        raise _overtaken(place.path)


async def _is_there(place: Place, stored: bytes) -> bool:
    with suppress(BcpError, OSError):
        return (await read_committed(place.backend)).data == stored
    return False
