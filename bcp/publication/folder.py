"""The local folder of a subscriber: a Hugging Face folder, and a note of the version that it has."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio
import numpy as np

from bcp.backends import LocalBackend
from bcp.backends.local import absolute
from bcp.backends.small import check_small
from bcp.errors import CorruptError, StorageError
from bcp.interop.catalogue import Piece
from bcp.interop.reading import Opened, from_json
from bcp.interop.safetensors_files import SUFFIX, pieces_of_files
from bcp.publication.chain import CommittedVersion
from bcp.publication.encoding import Bytes, digest
from bcp.publication.index import INDEX
from bcp.runtime.threads import in_thread
from bcp.tools.exports.companions import is_companion

__all__ = ["NOTE", "Note", "PulledFolder"]

NOTE, LOCK = ".bcp-pull.json", ".bcp-pull.lock"
PAUSE_SECONDS = 0.05
WRITE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Note:
    """What the folder has.

    Attributes:
        version: all tensors are of this version, but those that differ in ``towards`` may be of that one, or torn.
            0: the folder has no version.
        publication: id of the publication.
        towards: the version that is being applied; equal to ``version`` for a whole folder.
    """

    version: int = 0
    publication: str = ""
    towards: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the folder has one version."""
        return self.version == self.towards > 0


class PulledFolder:
    """The folder of a subscriber. One process at a time changes it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = absolute(os.fsdecode(path))
        self.backend = LocalBackend(self.root)
        self._pieces: dict[str, Piece] | None = None

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Wait until no other process changes the folder. The lock ends with the process."""
        try:
            fd = await in_thread(self._open_lock)
        except OSError as error:
            raise StorageError(f"{self.root} cannot be a subscriber's folder: {error}; pass another") from error
        try:
            while not _taken(fd):  # noqa: ASYNC110 -- another process gives it up
                await anyio.sleep(PAUSE_SECONDS)
            self._pieces = None
            yield
        finally:
            os.close(fd)

    def _open_lock(self) -> int:
        self.root.mkdir(parents=True, exist_ok=True)
        return os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    async def note(self) -> Note:
        """Read the note. One that is missing or damaged says that the folder has no version."""
        try:
            found = from_json(bytes(await self.backend.get(NOTE)), str(self.root / NOTE))
            version, publication, towards = found["version"], found["publication"], found["towards"]
        except (FileNotFoundError, CorruptError, KeyError, TypeError):
            return Note()
        is_sound = type(version) is int and type(towards) is int and isinstance(publication, str)
        return Note(version, publication, towards) if is_sound else Note()

    async def take_note(self, note: Note) -> None:
        """Write the note: durably, and all or nothing."""
        content = {"version": note.version, "publication": note.publication, "towards": note.towards}
        await self.backend.put(NOTE, json.dumps(content).encode())

    async def reset(self, anchor: CommittedVersion, pieces: Mapping[str, Piece]) -> None:
        """Replace the weights by those of an anchor. Each tensor is compared with its digest before its file appears.

        Raises:
            CorruptError: a tensor of the anchor is damaged; names it, the version and both digests.
            StorageError: storage failed.

        """
        self._pieces = None
        files = sorted(set(anchor.index.files.values()))
        for key in files:
            await self._copy(anchor, key, [piece for piece in pieces.values() if piece.key == key])
        for key in sorted(key for key in anchor.files.sizes if "/" not in key and is_companion(key)):
            check_small(f"{anchor.path}/{key}", anchor.files.sizes[key])
            await self.backend.put(key, await anchor.files.read(key, 0, anchor.files.sizes[key]))
        content = {"metadata": {"total_size": anchor.index.nbytes}, "weight_map": dict(anchor.index.files)}
        await self.backend.put(INDEX, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
        old = [info.key for info in await self.backend.list() if "/" not in info.key and info.key.endswith(SUFFIX)]
        await self.backend.delete([key for key in old if key not in files])

    async def _copy(self, anchor: CommittedVersion, key: str, pieces: Sequence[Piece]) -> None:
        """Copy a file of an anchor. Its tensors follow each other from the header to the end."""
        ordered = sorted((piece for piece in pieces if 0 not in piece.shape), key=lambda piece: piece.start)
        size = anchor.files.sizes[key]
        first = ordered[0].start if ordered else size
        async with self.backend.open_write(key, size) as writer:
            await writer.write_part(0, 0, await anchor.files.read(key, 0, first))
            for index, piece in enumerate(ordered, 1):
                data = await anchor.read(piece)
                found, want = await in_thread(digest, np.frombuffer(data, np.uint8)), anchor.index.digests[piece.name]
                if found != want:
                    raise CorruptError(
                        f"version {anchor.index.version} at {anchor.path}: tensor {piece.name!r} of the anchor has "
                        f"digest {found}, and {want} was published; publish an anchor as a newer version"
                    )
                await writer.write_part(index, piece.start, data)

    async def pieces(self) -> dict[str, Piece]:
        """Return the places of the tensors.

        Raises:
            CorruptError: a file is missing or damaged.

        """
        if self._pieces is None:
            opened = await self._opened()
            opened.size(INDEX, NOTE)
            content = await opened.read_json(INDEX)
            files = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(files, dict):
                raise CorruptError(f"{self.root / INDEX} is damaged; delete the folder, and pull again")
            keys = sorted({str(key) for key in files.values()})
            for key in keys:
                opened.size(key, INDEX)
            self._pieces = {piece.name: piece for piece in await pieces_of_files(opened, keys)}
        return self._pieces

    async def _opened(self) -> Opened:
        sizes = {info.key: info.nbytes for info in await self.backend.list() if "/" not in info.key}
        return Opened(self.backend, str(self.root), sizes)

    async def sizes(self) -> dict[str, int]:
        """Return the bytes of each tensor. Raises as :meth:`pieces`."""
        return {name: piece.nbytes for name, piece in (await self.pieces()).items()}

    async def read(self, name: str) -> Bytes:
        """Read a tensor's bytes. Raises CorruptError if the folder has no such tensor."""
        piece = (await self.pieces()).get(name)
        if piece is None:
            raise CorruptError(f"{self.root} has no tensor {name!r}; delete the folder, and pull again")
        data = np.empty(piece.nbytes, np.uint8)
        if len(data):
            await self.backend.read_into(piece.key, piece.start, data.data)
        return data

    async def write(self, tensors: Mapping[str, Bytes]) -> None:
        """Write tensors in place, durably. A kill may leave a torn one."""
        pieces = await self.pieces()
        by_file: dict[str, list[tuple[int, Bytes]]] = {}
        for name, data in tensors.items():
            by_file.setdefault(pieces[name].key, []).append((pieces[name].start, data))
        for key, parts in by_file.items():
            await in_thread(self._write_file, key, parts)

    def _write_file(self, key: str, parts: Sequence[tuple[int, Bytes]]) -> None:
        try:
            fd = os.open(self.root / key, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for start, data in parts:
                    _write_at(fd, start, data.data)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise StorageError(f"{self.root / key} cannot be written: {error}; pull again once it can be") from error


def _write_at(fd: int, start: int, data: memoryview) -> None:
    """Write bytes at a place of a file."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + WRITE_BYTES], start + done)


def _taken(fd: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
