"""From bytes of files to elements of shards: every copy that one rank makes, as columns (paper sec. 3.3, 4.4).

:func:`bcp.plan.load.reads.wants` says which bytes a rank needs, :mod:`bcp.plan.load.assign` in which chunks they come;
:func:`copies` says where each byte of each chunk goes. A copy is a block of an array that lies in the file, and an
equally large block of an array that lies in a shard. Most are *runs*: contiguous in both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bcp.errors import CorruptError
from bcp.plan.box import Box
from bcp.plan.columns import Ints, spread
from bcp.plan.flat import Boxes, FlatBoxes, decompose
from bcp.plan.layout import Layout
from bcp.plan.load.line import VERSIONS
from bcp.plan.load.pieces import fitted, pieces_of
from bcp.plan.load.reads import Wants
from bcp.plan.shards import ShardTable

__all__ = ["Block", "Copies", "Runs", "check_complete", "copies"]


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Contiguous bytes, one row each.

    Attributes:
        row: int64[r], row of the target shard in this rank's table.
        start: int64[r], first byte in the file's data section.
        nbytes: int64[r], how many.
        to: int64[r], where they go: first byte in the shard, counted as if it lay in memory row by row.
    """

    row: Ints
    start: Ints
    nbytes: Ints
    to: Ints

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.row)


