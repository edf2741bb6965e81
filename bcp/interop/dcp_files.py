"""Folders of torch.distributed.checkpoint by reference: each range of a file is a zip with one tensor, or one value.

Head and end of each range are read. The end of a range and the head of the next one are one read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bcp.backends.small import check_small
from bcp.errors import CheckpointError, CorruptError
from bcp.interop.catalogue import DTYPES, Catalogue, Piece
from bcp.interop.dcp_metadata import Chunk, DcpMetadata, decode_dcp
from bcp.interop.dcp_names import Name, by_parameter, names_of
from bcp.interop.reading import Opened
from bcp.interop.torch_pickle import TORCH_NAMES, Stored, Unread, torch_value, value_text
from bcp.interop.torch_zip import TAIL_BYTES, Zip
from bcp.interop.unpickle import Allowed
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["METADATA", "DcpParts", "Naming", "dcp_folder", "dcp_parts"]

METADATA = ".metadata"
HEAD_BYTES = 4096
BATCH = 1024
MOST_METADATA_BYTES = 1 << 30
MOST_PICKLE_BYTES = 64 << 20
WRITER = re.compile(r"__(\d{1,9})_\d+\.distcp")
"""Names of files tell their ranks."""


class Naming(Protocol):
    """The names of a folder's tensors and values."""

    @property
    def allowed(self) -> Allowed:
        """All names in the pickles of values."""

    def boxes(self, piece: Piece) -> Iterable[Piece]:
        """Return a box by its names here; ``piece`` has the name of the library."""

    def value(self, name: str, value: Any, words: str, most: int) -> Iterable[tuple[Name, str]]:
        """Return a value as JSON text by its names here; ``most`` bounds the number of its parts."""


@dataclass(frozen=True, slots=True)
class DcpParts:
    """What is in a folder: tensors, values, and how many ranks wrote them."""

    pieces: list[Piece]
    values: dict[Name, str]
    ranks: int


class _Plain:
    """The names of a state as torch.distributed.checkpoint saves it."""

    allowed = TORCH_NAMES

    def __init__(self, names: Mapping[str, Name]) -> None:
        self._names = names

    def boxes(self, piece: Piece) -> Iterable[Piece]:
        kind, name = self._names[piece.name]
        return [replace(piece, kind=kind, name=name)]

    def value(self, name: str, value: Any, words: str, most: int) -> Iterable[tuple[Name, str]]:
        return [(self._names[name], value_text(value, most, words))]


async def dcp_folder(opened: Opened) -> Catalogue:
    """List the tensors and values of a folder.

    Raises:
        CheckpointError: ranges were transformed, pickles name other classes, or a tensor is not contiguous.
        CorruptError: a file is missing or damaged, or does not have what ``.metadata`` says.

    """

    def naming(meta: DcpMetadata) -> Naming:
        return _Plain(names_of(meta.names, meta.paths, opened.path))

    parts = await dcp_parts(opened, naming)
    return Catalogue(
        "torch.distributed.checkpoint", parts.pieces, opened.sizes, by_parameter(parts.values), ranks=parts.ranks
    )


async def dcp_parts(opened: Opened, named: Callable[[DcpMetadata], Naming], folder: str = "") -> DcpParts:
    """List the tensors and values of a folder by the names that ``named`` gives. Raises as :func:`dcp_folder`.

    ``folder`` is the place of the files below the opened folder, with a slash.
    """
    key = folder + METADATA
    where = f"{opened.path}/{key}"
    check_small(where, opened.sizes[key], MOST_METADATA_BYTES)
    data = await opened.read(key, 0, opened.sizes[key])
    meta = (await in_thread_gc_paused(decode_dcp, data, where)).below(folder)
    _check_places(opened, meta, where)
    naming = named(meta)
    empty = (Piece.whole("", name, *meta.empty[name], key, 0) for name in meta.empty)
    pieces = [piece for whole in empty for piece in naming.boxes(whole)]
    values: dict[Name, str] = {}
    ordered = sorted(meta.chunks, key=lambda chunk: (chunk.key, chunk.start))
    for chunks in (ordered[first : first + BATCH] for first in range(0, len(ordered), BATCH)):
        ahead = await opened.looked_ahead(span for chunk in chunks for span in _edges(chunk))
        for chunk in chunks:
            if chunk.dtype:
                pieces.extend(naming.boxes(await _piece(ahead, chunk)))
            else:
                values.update(await _value(ahead, chunk, naming))
        await asyncio.sleep(0)  # others of this loop may run between
    writers = [int(match[1]) for chunk in meta.chunks if (match := WRITER.fullmatch(chunk.key.removeprefix(folder)))]
    return DcpParts(pieces, values, max(writers, default=0) + 1)


