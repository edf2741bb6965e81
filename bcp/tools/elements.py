"""Count the elements that differ between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np
import torch

from bcp._messages.tools import Compared, Counted
from bcp.plan.layout import Layout
from bcp.read.boxes import batches, read_boxes
from bcp.read.ranges import range_item, read_ranges
from bcp.read.shares import Share
from bcp.read.source import Source
from bcp.runtime.threads import in_thread
from bcp.stages.memcpy import torch_dtype, typed
from bcp.tools.calls import Progress, counting
from bcp.tools.pairs import ByteRange, larger

__all__ = ["in_ranges", "in_tensors"]

BATCH_BYTES = 32 << 20
"""Bytes that are read of each checkpoint at once."""

LEAST_BYTES = 1 << 20
"""The same for a small checkpoint, so that every rank has a share."""

CHUNK_BYTES = 1 << 20
"""Bytes that are compared at once: a comparison takes ten times their memory, and every thread keeps some of it."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""

_Piece: TypeAlias = tuple[tuple[int, int], torch.Tensor, torch.Tensor]
"""Rows of a tensor in both layouts, and flat elements of it in both checkpoints."""


class _Tally:
    """Counts the elements that differ, by the rows of tensors in both layouts."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._counts: dict[tuple[int, int], Counted] = {}
        self._told, self._nbytes = counting(progress, total), 0

    async def add(self, pieces: Iterable[_Piece], nbytes: int) -> None:
        """Compare pieces of tensors; ``nbytes`` were read of each checkpoint for them."""
        await in_thread(self._add, pieces)
        self._nbytes += nbytes
        self._told(nbytes)

    def _add(self, pieces: Iterable[_Piece]) -> None:
        for rows, one, two in pieces:
            most = CHUNK_BYTES // one.element_size()
            for mine, theirs in zip(one.split(most), two.split(most), strict=True):
                elements, largest = _count(mine, theirs)
                if elements:
                    known = self._counts.get(rows, Counted(*rows, 0, None))
                    self._counts[rows] = Counted(*rows, known.elements + elements, larger(known.largest, largest))

    @property
    def found(self) -> Compared:
        """The findings so far."""
        return Compared(counts=tuple(self._counts.values()), read_nbytes=self._nbytes)


def _count(one: torch.Tensor, two: torch.Tensor) -> tuple[int, float | None]:
    """Count the elements with other bits in flat tensors of one dtype and length; return also the largest distance."""
    size = one.element_size()
    word = WORDS[min(size, max(WORDS))]
    other = one.contiguous().view(word) != two.contiguous().view(word)
    if size > word.itemsize:
        other = other.view(-1, size // word.itemsize).any(dim=1)
    elements = int(other.sum())
    return elements, _distance(one, two, other) if elements else None


def _distance(one: torch.Tensor, two: torch.Tensor, where: torch.Tensor) -> float | None:
    """Return the largest absolute difference; None for dtypes that cannot be subtracted."""
    try:
        wide = torch.complex128 if one.is_complex() else torch.float64
        return float((one.to(wide)[where] - two.to(wide)[where]).abs().max())
    except (RuntimeError, TypeError, NotImplementedError):  # dtypes of four bits, and those that torch adds
        return None


# -- one layout ------------------------------------------------------------------------------------


async def in_ranges(a: Source, b: Source, ranges: Sequence[ByteRange], progress: Progress) -> Compared:
    """Compare byte ranges of two checkpoints of one layout."""
    tally = _Tally(progress, sum(found.stop - found.start for found in ranges))
    for batch in _batched(ranges):
        images = [await _read(source, batch, at) for at, source in enumerate((a, b))]
        pieces = _pieces(a.metadata.layout, batch, images)
        await tally.add(pieces, sum(found.stop - found.start for found in batch))
    return tally.found


def _pieces(layout: Layout, batch: Sequence[ByteRange], images: Sequence[Sequence[torch.Tensor]]) -> Iterator[_Piece]:
    """Yield the elements of each tensor in ranges that were read of both checkpoints."""
    for found, *both in zip(batch, *images, strict=True):
        for row, start, stop in found.pieces:
            dtype = torch_dtype(layout.tensors.dtype[row])
            length = (stop - start) // dtype.itemsize
            mine, theirs = [typed(image, start - found.start, (length,), dtype) for image in both]
            yield (row, row), mine, theirs


def _batched(ranges: Sequence[ByteRange]) -> list[list[ByteRange]]:
    """Group ranges that are read at once."""
    sizes = np.cumsum([found.stop - found.start for found in ranges])
    numbered = zip((sizes // BATCH_BYTES).tolist(), ranges, strict=True)
    return [[found for _, found in group] for _, group in groupby(numbered, key=lambda pair: pair[0])]


async def _read(source: Source, batch: Sequence[ByteRange], at: int) -> list[torch.Tensor]:
    """Read ranges of one of the two checkpoints, as bytes."""
    items = []
    for found in batch:
        key, file = (found.first, found.second)[at]
        name = f"{key} data bytes {found.start} to {found.stop}"
        items.append(range_item(source, name, key, file, found.start, found.stop))
    return await read_ranges(source, items, lambda _, image: image)


# -- any layouts -----------------------------------------------------------------------------------


async def in_tensors(
    a: Source, b: Source, rows: Sequence[tuple[int, int]], share: Share, progress: Progress
) -> Compared:
    """Compare a share of tensors of equal shapes and dtypes, whose rows in both layouts are given.

    The tour follows the files of the first checkpoint.
    """
    layout = a.metadata.layout
    nbytes = sum(int(layout.tensors.numel[row] * layout.tensors.itemsize[row]) for row, _ in rows)
    most = min(max(nbytes // share.readers, LEAST_BYTES), BATCH_BYTES)
    tour = share.of([(others, batch) for others in _tours(rows) for batch in batches(layout, list(others), most)])
    tally = _Tally(progress, sum(block.nbytes for _, batch in tour for block in batch))
    for others, batch in tour:
        filled = [block for block in batch if block.nbytes]
        one = await read_boxes(a, [(block.row, block.box) for block in filled])
        two = await read_boxes(b, [(others[block.row], block.box) for block in filled])
        pieces = [
            ((block.row, others[block.row]), mine.view(-1), theirs.view(-1))
            for block, mine, theirs in zip(filled, one, two, strict=True)
        ]
        await tally.add(pieces, sum(block.nbytes for block in filled))
    return tally.found


def _tours(rows: Sequence[tuple[int, int]]) -> list[dict[int, int]]:
    """Return rows of the first layout with those of the second: one tour, and more for ties that the second lacks."""
    tours: list[dict[int, int]] = []
    for row, other in rows:
        free = next((tour for tour in tours if row not in tour), None)
        if free is None:
            tours.append(free := {})
        free[row] = other
    return tours
