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

from bcp.plan.layout import Layout
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
        need_chunk: int64[m], row of a chunk; not decreasing.
        need_rank: int64[m], a rank that needs part of it and is not its reader.
        need_lo: int64[m], first byte it needs, in the file's data section.
        need_hi: int64[m], one past the last; bytes between may not be needed.
    """

    rounds: int
    file: Ints
    start: Ints
    stop: Ints
    reader: Ints
    round: Ints
    need_chunk: Ints
    need_rank: Ints
    need_lo: Ints
    need_hi: Ints

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
        rows = np.flatnonzero((self.reader == rank) & (self.round == number))
        needs = np.flatnonzero(np.isin(self.need_chunk, rows)).tolist()
        return {int(self.need_rank[need]): self._transfer(need) for need in needs}

    def receives(self, rank: int, number: int) -> dict[int, Transfer]:
        """Return what a rank receives in a round: from whom, and what of that rank's chunk."""
        needs = np.flatnonzero((self.need_rank == rank) & (self.round[self.need_chunk] == number)).tolist()
        return {int(self.reader[self.need_chunk[need]]): self._transfer(need) for need in needs}

    def _chunk(self, row: int) -> Chunk:
        """Return one chunk as a record."""
        columns = (self.file, self.start, self.stop, self.reader, self.round)
        return Chunk(*(int(column[row]) for column in columns))

    def _transfer(self, need: int) -> Transfer:
        """Return one need as a record."""
        file = int(self.file[self.need_chunk[need]])
        return Transfer(file, int(self.need_lo[need]), int(self.need_hi[need]))


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
    rank, first, stop = _runs(line, ranges)
    if share:
        first, stop, member_at, members, member_rank = _intervals(rank, first, stop)
    else:
        member_at, members, member_rank = np.arange(len(rank)), np.ones_like(rank), rank
    fair = int((stop - first).sum()) * line.block // (len(ranges) * CHUNKS_PER_RANK)
    travelling = min(read_bytes, exchange_bytes // len(ranges), fair)
    cap = np.maximum(1, np.where(members > 1, travelling, read_bytes) // line.block)
    chunk_first, chunk_stop, source = _cut(first, stop, cap)
    file, start, end = line.bytes_of(chunk_first, chunk_stop)
    wanting = [member_rank[a : a + n].tolist() for a, n in zip(member_at[source], members[source], strict=True)]
    reader = _readers((end - start).tolist(), wanting, len(ranges))
    number = _numbered(reader, members[source] > 1)
    needs = _needs(line, ranges, (chunk_first, chunk_stop), wanting, reader)
    return Assignment(int(number.max(initial=-1)) + 1, file, start, end, reader, number, *needs)


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


def _intervals(rank: Ints, first: Ints, stop: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Cut overlapping runs into intervals, each wanted as a whole by a set of ranks.

    Returns first and last block + 1 of the intervals; where the ranks of each begin in the last column, and how
    many they are; and that column, the ranks of all intervals.
    """
    edges = np.unique(np.concatenate((first, stop)))
    begin = np.searchsorted(edges, first)
    counts = np.searchsorted(edges, stop) - begin
    interval = np.repeat(begin - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    members = np.repeat(rank, counts)
    order = np.lexsort((members, interval))
    wanted, at, sizes = np.unique(interval[order], return_index=True, return_counts=True)
    return edges[wanted], edges[wanted + 1] if len(wanted) else edges, at, sizes, members[order]


def _cut(first: Ints, stop: Ints, cap: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut runs into chunks of at most ``cap`` blocks and about equal length; also return which run each is of."""
    length = stop - first
    chunks = -(-length // cap)
    source = np.repeat(np.arange(len(first)), chunks)
    index = np.arange(len(source)) - (np.cumsum(chunks) - chunks)[source]
    length, chunks, origin = length[source], chunks[source], first[source]
    return origin + index * length // chunks, origin + (index + 1) * length // chunks, source


def _readers(nbytes: Sequence[int], wanting: Sequence[Sequence[int]], world_size: int) -> Ints:
    """Choose a reader for every chunk: those with the least choice first, the largest first, to the least loaded."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for chunk, ranks in enumerate(wanting):
        groups.setdefault(tuple(ranks), []).append(chunk)
    load = [0] * world_size
    reader = np.empty(len(nbytes), dtype=np.int64)
    for ranks, chunks in sorted(groups.items(), key=lambda group: (len(group[0]), group[0])):
        heap = [(load[rank], rank) for rank in ranks]
        heapq.heapify(heap)
        for chunk in sorted(chunks, key=lambda chunk: (-nbytes[chunk], chunk)):
            busy, rank = heap[0]
            reader[chunk] = rank
            heapq.heapreplace(heap, (busy + nbytes[chunk], rank))
        for busy, rank in heap:
            load[rank] = busy
    return reader


def _numbered(reader: Ints, shared: np.typing.NDArray[np.bool_]) -> Ints:
    """Number the shared chunks of each reader 0, 1, 2 ... in file order; -1 for private ones."""
    number = np.full(len(reader), -1, dtype=np.int64)
    for rank in np.unique(reader[shared]).tolist():
        rows = np.flatnonzero(shared & (reader == rank))
        number[rows] = np.arange(len(rows))
    return number


def _needs(
    line: _Line, ranges: Sequence[Ints], chunks: tuple[Ints, Ints], wanting: Sequence[Sequence[int]], reader: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (chunk, rank, first byte, last byte + 1) for every rank that needs part of a chunk another one reads."""
    first, stop = chunks
    chunk = np.repeat(np.arange(len(first)), [len(ranks) for ranks in wanting])
    rank = np.array([rank for ranks in wanting for rank in ranks], dtype=np.int64)
    others = rank != reader[chunk]
    chunk, rank = chunk[others], rank[others]
    low, high = first[chunk] * line.block, stop[chunk] * line.block
    for other in np.unique(rank).tolist():
        rows = np.flatnonzero(rank == other)
        origin = line.base[ranges[other][:, 0]] * line.block
        start, end = origin + ranges[other][:, 1], origin + ranges[other][:, 2]
        begins = start[np.searchsorted(end, low[rows], side="right")]
        ends = end[np.searchsorted(start, high[rows]) - 1]
        low[rows], high[rows] = np.maximum(low[rows], begins), np.minimum(high[rows], ends)
    file, _, _ = line.bytes_of(first[chunk], stop[chunk])
    return chunk, rank, low - line.base[file] * line.block, high - line.base[file] * line.block
