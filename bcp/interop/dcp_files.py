"""Folders of torch.distributed.checkpoint by reference: each range of a file is a zip with one tensor, or one value.

Head and end of each range are read. The end of a range and the head of the next one are one read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from bcp.backends.small import check_small
from bcp.errors import CheckpointError, CorruptError
from bcp.format.foreign_files import unread
from bcp.interop.catalogue import DTYPES, Catalogue, Piece
from bcp.interop.dcp_metadata import Chunk, DcpMetadata, decode_dcp
from bcp.interop.dcp_names import Name, by_parameter, names_of
from bcp.interop.reading import Opened
from bcp.interop.torch_pickle import Stored, torch_value, value_text
from bcp.interop.torch_zip import TAIL_BYTES, Zip
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["METADATA", "dcp_folder"]

METADATA = ".metadata"
HEAD_BYTES = 4096
BATCH = 1024
MOST_METADATA_BYTES = 1 << 30
MOST_PICKLE_BYTES = 64 << 20
WRITER = re.compile(r"__(\d{1,9})_\d+\.distcp")
"""Names of files tell their ranks."""


async def dcp_folder(opened: Opened) -> Catalogue:
    """List the tensors and values of a folder.

    Raises:
        CheckpointError: ranges were transformed, pickles name other classes, or a tensor is not contiguous.
        CorruptError: a file is missing or damaged, or does not have what ``.metadata`` says.

    """
    where = f"{opened.path}/{METADATA}"
    check_small(where, opened.sizes[METADATA], MOST_METADATA_BYTES)
    data = await opened.read(METADATA, 0, opened.sizes[METADATA])
    meta = await in_thread_gc_paused(decode_dcp, data, where)
    _check_places(opened, meta, where)
    names = names_of(dict.fromkeys([*(chunk.name for chunk in meta.chunks), *meta.empty]), meta.paths, opened.path)
    pieces = [Piece.whole(*names[name], *meta.empty[name], METADATA, 0) for name in meta.empty]
    values: dict[Name, str] = {}
    ordered = sorted(meta.chunks, key=lambda chunk: (chunk.key, chunk.start))
    for chunks in (ordered[first : first + BATCH] for first in range(0, len(ordered), BATCH)):
        ahead = await opened.looked_ahead(span for chunk in chunks for span in _edges(chunk))
        for chunk in chunks:
            if chunk.dtype:
                pieces.append(await _piece(ahead, chunk, names[chunk.name]))
            else:
                values[names[chunk.name]] = await _value(ahead, chunk)
        await asyncio.sleep(0)  # others of this loop may run between
    writers = [int(match[1]) for chunk in meta.chunks if (match := WRITER.fullmatch(chunk.key))]
    return Catalogue(
        "torch.distributed.checkpoint", pieces, opened.sizes, by_parameter(values), ranks=max(writers, default=0) + 1
    )


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
    stop = chunk.start + chunk.nbytes
    head, tail = min(chunk.start + HEAD_BYTES, stop), max(stop - TAIL_BYTES, chunk.start)
    return (chunk.key, chunk.start, head), (chunk.key, tail, stop)


async def _piece(opened: Opened, chunk: Chunk, name: Name) -> Piece:
    """Find the elements of a box in its zip."""
    words = f"{opened.path}/{chunk.key}: {chunk.name!r} at byte {chunk.start}"
    archive = await Zip.of(opened, chunk.key, chunk.start, chunk.nbytes)
    stored = torch_value(await archive.read("data.pkl", MOST_PICKLE_BYTES), words)
    if not isinstance(stored, Stored) or (stored.dtype, stored.shape) != (chunk.dtype, chunk.length):
        found = f"{stored.dtype}{list(stored.shape)}" if isinstance(stored, Stored) else type(stored).__name__
        raise CorruptError(
            f"{words} is {found}, and {METADATA} says {chunk.dtype}{list(chunk.length)}: the files are of two saves"
        )
    if not stored.is_contiguous:
        raise CheckpointError(f"{words} has strides {list(stored.stride)}; save it with .contiguous()")
    start = 0
    if stored.nbytes:
        entry, first = archive.entries.get(f"data/{stored.key}"), stored.offset * DTYPES[stored.dtype]
        if entry is None or first + stored.nbytes > entry.nbytes:
            raise CorruptError(f"{words} ends behind its storage; get the file again")
        start = await archive.data_start(f"data/{stored.key}") + first
    return Piece(*name, chunk.dtype, chunk.shape, chunk.offset, chunk.length, chunk.key, start)


async def _value(opened: Opened, chunk: Chunk) -> str:
    """Read a value, as JSON text."""
    words = f"{opened.path}/{chunk.key}: {chunk.name!r} at byte {chunk.start}"
    archive = await Zip.of(opened, chunk.key, chunk.start, chunk.nbytes)
    pickle = await archive.read("data.pkl", MOST_PICKLE_BYTES)
    try:
        value = torch_value(pickle, words)
    except CorruptError:
        raise
    except CheckpointError as error:
        return unread(str(error))
    return value_text(value, len(pickle), words)
