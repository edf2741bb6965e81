"""The chunks that one rank reads, sends and receives, and the copies from them into its shards (paper sec. 3.3, 4.4).

:func:`assign` lists the chunks. Shared chunks travel in rounds of an all-to-all while reading goes on; every rank takes
part in every round. :func:`copies` finds the destination of each byte, for all chunks at once. Most copies are *runs*:
contiguous in the file and in the shard. :func:`zero_copy_reads` chooses chunks that are read into shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bcp.errors import CorruptError
from bcp.plan.box import Box, Boxes, FlatBoxes, decompose, sweep_intervals
from bcp.plan.columns import Bools, Ints, order_of, spread
from bcp.plan.layout import Layout
from bcp.plan.read.reads import ReadRequest, box_index, fitted
from bcp.plan.read.share import VERSIONS, BlockIndex, RankSets, SharedReads
from bcp.plan.shards import ShardTable

__all__ = [
    "MOST_RUNS",
    "Assignment",
    "ByteRuns",
    "Chunk",
    "Copies",
    "ZeroCopyReads",
    "apart",
    "assign",
    "check_complete",
    "copies",
    "zero_copy_reads",
]

MOST_RUNS = 1024
"""A chunk of more runs is read into one buffer, and copied from there.

32 MiB of runs of 32 KiB: 5.6 ms of CPU for views and digests straight, 10.8 for digests and copies through a buffer.
Runs of 8 KiB: 9.0 against 14.3, but Python takes most of the time, in one thread at a time.
"""


@dataclass(frozen=True, slots=True, eq=False)
class ZeroCopyReads:
    """Destinations of the zero-copy chunks among c chunks: their bytes are read straight into shards."""

    begin: Ints  # int64[c + 1]; chunk i has the runs ``begin[i]`` to ``begin[i + 1]``; a zero-copy chunk has some
    runs: ByteRuns  # in file order within each chunk; they do not overlap, and no rank needs the bytes between them

    @property
    def chunks(self) -> Bools:
        """The zero-copy chunks: bool[c]."""
        return np.diff(self.begin) > 0

    def of_chunk(self, chunk: int) -> ByteRuns:
        """Return the runs of one chunk."""
        rows, runs = slice(self.begin[chunk], self.begin[chunk + 1]), self.runs
        return ByteRuns(runs.row[rows], runs.start[rows], runs.nbytes[rows], runs.to[rows])


def zero_copy_reads(all_copies: Copies, private: Bools, plain: Bools) -> ZeroCopyReads:
    """Choose the zero-copy chunks: few runs into plain memory, and no byte that goes to two places.

    ``private``, bool[c], says that no other rank needs the chunk, and that nothing has to be done to its bytes.
    ``plain``, bool[n], says that the elements of the shard can be written as bytes, as they lie in the file.
    """
    chunk, counts = all_copies.chunk, all_copies.numel // all_copies.run
    number = np.bincount(chunk, weights=counts, minlength=len(private))
    odd = np.bincount(chunk, weights=~plain[all_copies.row], minlength=len(private))
    able = private & (odd == 0) & (number <= MOST_RUNS)
    copies = np.flatnonzero(able[chunk])
    runs, chunk = all_copies.runs(copies), np.repeat(chunk[copies], counts[copies])
    order = order_of((runs.start, chunk))
    start, stop, chunk = runs.start[order], (runs.start + runs.nbytes)[order], chunk[order]
    twice = (chunk[1:] == chunk[:-1]) & (start[1:] < stop[:-1])
    able[chunk[1:][twice]] = False
    kept = able[chunk]
    order, chunk = order[kept], chunk[kept]
    begin = np.searchsorted(chunk, np.arange(len(private) + 1))
    return ZeroCopyReads(begin, ByteRuns(runs.row[order], runs.start[order], runs.nbytes[order], runs.to[order]))


def apart(address: Ints, nbytes: Ints) -> Bools:
    """Return bool[n]: the memory ranges that share no byte with another one of them."""
    order = np.argsort(address, kind="stable")
    start, reach = address[order], np.maximum.accumulate((address + nbytes)[order])
    meets = np.zeros(len(order) + 1, dtype=np.bool_)
    meets[1:-1] = start[1:] < reach[:-1]
    alone = np.empty(len(order), dtype=np.bool_)
    alone[order] = ~(meets[:-1] | meets[1:])
    return alone


@dataclass(frozen=True, slots=True, eq=False)
class ByteRuns:
    """Contiguous bytes, one row each."""

    row: Ints  # int64[r], row of the target shard in this rank's table
    start: Ints  # int64[r], first byte in the file's data section
    nbytes: Ints  # int64[r], how many
    to: Ints  # int64[r], their destination: first byte in the shard, counted as if it lay in memory row by row

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One copy: block ``source`` of an array of shape ``source_lengths``, into ``target`` of ``target_lengths``."""

    source_lengths: tuple[int, ...]
    source: Box
    target_lengths: tuple[int, ...]
    target: Box


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """n copies, sorted by the chunk that they come from; there are c chunks.

    The source is a block of an array in the file: the bytes of the data section from ``start`` on, viewed with the
    *saved* dtype in the shape ``source.length``. The target is a block of an array in the shard: its elements from
    ``first`` on, counted row by row, viewed in the shape ``target.length``. Both blocks have the same extent.
    """

    begin: Ints  # int64[c + 1]; chunk i has the copies ``begin[i]`` to ``begin[i + 1]``
    row: Ints  # int64[n], row of the target shard in this rank's table
    ndim: Ints  # int64[n], dimensions of its tensor
    itemsize: Ints  # int64[n], bytes of a saved element
    start: Ints  # int64[n], first byte of the source
    source: Boxes  # block of the source
    first: Ints  # int64[n], first element of the target. A shard that is a whole box is one target, and 0 is its first.
    target: Boxes  # block of the target
    numel: Ints  # int64[n], elements of the block
    run: Ints  # int64[n], how many of them lie side by side in both

    def __len__(self) -> int:
        return len(self.row)

    @property
    def chunk(self) -> Ints:
        """The chunk of each copy: int64[n]."""
        return np.repeat(np.arange(len(self.begin) - 1), np.diff(self.begin))

    def of_chunk(self, chunk: int) -> Ints:
        """Return the copies of one chunk."""
        return np.arange(self.begin[chunk], self.begin[chunk + 1])

    def runs(self, copies: Ints) -> ByteRuns:
        """Split copies into runs, in the order of the copies."""
        length = self.run[copies]
        indices, number = spread(self.numel[copies] // length)
        rows, element = copies[indices], number * length[indices]
        itemsize = self.itemsize[rows]
        return ByteRuns(
            self.row[rows],
            self.start[rows] + self.source.take(rows).position(element) * itemsize,
            length[indices] * itemsize,
            (self.first[rows] + self.target.take(rows).position(element)) * itemsize,
        )

    def block(self, copy: int) -> BlockCopy:
        """Return one copy as boxes, in its tensor's number of dimensions."""
        source, target, ndim = self.source, self.target, int(self.ndim[copy])
        extent = tuple(source.extent[copy, :ndim].tolist())
        return BlockCopy(
            tuple(source.length[copy, :ndim].tolist()),
            Box(tuple(source.low[copy, :ndim].tolist()), extent),
            tuple(target.length[copy, :ndim].tolist()),
            Box(tuple(target.low[copy, :ndim].tolist()), extent),
        )


def copies(layout: Layout, table: ShardTable, wanted: ReadRequest, chunks: Ints) -> Copies:
    """Return the copies from these chunks into this rank's shards.

    Irregular intervals are decomposed into boxes here (paper sec. 4.4), for all chunks at once. Rows of ``chunks`` are
    (file, first byte in its data section, last byte + 1), at element boundaries: int64[c, 3]. ``wanted`` is
    :func:`~bcp.plan.read.reads.wants` of ``layout`` and ``table``.
    """
    chunk, want, lo, hi = _cut(layout, wanted, chunks)
    itemsize = layout.tensors.itemsize[wanted.tensor[want]]
    index, box = box_index(layout), wanted.box[want]
    begin = wanted.first[want] + (lo - wanted.start[want]) // itemsize
    sources = decompose(index.length[box], begin, begin + (hi - lo) // itemsize)
    targets = _targets(table, index.length.shape[1])
    first, stop = (np.searchsorted(targets.interval, wanted.row[want], side=side) for side in ("left", "right"))
    source_rows, other = spread((stop - first)[sources.interval])
    cut = sources.interval[source_rows]
    other += first[cut]
    # Where the two boxes meet, in the coordinates of the global tensor.
    corner = index.offset[box[cut]] + sources.offset[source_rows]
    shard = fitted(table.offset, corner.shape[1], 0)[wanted.row[want[cut]]] + targets.offset[other]
    low = np.maximum(corner, shard)
    extent = np.minimum(corner + sources.length[source_rows], shard + targets.length[other]) - low
    hit = np.flatnonzero((extent > 0).all(axis=1))
    source_rows, other, cut = source_rows[hit], other[hit], cut[hit]
    source = Boxes(sources.length[source_rows], (low - corner)[hit], extent[hit])
    target = Boxes(targets.length[other], (low - shard)[hit], extent[hit])
    row, tensor = wanted.row[want[cut]], wanted.tensor[want[cut]]
    return Copies(
        begin=np.searchsorted(chunk[cut], np.arange(len(chunks) + 1)),
        row=row,
        ndim=layout.tensors.ndim[tensor],
        itemsize=itemsize[cut],
        start=lo[cut] + (sources.flat[source_rows] - begin[cut]) * itemsize[cut],
        source=source,
        first=targets.flat[other] - table.start[row],
        target=target,
        numel=np.asarray(source.extent.prod(axis=1), dtype=np.int64),
        run=_run(source, target),
    )


def check_complete(all_copies: Copies, table: ShardTable, wanted: ReadRequest) -> None:
    """Raise CorruptError unless the copies write as many elements as the rank needs."""
    rows = np.zeros(len(table), dtype=np.bool_)
    rows[wanted.row] = True
    count, total = int(all_copies.numel.sum()), int((table.stop - table.start)[rows].sum())
    if count != total:
        raise CorruptError(f"of {total} elements that this rank wants, {count} are in what is to be read; {VERSIONS}")


def _cut(layout: Layout, wanted: ReadRequest, chunks: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (chunk, want, first byte, last byte + 1) of each intersection of a chunk and a request, by chunk."""
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
    """Return int64[n]: the number of elements of two blocks that lie side by side in both."""
    run = np.ones(len(source.low), dtype=np.int64)
    whole = np.ones(len(run), dtype=np.bool_)  # whether all dimensions further in are whole in both
    for dim in range(source.extent.shape[1] - 1, -1, -1):
        extent = source.extent[:, dim]
        run = np.where(whole, run * extent, run)
        whole = whole & (extent == source.length[:, dim]) & (extent == target.length[:, dim])
    return run


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of whole blocks of one file, read by one rank."""

    file: int  # row of the file in the layout; -1 for an empty chunk, which only takes part in its round
    start: int  # first byte in the file's data section
    stop: int  # one past the last
    reader: int  # the rank that reads it
    round: int  # the round in which it travels to the other ranks that need it; -1 if there are none
    # row in :attr:`Assignment.chunks` of the rank that was given this record; -1 if it is not in there
    number: int = field(default=-1, compare=False)

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The reads, sends and receives of one rank."""

    rank: int
    rounds: int  # number of rounds; every rank takes part in all
    private: tuple[Chunk, ...]  # chunks that only this rank reads, in file order
    # the next five: int64[c], fields of the :class:`Chunk` records that the rank shares with others, by round
    file: Ints
    start: Ints
    stop: Ints
    reader: Ints
    round: Ints
    group: Ints  # int64[c], row in ``groups``: the ranks that need the chunk
    groups: RankSets

    def __repr__(self) -> str:
        return (
            f"<Assignment of rank {self.rank}: {len(self.private)} private chunks, {(self.reader == self.rank).sum()} "
            f"shared ones, {(self.reader != self.rank).sum()} to receive in {self.rounds} rounds>"
        )

    @property
    def chunks(self) -> Ints:
        """int64[k, 3]: (file, start, stop) of all that this rank reads or receives, private chunks first."""
        private = [(chunk.file, chunk.start, chunk.stop) for chunk in self.private]
        return np.concatenate(
            (np.array(private, np.int64).reshape(-1, 3), np.stack((self.file, self.start, self.stop), axis=1))
        )

    @property
    def most_received(self) -> int:
        """The most bytes that this rank receives in one round."""
        received = self.reader != self.rank
        nbytes = np.bincount(self.round[received], weights=(self.stop - self.start)[received])
        return int(nbytes.max(initial=0))

    def items(self) -> list[Chunk]:
        """Return the chunks that the rank reads, in order: one for each round, private ones spread evenly between.

        A rank that has no chunk left for a round takes part in it with an empty chunk.
        """
        shared = [self._chunk(row) for row in np.flatnonzero(self.reader == self.rank).tolist()]
        shared += [Chunk(-1, 0, 0, self.rank, number) for number in range(len(shared), self.rounds)]
        total, done, taken = sum(chunk.nbytes for chunk in (*shared, *self.private)), 0, 0
        items = []
        for chunk in shared:
            items.append(chunk)
            done += chunk.nbytes
            while taken < len(self.private) and done * self.rounds < total * (chunk.round + 1):
                items.append(self.private[taken])
                done += self.private[taken].nbytes
                taken += 1
        return [*items, *self.private[taken:]]

    def sends(self, number: int) -> list[int]:
        """Return the ranks to which this one sends all of its chunk of a round."""
        begin, ranks = self.groups.begin, self.groups.rank
        groups = (int(self.group[row]) for row in self._rows(number) if self.reader[row] == self.rank)
        return [
            rank for group in groups for rank in ranks[begin[group] : begin[group + 1]].tolist() if rank != self.rank
        ]

    def receives(self, number: int) -> list[Chunk]:
        """Return the chunks that this rank receives in a round, each whole and from its reader."""
        return [self._chunk(row) for row in self._rows(number) if self.reader[row] != self.rank]

    def _rows(self, number: int) -> range:
        return range(*np.searchsorted(self.round, (number, number + 1)).tolist())

    def _chunk(self, row: int) -> Chunk:
        """Return one chunk as a record."""
        file, start, stop, reader, number = (
            int(column[row]) for column in (self.file, self.start, self.stop, self.reader, self.round)
        )
        return Chunk(file, start, stop, reader, number, len(self.private) + row)


def assign(line: BlockIndex, rank: int, runs: Ints, shared: SharedReads, *, read_bytes: int) -> Assignment:
    """List the chunks that a rank reads, sends and receives: it reads by itself all blocks that it does not receive.

    ``runs`` are the blocks that the rank needs. ``shared`` has the blocks that ranks read for each other, the same on
    all ranks.
    ``read_bytes`` is the largest read, but never less than one block.
    """
    rows = shared.of_rank(rank)
    source, number = spread(shared.parts[rows])
    rows = rows[source]
    chunks = _part(shared.run[rows], number, shared.parts[rows])
    round_ = shared.rounds_of(rows) + number
    order = np.argsort(round_, kind="stable")
    rows, chunks, round_ = rows[order], chunks[order], round_[order]
    alone = _without(runs, chunks)
    parts = -(-np.diff(alone)[:, 0] // max(1, read_bytes // line.block_bytes))
    source, number = spread(parts)
    private = np.stack(line.bytes_of(_part(alone[source], number, parts[source])), axis=1)
    return Assignment(
        rank,
        shared.rounds,
        tuple(Chunk(file, start, stop, rank, -1, row) for row, (file, start, stop) in enumerate(private.tolist())),
        *line.bytes_of(chunks),
        shared.reader[rows],
        round_,
        shared.group[rows],
        shared.groups,
    )


def _part(run: Ints, number: Ints, parts: Ints) -> Ints:
    """Return part ``number`` of each run, cut into that many about equal parts."""
    first, length = run[:, 0], run[:, 1] - run[:, 0]
    return np.stack((first + number * length // parts, first + (number + 1) * length // parts), axis=1)


def _without(runs: Ints, others: Ints) -> Ints:
    """Return the intervals that are in the runs and in none of the others; both are disjoint by themselves."""
    intervals, depth = sweep_intervals(np.concatenate((runs, others)), np.repeat([1, 2], [len(runs), len(others)]))
    return intervals[np.flatnonzero(depth == 1)]
