"""The committed versions of a publication, and the bytes of any tensor at any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bcp.backends import child
from bcp.backends.small import check_small
from bcp.errors import CorruptError, NotACheckpointError
from bcp.interop.catalogue import Piece
from bcp.interop.reading import JSON_BYTES, Opened
from bcp.interop.safetensors_files import pieces_of_files
from bcp.protocols import Backend
from bcp.publication.encoding import Bytes, apply, digest, unpack
from bcp.publication.index import INDEX, VersionIndex, decode, folder_of
from bcp.runtime.threads import in_thread

__all__ = ["Chain", "CommittedVersion", "Tensor"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of an anchor.

    Attributes:
        dtype: torch's name of the dtype.
        shape: of the tensor.
        itemsize: bytes of an element.
        nbytes: bytes of the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CommittedVersion:
    """A version whose index was read.

    Attributes:
        index: its index.
        files: its folder.
    """

    index: VersionIndex
    files: Opened

    @property
    def path(self) -> str:
        """Its place, for messages."""
        return self.files.path

    async def streams(self) -> dict[str, Piece]:
        """Return the places of the streams of its delta, by tensor.

        Raises:
            CorruptError: a file is missing or damaged, or has other tensors than the index says.

        """
        pieces = await self._pieces(self.index.deltas)
        for name, piece in pieces.items():
            if piece.dtype != "uint8" or len(piece.shape) != 1:
                raise CorruptError(
                    f"{self.path}: the delta of tensor {name!r} is {piece.dtype}{list(piece.shape)} and no stream of "
                    "bytes; publish an anchor as a newer version"
                )
        return pieces

    async def tensors(self) -> dict[str, Piece]:
        """Return the places of the tensors of an anchor. Raises as :meth:`streams`."""
        return await self._pieces(self.index.files)

    async def _pieces(self, files: Mapping[str, str]) -> dict[str, Piece]:
        for key in set(files.values()):
            self.files.size(key, INDEX)
        found = {piece.name: piece for piece in await pieces_of_files(self.files, sorted(set(files.values())))}
        if {name: piece.key for name, piece in found.items()} != dict(files):
            wrong = sorted(name for name in files.keys() | found.keys() if name not in files or name not in found)
            raise CorruptError(
                f"{self.path}: {INDEX} and the files differ in {', '.join(map(repr, wrong[:3])) or 'places of tensors'}"
                "; publish an anchor as a newer version"
            )
        return found

    async def read(self, piece: Piece) -> bytes:
        """Read a tensor, or a stream."""
        return await self.files.read(piece.key, piece.start, piece.nbytes)


class Chain:
    """The versions of a publication. Indexes and headers that were read are kept.

    Args:
        backend: the publication.
        path: its name, for messages.

    """

    def __init__(self, backend: Backend, path: str) -> None:
        self.backend = backend
        self.path = path
        self._versions: dict[int, CommittedVersion] = {}
        self._pieces: dict[tuple[int, str], dict[str, Piece]] = {}

    async def version(self, number: int) -> CommittedVersion:
        """Return a committed version.

        Raises:
            NotACheckpointError: there is no such version.
            CorruptError: its index is damaged.
            StorageError: storage failed.

        """
        if number not in self._versions:
            name = folder_of(number)
            listed = {info.key.partition("/")[2]: info.nbytes for info in await self.backend.list(f"{name}/")}
            path = f"{self.path}/{name}"
            if INDEX not in listed:
                raise NotACheckpointError(
                    f"{path} is no version: it was never committed, or retention has deleted it; ask for the newest one"
                )
            files = Opened(child(self.backend, name), path, listed)
            check_small(f"{path}/{INDEX}", listed[INDEX], JSON_BYTES)
            data = await files.read(INDEX, 0, listed[INDEX])
            self._versions[number] = CommittedVersion(decode(data, number, f"{path}/{INDEX}"), files)
        return self._versions[number]

    async def since_anchor(self, number: int) -> Sequence[CommittedVersion]:
        """Return the newest anchor up to a version, and the deltas after it, up to the version."""
        anchor = (await self.version(number)).index.anchor
        found = [await self.version(each) for each in range(anchor, number + 1)]
        for each in found:
            if each.index.anchor != anchor or each.index.publication != found[0].index.publication:
                raise CorruptError(
                    f"{each.path} has the anchor {each.index.anchor}, and {folder_of(number)} has {anchor}; publish "
                    "an anchor as a newer version"
                )
        return found

    async def layout(self, number: int) -> dict[str, Tensor]:
        """Return dtypes and shapes of the tensors of a version."""
        pieces = await self.pieces((await self.version(number)).index.anchor, anchor=True)
        return {name: Tensor(piece.dtype, piece.shape, piece.itemsize, piece.nbytes) for name, piece in pieces.items()}

    async def pieces(self, number: int, *, anchor: bool) -> dict[str, Piece]:
        """Return the places of the tensors of an anchor, or of the streams of a version."""
        key = number, "anchor" if anchor else "delta"
        if key not in self._pieces:
            version = await self.version(number)
            self._pieces[key] = await (version.tensors() if anchor else version.streams())
        return self._pieces[key]

    async def stream(self, number: int, name: str, nbytes: int) -> Bytes:
        """Read the unpacked stream of a tensor of so many bytes. Raises CorruptError as :func:`unpack`."""
        version = await self.version(number)
        packed = await version.read((await self.pieces(number, anchor=False))[name])
        where = f"version {number} of {self.path}: tensor {name!r}"
        return await in_thread(unpack, packed, nbytes, version.index.encoding, where)

    async def tensor(self, name: str, number: int) -> Bytes:
        """Read a tensor of a version from its anchor and the deltas after it.

        Raises:
            CorruptError: the bytes differ from their digest.
            StorageError: storage failed.

        """
        anchor, *later = await self.since_anchor(number)
        piece = (await self.pieces(anchor.index.version, anchor=True))[name]
        data = np.empty(piece.nbytes, np.uint8)
        await anchor.files.read_into(piece.key, piece.start, data.data)
        for version in later:
            if name in version.index.deltas:
                content = await self.stream(version.index.version, name, len(data))
                data = await in_thread(apply, data, content, version.index.encoding)
        found, want = await in_thread(digest, data), (await self.version(number)).index.digests[name]
        if found != want:
            raise CorruptError(
                f"version {number} of {self.path}: tensor {name!r} has digest {found}, and {want} was published: a "
                "file of the anchor or of a delta is damaged; publish an anchor as a newer version"
            )
        return data
