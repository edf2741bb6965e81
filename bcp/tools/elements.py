"""Count the elements that differ between two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
import torch

from bcp.plan.box import Box
from bcp.plan.layout import Layout
from bcp.plan.read.reads import ReadRequest, wants
from bcp.plan.shards import ShardRow, ShardTable
from bcp.read.boxes import batches, read_boxes
from bcp.read.ranges import range_item, read_ranges
from bcp.read.source import Source
from bcp.runtime.threads import in_thread, in_thread_gc_paused
from bcp.stages.memcpy import torch_dtype, typed
from bcp.tools.difference import ByteRange

__all__ = ["Counts", "in_ranges", "in_tensors"]

BATCH_BYTES = 64 << 20
"""Bytes that are read of each checkpoint at once."""

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""

_Piece: TypeAlias = tuple[int, torch.Tensor, torch.Tensor]
"""Row of a tensor, and flat elements of it in both checkpoints."""


@dataclass(slots=True)
class Counts:
    """How far a tensor differs.

    Attributes:
        numel: the number of its elements.
        elements: the number of elements with other bits.
        largest: the largest absolute difference; None for dtypes without one. It may be nan.
    """

    numel: int
    elements: int = 0
    largest: float | None = None

    def add(self, one: torch.Tensor, two: torch.Tensor) -> None:
        """Compare flat tensors of equal dtype and length."""
        size = one.element_size()
        word = WORDS[min(size, max(WORDS))]
        other = one.contiguous().view(word) != two.contiguous().view(word)
        if size > word.itemsize:
            other = other.view(-1, size // word.itemsize).any(dim=1)
        elements = int(other.sum())
        self.elements += elements
        if not elements:
            return
        distance = _distance(one, two, other)
        if distance is not None and not math.isnan(self.largest or 0.0):
            self.largest = distance if math.isnan(distance) else max(distance, self.largest or 0.0)


class _Tally:
    """The counts of the tensors of a layout that differ, by row."""

    def __init__(self, layout: Layout) -> None:
        self.counts: dict[int, Counts] = {}
        self._layout = layout

    def add(self, pieces: Iterable[_Piece]) -> None:
        """Compare pieces of tensors."""
        for row, one, two in pieces:
            entry = self.counts.get(row) or Counts(int(self._layout.tensors.numel[row]))
            entry.add(one, two)
            if entry.elements:
                self.counts[row] = entry


def _distance(one: torch.Tensor, two: torch.Tensor, where: torch.Tensor) -> float | None:
    """Return the largest absolute difference; None for dtypes that cannot be subtracted."""
    try:
        wide = torch.complex128 if one.is_complex() else torch.float64
        return float((one.to(wide)[where] - two.to(wide)[where]).abs().max())
    except (RuntimeError, TypeError, NotImplementedError):  # dtypes of four bits, and those that torch adds
        return None


# -- one layout ------------------------------------------------------------------------------------


async def in_ranges(a: Source, b: Source, ranges: Sequence[ByteRange]) -> tuple[dict[int, Counts], int]:
    """Compare byte ranges of two checkpoints of one layout.

    Returns:
        The counts of tensors that differ, by their rows in the layout, and the bytes that were read of each checkpoint.

    """
    layout = a.metadata.layout
    places = await in_thread_gc_paused(_places, a)
    tally = _Tally(layout)
    for batch in _batched(ranges):
        images = [await _read(source, batch, at) for at, source in enumerate((a, b))]
        await in_thread(tally.add, _pieces(layout, places, batch, images))
    return tally.counts, sum(found.stop - found.start for found in ranges)


def _pieces(
    layout: Layout, places: ReadRequest, batch: Sequence[ByteRange], images: Sequence[Sequence[torch.Tensor]]
) -> Iterator[_Piece]:
    """Yield the elements of each tensor in ranges that were read of both checkpoints."""
    for found, *both in zip(batch, *images, strict=True):
        for row, start, stop in _inside(places, found):
            dtype = torch_dtype(layout.tensors.dtypes_of(np.array([row]))[0])
            length = (stop - start) // dtype.itemsize
            mine, theirs = [typed(image, start - found.start, (length,), dtype) for image in both]
            yield row, mine, theirs


def _places(source: Source) -> ReadRequest:
    """Return the bytes of all tensors with data of their own, by file and byte."""
    layout = source.metadata.layout
    rows = [row for row in range(len(layout.tensors)) if not layout.tensors.tied_to[row]]
    metas = [layout.tensors[row] for row in rows]
    table = ShardTable.build([ShardRow(meta, Box.whole(meta.shape)) for meta in metas])
    return wants(layout, table, np.array(rows))


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


def _inside(places: ReadRequest, found: ByteRange) -> list[tuple[int, int, int]]:
    """Return (row of the tensor, start, stop) for the tensors with bytes in a range, cut to the range."""
    first, last = np.searchsorted(places.file, [found.row, found.row + 1])
    start, stop = places.start[first:last], places.stop[first:last]
    hits = first + np.flatnonzero((start < found.stop) & (stop > found.start))
    return [
        (int(places.tensor[hit]), max(int(places.start[hit]), found.start), min(int(places.stop[hit]), found.stop))
        for hit in hits.tolist()
    ]


# -- any layouts -----------------------------------------------------------------------------------


async def in_tensors(a: Source, b: Source, common: Sequence[tuple[int, int]]) -> tuple[dict[int, Counts], int]:
    """Compare tensors of equal shapes and dtypes, whose rows in both layouts are given; otherwise as :func:`in_ranges`.

    The tour follows the files of the first checkpoint.
    """
    layout, other = a.metadata.layout, dict(common)
    tally, nbytes = _Tally(layout), 0
    for batch in batches(layout, [row for row, _ in common], BATCH_BYTES):
        filled = [block for block in batch if block.nbytes]
        one = await read_boxes(a, [(block.row, block.box) for block in filled])
        two = await read_boxes(b, [(other[block.row], block.box) for block in filled])
        both = zip(filled, one, two, strict=True)
        await in_thread(tally.add, [(block.row, mine.view(-1), theirs.view(-1)) for block, mine, theirs in both])
        nbytes += sum(block.nbytes for block in filled)
    return tally.counts, nbytes
