"""Who reads what: every wanted block is read once in the whole job (paper sec. 4.1, "Eliminating redundant loading").

Ranks that want the same blocks share the reading and send them to each other, in rounds of an all-to-all, while
reading goes on. Every rank computes the whole assignment from the same inputs; nothing more has to be said.

Inside, all files lie behind each other on one line of blocks: block ``b`` of file ``f`` is ``base[f] + b``.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bcp.plan.layout import Layout
from bcp.plan.lookup import rows_of
from bcp.plan.shards import Ints

__all__ = ["Assignment", "Chunk", "Transfer", "assign"]

CHUNKS_PER_RANK = 8
"""Shared bytes are cut at least this fine, so that the busiest reader has at most an eighth more than the mean."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of whole blocks of one file, read by one rank.

    Attributes:
        file: row of the file in the layout; -1 for an empty chunk, which only takes part in its round.
        start: first byte in the file's data section.
        stop: one past the last.
        reader: the rank that reads it.
        round: in which round it travels to the ranks that need it too; -1 where there are none.
    """

    file: int
    start: int
    stop: int
    reader: int
    round: int

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes [lo, hi) of a file's data section that one rank sends another in one round."""

    file: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """All chunks of all ranks, in file order, and who else needs what of them.

    Attributes:
        rounds: how many rounds every rank takes part in.
        file, start, stop, reader, round: int64[c], as in :class:`Chunk`.
        group: int64[c], row in ``ranks``.
        ranks: who wants the chunks of a group, ascending; the reader is one of them.
        ranges: what every rank wants, disjoint rows (file, start, stop), sorted.
    """

    rounds: int
    file: Ints
    start: Ints
    stop: Ints
    reader: Ints
    round: Ints
    group: Ints
    ranks: Sequence[Sequence[int]]
    ranges: Sequence[Ints]

    def items(self, rank: int) -> list[Chunk]:
        """Return what a rank does, in order: one chunk for each round, its private chunks spread evenly between.

        A rank that has no chunk left for a round takes part in it with an empty one.
        """
        mine = [self._chunk(row) for row in np.flatnonzero(self.reader == rank).tolist()]
        private = [chunk for chunk in mine if chunk.round < 0]
        shared = [chunk for chunk in mine if chunk.round >= 0]
        shared += [Chunk(-1, 0, 0, rank, number) for number in range(len(shared), self.rounds)]
        total, done, taken = sum(chunk.nbytes for chunk in mine), 0, 0
        items = []
        for chunk in shared:
            items.append(chunk)
            done += chunk.nbytes
            while taken < len(private) and done * self.rounds < total * (chunk.round + 1):
                items.append(private[taken])
                done += private[taken].nbytes
                taken += 1
        return items + private[taken:]

    def sends(self, rank: int, number: int) -> dict[int, Transfer]:
        """Return what a rank sends in a round: to whom, and what of its chunk."""
        rows = np.flatnonzero((self.reader == rank) & (self.round == number)).tolist()
        return {peer: self._transfer(row, peer) for row in rows for peer in self.ranks[self.group[row]] if peer != rank}

    def receives(self, rank: int, number: int) -> dict[int, Transfer]:
        """Return what a rank receives in a round: from whom, and what of that rank's chunk."""
        rows = np.flatnonzero((self.reader != rank) & (self.round == number)).tolist()
        wanted = (row for row in rows if rank in self.ranks[self.group[row]])
        return {int(self.reader[row]): self._transfer(row, rank) for row in wanted}

    def _chunk(self, row: int) -> Chunk:
        """Return one chunk as a record."""
        columns = (self.file, self.start, self.stop, self.reader, self.round)
        return Chunk(*(int(column[row]) for column in columns))

    def _transfer(self, row: int, peer: int) -> Transfer:
        """Return the hull of what a rank wants of a chunk; it wants something."""
        file, lo, hi = int(self.file[row]), int(self.start[row]), int(self.stop[row])
        first, stop = rows_of(self.ranges[peer][:, 0], file)
        _, starts, stops = self.ranges[peer][first:stop].T
        begin = int(starts[np.searchsorted(stops, lo, side="right")])
        end = int(stops[np.searchsorted(starts, hi) - 1])
        return Transfer(file, max(lo, begin), min(hi, end))


