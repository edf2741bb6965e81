"""The target of an export: a folder or one file, on a local disk or in a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any

from bcp.backends import LocalBackend
from bcp.backends.cooled import hot_of
from bcp.backends.keys import check_key
from bcp.backends.place import Path, place_of
from bcp.errors import CorruptError, ExistsError, InputError, StorageError
from bcp.format.metadata import METADATA_KEY
from bcp.protocols import Backend, Sweeper
from bcp.read.source import Source
from bcp.runtime.threads import in_thread

__all__ = ["Target", "file_target", "folder_target"]

SHOWN = 3


@dataclass(frozen=True, slots=True)
class Target:
    """An open target.

    Attributes:
        path: its name, for messages and results.
        backend: the folder, or the folder of the file.
        opened: closes the storage at the end, if it was opened for this target.
        is_file: whether the export is one file, which is replaced as a whole.
        is_mine: whether a key is the name of a file with tensors, or of their index, written by an older export or
            another tool.
    """

    path: str
    backend: Backend
    opened: AbstractAsyncContextManager[object]
    is_file: bool
    is_mine: Callable[[str], bool]

    async def make_room(self, keys: frozenset[str], source: Source, *, overwrite: bool) -> None:
        """Delete the older files of a folder with tensors, if the export may replace them.

        The remains of unfinished writes go, too. Other files of the same names stay: they are replaced at the end.

        Args:
            keys: names of the files of the export.
            source: the open checkpoint. Its files stay: the export has yet to read them.
            overwrite: whether the export may replace older files.

        Raises:
            ExistsError: there are older files, and ``overwrite`` is not set; nothing was deleted.
            InputError: a folder has the name of a file of the export; the target is a checkpoint of bcp; an older file
                belongs to the source. Nothing was deleted.
            StorageError: storage failed.

        """
        if self.is_file:
            there = {key for key in keys if await _is_there(self.backend, key)}
        else:
            there = {info.key for info in await self.backend.list()}
        if not self.is_file and METADATA_KEY in there:
            raise InputError(f"{self.path} is a checkpoint of bcp: an export needs a folder of its own; pass another")
        for key in keys:
            if await self._is_folder(key):
                raise InputError(f"{self.path}: {key} is a folder, and the export has a file there; pass another path")
        old = sorted(key for key in there if key in keys or self.is_mine(key))
        needed = () if self.is_file else await in_thread(_common_files, source, self.backend, old)
        if needed:
            raise InputError(
                f"{self.path} is the folder of the source, too: an export would delete {needed[0]} before it reads the "
                "file; pass another path"
            )
        if old and not overwrite:
            more = f" and {len(old) - SHOWN} more" if len(old) > SHOWN else ""
            raise ExistsError(
                f"{self.path} has {', '.join(old[:SHOWN])}{more} already; pass overwrite=True to replace them, or "
                "another path"
            )
        if not self.is_file and (doomed := [key for key in old if self.is_mine(key)]):
            await self.backend.delete(doomed)
        if not self.is_file and overwrite:
            with suppress(StorageError):  # a store may not let everybody list them
                await self.discard(keys)

    async def discard(self, keys: Container[str]) -> None:
        """Remove the remains of unfinished writes from a folder: a process that was killed has left them.

        Args:
            keys: names of the files of the export. Remains of other files with tensors go, too.

        Raises:
            StorageError: storage failed.

        """
        if isinstance(self.backend, Sweeper):
            found = await self.backend.unfinished()
            if left := [each for each in found if each.key in keys or self.is_mine(each.key)]:
                await self.backend.discard(left)

    async def _is_folder(self, key: str) -> bool:
        """Whether a local folder is where a file shall be."""
        return isinstance(self.backend, LocalBackend) and await in_thread((self.backend.root / key).is_dir)


def _common_files(source: Source, backend: Backend, keys: Sequence[str]) -> list[str]:
    """Return the keys of a folder that are files of the source: those of another library may lie anywhere. Blocks."""
    foreign, theirs = source.metadata.foreign, hot_of(source.backend)
    if foreign is None:  # the folder of a checkpoint of bcp is refused as a target
        return []
    if isinstance(theirs, LocalBackend) and isinstance(backend, LocalBackend):
        is_same = backend.root.is_dir() and theirs.root.samefile(backend.root)
    else:
        is_same = repr(theirs) == repr(backend)
    return sorted(set(keys).intersection(foreign.key)) if is_same else []


async def _is_there(backend: Backend, key: str) -> bool:
    """Whether there is an object. One request, which reads one byte."""
    try:
        await backend.read_into(key, 0, memoryview(bytearray(1)))
    except FileNotFoundError:
        return False
    except CorruptError:
        return True  # it is empty
    return True


def folder_target(
    target: Path, target_options: Mapping[str, Any] | None, is_mine: Callable[[str], bool]
) -> Callable[[], Target]:
    """Return a function that opens a folder. ``is_mine`` says which files there an export of this kind writes."""

    def opened() -> Target:
        place = place_of(target, None, target_options)
        return Target(place.path, place.backend, place.opened, False, is_mine)  # noqa: FBT003 -- a field

    return opened


def file_target(target: str | os.PathLike[str], target_options: Mapping[str, Any] | None) -> Callable[[], Target]:
    """Return a function that opens the folder of a file. Its first error is InputError for what names no file."""

    def opened() -> Target:
        folder, name = split_file(target)
        place = place_of(folder, None, target_options)
        return Target(f"{place.path}/{name}", place.backend, place.opened, True, lambda key: key == name)  # noqa: FBT003 -- a field

    return opened


def split_file(target: object) -> tuple[str, str]:
    """Return the folder and the name of a file, by its path or URL.

    Raises:
        InputError: it names no file.

    Example:
        >>> from bcp.tools.exports.target import split_file
        >>> split_file("s3://bucket/models/model.safetensors")
        ('s3://bucket/models', 'model.safetensors')

    """
    if not isinstance(target, str | os.PathLike):
        raise InputError(f"target={target!r} is a {type(target).__name__}; pass the path or the URL of a file")
    text = os.fsdecode(target)
    folder, slash, name = text.rpartition("/")
    if name in ("", ".", "..") or folder.endswith(":/") or "\\" in name or "\0" in name:
        raise InputError(f"target={text!r} names no file; pass a path or URL such as 'out/model.safetensors'")
    return (folder or "/") if slash else ".", check_key(name)