@dataclass(frozen=True, slots=True)
class Block:
    """One copy: block ``source`` of an array of shape ``source_lengths``, into ``target`` of ``target_lengths``."""

    source_lengths: tuple[int, ...]
    source: Box
    target_lengths: tuple[int, ...]
    target: Box


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """n copies, sorted by the chunk that they come from; there are c chunks.

    Source: the bytes of the file's data section from ``start`` on, viewed with the *saved* dtype as an array of shape
    ``source.length``; the block ``source`` of it. Target: the elements of the shard from ``first`` on, counted row by
    row, viewed as an array of shape ``target.length``; the block ``target`` of it. Both blocks have the same extent.

    Attributes:
        begin: int64[c + 1]; chunk i has the copies ``begin[i]`` to ``begin[i + 1]``.
        row: int64[n], row of the target shard in this rank's table.
        ndim: int64[n], dimensions of its tensor.
        itemsize: int64[n], bytes of a saved element.
        start: int64[n], first byte of the source.
        source: block of the source.
        first: int64[n], first element of the target. A shard that is a whole box is one target, and 0 is its first.
        target: block of the target.
        numel: int64[n], elements of the block.
        run: int64[n], how many of them lie side by side in both.
    """

    begin: Ints
    row: Ints
    ndim: Ints
    itemsize: Ints
    start: Ints
    source: Boxes
    first: Ints
    target: Boxes
    numel: Ints
    run: Ints

    def __len__(self) -> int:
        """Return the number of copies."""
        return len(self.row)

    @property
    def chunk(self) -> Ints:
        """int64[n]: the chunk of each copy."""
        return np.repeat(np.arange(len(self.begin) - 1), np.diff(self.begin))

    def of_chunk(self, chunk: int) -> Ints:
        """Return the copies of one chunk."""
        return np.arange(self.begin[chunk], self.begin[chunk + 1])

    def runs(self, copies: Ints) -> Runs:
        """Take copies apart into runs, in the order of the copies."""
        length = self.run[copies]
        each, number = spread(self.numel[copies] // length)
        which, element = copies[each], number * length[each]
        itemsize = self.itemsize[which]
        return Runs(
            self.row[which],
            self.start[which] + self.source.take(which).position(element) * itemsize,
            length[each] * itemsize,
            (self.first[which] + self.target.take(which).position(element)) * itemsize,
        )

    def block(self, copy: int) -> Block:
        """Return one copy as boxes, in its tensor's number of dimensions."""
        source, target, ndim = self.source, self.target, int(self.ndim[copy])
        extent = tuple(source.extent[copy, :ndim].tolist())
        return Block(
            tuple(source.length[copy, :ndim].tolist()),
            Box(tuple(source.low[copy, :ndim].tolist()), extent),
            tuple(target.length[copy, :ndim].tolist()),
            Box(tuple(target.low[copy, :ndim].tolist()), extent),
        )


def copies(layout: Layout, table: ShardTable, wanted: Wants, chunks: Ints) -> Copies:
    """Say where everything goes that this rank wants of these chunks.

    Irregular intervals are decomposed into boxes here (paper sec. 4.4), for all chunks at once.

    Args:
        layout: where everything lies.
        table: the target shards.
        wanted: :func:`~bcp.plan.load.reads.wants` of these two.
        chunks: int64[c, 3], rows (file, first byte in its data section, last byte + 1), at element boundaries.

    """
    chunk, want, lo, hi = _cut(layout, wanted, chunks)
    itemsize = layout.tensors.itemsize[wanted.tensor[want]]
    pieces, piece = pieces_of(layout), wanted.piece[want]
    begin = wanted.first[want] + (lo - wanted.start[want]) // itemsize
    boxes = decompose(pieces.length[piece], begin, begin + (hi - lo) // itemsize)
    targets = _targets(table, pieces.length.shape[1])
    first, stop = (np.searchsorted(targets.interval, wanted.row[want], side=side) for side in ("left", "right"))
    each, other = spread((stop - first)[boxes.interval])
    cut = boxes.interval[each]
    other += first[cut]
    # Where the two boxes meet, in the coordinates of the global tensor.
    corner = pieces.offset[piece[cut]] + boxes.offset[each]
    shard = fitted(table.offset, corner.shape[1], 0)[wanted.row[want[cut]]] + targets.offset[other]
    low = np.maximum(corner, shard)
    extent = np.minimum(corner + boxes.length[each], shard + targets.length[other]) - low
    hit = np.flatnonzero((extent > 0).all(axis=1))
    each, other, cut = each[hit], other[hit], cut[hit]
    source = Boxes(boxes.length[each], (low - corner)[hit], extent[hit])
    target = Boxes(targets.length[other], (low - shard)[hit], extent[hit])
    row, tensor = wanted.row[want[cut]], wanted.tensor[want[cut]]
    return Copies(
        begin=np.searchsorted(chunk[cut], np.arange(len(chunks) + 1)),
        row=row,
        ndim=layout.tensors.ndim[tensor],
        itemsize=itemsize[cut],
        start=lo[cut] + (boxes.flat[each] - begin[cut]) * itemsize[cut],
        source=source,
        first=targets.flat[other] - table.start[row],
        target=target,
        numel=np.asarray(source.extent.prod(axis=1), dtype=np.int64),
        run=_run(source, target),
    )


def check_complete(found: Copies, table: ShardTable, wanted: Wants) -> None:
    """Raise CorruptError where the copies do not write as many elements as are wanted."""
    rows = np.zeros(len(table), dtype=np.bool_)
    rows[wanted.row] = True
    count, total = int(found.numel.sum()), int((table.stop - table.start)[rows].sum())
    if count != total:
        raise CorruptError(f"of {total} elements that this rank wants, {count} are in what is to be read; {VERSIONS}")


def _cut(layout: Layout, wanted: Wants, chunks: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (chunk, want, first byte, last byte + 1) of all that chunks and wanted parts share, by chunk."""
    base = np.cumsum(layout.file_nbytes) - layout.file_nbytes  # all files behind each other
    begin = base[wanted.file]
    start, stop = begin + wanted.start, begin + wanted.stop
    low, high = base[chunks[:, 0]] + chunks[:, 1], base[chunks[:, 0]] + chunks[:, 2]
    first, last = np.searchsorted(np.maximum.accumulate(stop), low, side="right"), np.searchsorted(start, high)
    chunk, want = spread(np.maximum(last - first, 0))
    want += first[chunk]
    lo, hi = np.maximum(start[want], low[chunk]), np.minimum(stop[want], high[chunk])
    hit = np.flatnonzero(lo < hi)
    chunk, want, lo, hi = chunk[hit], want[hit], lo[hit], hi[hit]
    return chunk, want, lo - begin[want], hi - begin[want]


def _targets(table: ShardTable, width: int) -> FlatBoxes:
    """Return the boxes that make up each shard, in the coordinates of the shard's own box."""
    # A tensor of more dimensions than any in the layout is not in the layout: nothing is wanted for it.
    known = table.tensors.ndim[table.tensor] <= width
    return decompose(fitted(table.length, width, 1), np.where(known, table.start, 0), np.where(known, table.stop, 0))


def _run(source: Boxes, target: Boxes) -> Ints:
    """int64[n]: how many elements of two blocks lie side by side in both."""
    run = np.ones(len(source.low), dtype=np.int64)
    whole = np.ones(len(run), dtype=np.bool_)  # whether all dimensions further in are whole in both
    for dim in range(source.extent.shape[1] - 1, -1, -1):
        extent = source.extent[:, dim]
        run = np.where(whole, run * extent, run)
        whole = whole & (extent == source.length[:, dim]) & (extent == target.length[:, dim])
    return run