def _check_places(opened: Opened, meta: DcpMetadata, where: str) -> None:
    """Compare every range with its file."""
    for chunk in meta.chunks:
        size = opened.size(chunk.key, METADATA)
        if chunk.start + chunk.nbytes > size:
            raise CorruptError(
                f"{where}: {chunk.name!r} is said to lie in bytes {chunk.start} to {chunk.start + chunk.nbytes} of "
                f"{chunk.key}, which has {size}; get the file again"
            )


def _edges(chunk: Chunk) -> Sequence[tuple[str, int, int]]:
    """Return head and end of a zip: its small entries, and its directory."""
    if chunk.pickle:
        return ()
    stop = chunk.start + chunk.nbytes
    head, tail = min(chunk.start + HEAD_BYTES, stop), max(stop - TAIL_BYTES, chunk.start)
    return (chunk.key, chunk.start, head), (chunk.key, tail, stop)


async def _piece(opened: Opened, chunk: Chunk) -> Piece:
    """Find the elements of a box in its zip."""
    words = f"{opened.path}/{chunk.key}: {chunk.name!r} at byte {chunk.start}"
    archive = None if chunk.pickle else await Zip.of(opened, chunk.key, chunk.start, chunk.nbytes)
    stored = torch_value(chunk.pickle if archive is None else await archive.read("data.pkl", MOST_PICKLE_BYTES), words)
    if not isinstance(stored, Stored) or (stored.dtype, stored.shape) != (chunk.dtype, chunk.length):
        found = f"{stored.dtype}{list(stored.shape)}" if isinstance(stored, Stored) else type(stored).__name__
        raise CorruptError(
            f"{words} is {found}, and {METADATA} says {chunk.dtype}{list(chunk.length)}: the files are of two saves"
        )
    if not stored.is_contiguous:
        raise CheckpointError(f"{words} has strides {list(stored.stride)}; save it with .contiguous()")
    start = 0
    first = stored.offset * DTYPES[stored.dtype]
    if archive is None:
        if first + stored.nbytes > chunk.nbytes:
            raise CorruptError(f"{words} ends behind its {chunk.nbytes} bytes; get the file again")
        start = chunk.start + first
    elif stored.nbytes:
        entry = archive.entries.get(f"data/{stored.key}")
        if entry is None or first + stored.nbytes > entry.nbytes:
            raise CorruptError(f"{words} ends behind its storage; get the file again")
        start = await archive.data_start(f"data/{stored.key}") + first
    return Piece("", chunk.name, chunk.dtype, chunk.shape, chunk.offset, chunk.length, chunk.key, start)


async def _value(opened: Opened, chunk: Chunk, naming: Naming) -> Iterable[tuple[Name, str]]:
    """Read a value, as JSON text by its names."""
    words = f"{opened.path}/{chunk.key}: {chunk.name!r} at byte {chunk.start}"
    archive = await Zip.of(opened, chunk.key, chunk.start, chunk.nbytes)
    pickle = await archive.read("data.pkl", MOST_PICKLE_BYTES)
    try:
        value = torch_value(pickle, words, naming.allowed)
    except CorruptError:
        raise
    except CheckpointError as error:
        value = Unread(str(error))
    return naming.value(chunk.name, value, words, len(pickle))