def assign(
    layout: Layout,
    ranges: Sequence[Ints],
    *,
    read_bytes: int,
    exchange_bytes: int,
    share: bool,
    block_bytes: int | None = None,
) -> Assignment:
    """Divide the reading over the ranks. Pure: equal inputs give equal assignments.

    A chunk is at most ``read_bytes`` long, and one that travels at most ``exchange_bytes`` divided by the number of
    ranks; but never less than one block. Its reader is a rank that wants part of it, the one with the least to read.

    Args:
        layout: the files.
        ranges: ``Wants.ranges()`` of every rank.
        read_bytes: the largest read.
        exchange_bytes: most bytes that one rank receives in one round.
        share: read every block once, and exchange. False: every rank reads its own blocks; there are no rounds.
        block_bytes: what can be read by itself; None: ``layout.block_bytes``. Parts of encoded files, for instance.

    """
    line = _Line.of(layout, block_bytes or layout.block_bytes)
    runs = _runs(line, ranges)
    first, stop, ranks = _intervals(*runs) if share else (*runs[1:], [(rank,) for rank in runs[0].tolist()])
    shared = np.array([len(members) > 1 for members in ranks], dtype=np.bool_)
    fair = int((stop - first).sum()) * line.block // (len(ranges) * CHUNKS_PER_RANK)
    travelling = min(read_bytes, exchange_bytes // len(ranges), fair)
    cap = np.maximum(1, np.where(shared, travelling, read_bytes) // line.block)
    first, stop, group = _cut(first, stop, cap)
    file, start, end = line.bytes_of(first, stop)
    reader = _readers((end - start).tolist(), group.tolist(), ranks, len(ranges))
    number = _numbered(reader, shared[group])
    return Assignment(int(number.max(initial=-1)) + 1, file, start, end, reader, number, group, ranks, ranges)


@dataclass(frozen=True, slots=True)
class _Line:
    """All blocks of all files on one line."""

    block: int
    base: Ints
    nbytes: Ints

    @classmethod
    def of(cls, layout: Layout, block: int) -> _Line:
        blocks = -(-layout.file_nbytes // block)
        return cls(block, np.cumsum(blocks) - blocks, layout.file_nbytes)

    def bytes_of(self, first: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
        """Return file, first byte and last byte + 1 of runs of blocks that do not leave their file."""
        file = np.searchsorted(self.base, first, side="right") - 1
        return (
            file,
            (first - self.base[file]) * self.block,
            np.minimum((stop - self.base[file]) * self.block, self.nbytes[file]),
        )


def _runs(line: _Line, ranges: Sequence[Ints]) -> tuple[Ints, Ints, Ints]:
    """Return (rank, first block, last block + 1) of what every rank wants: disjoint in a rank, each in one file."""
    rank = np.repeat(np.arange(len(ranges)), [len(rows) for rows in ranges])
    file, start, end = np.concatenate([np.empty((0, 3), dtype=np.int64), *ranges]).T
    first = line.base[file] + start // line.block
    stop = line.base[file] - (-end // line.block)
    new = (np.diff(rank, prepend=-1) != 0) | (np.diff(file, prepend=-1) != 0)
    new[1:] |= first[1:] > stop[:-1]
    heads = np.flatnonzero(new)
    tails = np.append(heads[1:], len(rank)) - 1 if len(heads) else heads
    return rank[heads], first[heads], stop[tails]


def _intervals(rank: Ints, first: Ints, stop: Ints) -> tuple[Ints, Ints, list[tuple[int, ...]]]:
    """Cut overlapping runs into intervals: first and last block + 1, and the ranks that want it, all of it."""
    edges = np.unique(np.concatenate((first, stop)))
    begin = np.searchsorted(edges, first)
    counts = np.searchsorted(edges, stop) - begin
    interval = np.repeat(begin - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    members = np.repeat(rank, counts)
    order = np.lexsort((members, interval))
    wanted, at = np.unique(interval[order], return_index=True)
    ranks = [tuple(some.tolist()) for some in np.split(members[order], at[1:])] if len(wanted) else []
    return edges[wanted], edges[wanted + 1], ranks


def _cut(first: Ints, stop: Ints, cap: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut runs into chunks of at most ``cap`` blocks and about equal length; also return which run each is of."""
    length = stop - first
    chunks = -(-length // cap)
    source = np.repeat(np.arange(len(first)), chunks)
    index = np.arange(len(source)) - (np.cumsum(chunks) - chunks)[source]
    length, chunks, origin = length[source], chunks[source], first[source]
    return origin + index * length // chunks, origin + (index + 1) * length // chunks, source


def _readers(nbytes: Sequence[int], group: Sequence[int], ranks: Sequence[tuple[int, ...]], world_size: int) -> Ints:
    """Choose a reader for every chunk: those with the least choice first, the largest first, to the least loaded."""
    chunks_of: dict[tuple[int, ...], list[int]] = {}
    for chunk, row in enumerate(group):
        chunks_of.setdefault(ranks[row], []).append(chunk)
    load = [0] * world_size
    reader = np.empty(len(nbytes), dtype=np.int64)
    for members, chunks in sorted(chunks_of.items(), key=lambda entry: (len(entry[0]), entry[0])):
        heap = [(load[rank], rank) for rank in members]
        heapq.heapify(heap)
        for chunk in sorted(chunks, key=lambda chunk: (-nbytes[chunk], chunk)):
            busy, rank = heap[0]
            reader[chunk] = rank
            heapq.heapreplace(heap, (busy + nbytes[chunk], rank))
        for busy, rank in heap:
            load[rank] = busy
    return reader


def _numbered(reader: Ints, shared: npt.NDArray[np.bool_]) -> Ints:
    """Number the shared chunks of each reader 0, 1, 2 ... in file order; -1 for private ones."""
    number = np.full(len(reader), -1, dtype=np.int64)
    for rank in np.unique(reader[shared]).tolist():
        rows = np.flatnonzero(shared & (reader == rank))
        number[rows] = np.arange(len(rows))
    return number
