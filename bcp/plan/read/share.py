"""Choose the reader of each block that several ranks want: it is read once in the whole job (paper sec. 4.1).

Rank 0 calls :func:`share_reads`. Its time depends on the number of distinct requests, and not on the number of ranks
with the same one: about 1 s for 8,960 ranks, see docs/scale.md. :func:`bcp.plan.read.copies.assign` derives the work of
one rank from its result.

:func:`fill` divides the blocks of each set of ranks over its members, so that all take equally long to read. A set
fills up the members with the least load first. Sets with the least choice go first, and sets without a common rank go
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bcp._messages.base import refused
from bcp._messages.planning import BlockRuns, SharedRuns
from bcp.errors import MessageError
from bcp.plan.box import sweep_intervals
from bcp.plan.columns import Ints, begins, mix, spread
from bcp.plan.layout import Layout

__all__ = ["VERSIONS", "BlockIndex", "Floats", "RankSets", "SharedReads", "WantedBlocks", "fill", "share_reads"]

VERSIONS = "run the same version of bcp on every rank"


@dataclass(frozen=True, slots=True, eq=False)
class BlockIndex:
    """The line of blocks: block ``b`` of file ``f`` is number ``base[f] + b``.

    A *run* is a number of blocks of one file, as a row (first block, last block + 1).
    """

    block_bytes: int  # bytes of a block; the last one of a file may be shorter
    base: Ints  # int64[f + 1], first block of each file; then the end of the last one
    nbytes: Ints  # int64[f], bytes of each file's data section
    kinds: Ints  # first blocks of files of another kind than the file before

    @classmethod
    def of(cls, layout: Layout, block_bytes: int | None = None) -> BlockIndex:
        """Put the files of a layout on a line; ``block_bytes``: bytes of a block, if not those of the layout."""
        block = block_bytes or layout.block_bytes
        base = begins(-(-layout.file_nbytes // block))
        kinds = base[np.flatnonzero(np.diff(layout.file_kind)) + 1]
        return cls(block, base, layout.file_nbytes, kinds)

    def runs(self, ranges: Ints) -> Ints:
        """Return int64[k, 2]: longest runs of blocks with bytes of ``ranges``, sorted (file, start, stop)."""
        file, start, end = ranges.T
        first, stop = self.base[file] + start // self.block_bytes, self.base[file] - (-end // self.block_bytes)
        new = np.diff(file, prepend=-1) != 0
        new[1:] |= first[1:] > stop[:-1]
        heads = np.flatnonzero(new)
        return np.stack((first[heads], stop[np.append(heads, len(new))[1:] - 1]), axis=1)

    def bytes_of(self, runs: Ints) -> tuple[Ints, Ints, Ints]:
        """Return (file, start, stop) of runs, in bytes of the file's data section."""
        first, stop = runs.T
        file = np.searchsorted(self.base, first, side="right") - 1
        start = (first - self.base[file]) * self.block_bytes
        return file, start, np.minimum((stop - self.base[file]) * self.block_bytes, self.nbytes[file])

    def encode(self, runs: Ints) -> bytes:
        """Return the runs of one rank as bytes: their number, then the gap before each, and the length of each.

        The planes of an optimizer's states repeat each other: 300 runs, 2,400 bytes, are 240 bytes when compressed.
        """
        steps = np.diff(runs.ravel(), prepend=0).reshape(-1, 2)
        packed: bytes = pa.compress(steps.T.astype(self.word).tobytes(), codec="zstd", asbytes=True)
        return BlockRuns(len(runs), packed).encode()

    def decode(self, data: bytes, sender: int | None = None) -> Ints:
        """Undo :meth:`encode`; :meth:`check` checks the runs. Raises MessageError if ``data`` is no such message."""
        message = BlockRuns.decode(data, sender)
        nbytes = 2 * min(message.count, int(self.base[-1])) * self.word.itemsize  # no more is allocated
        try:
            steps = np.frombuffer(pa.decompress(message.columns, nbytes, codec="zstd", asbytes=True), self.word)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise refused("BlockRuns", data, error, sender) from error
        return np.cumsum(steps.reshape(2, -1).T, dtype=np.int64).reshape(-1, 2)

    def check(self, runs: Ints) -> None:
        """Check rows that come from another rank. Raises MessageError if a row is no run of this line."""
        first, stop = runs.T
        bad = (first < 0) | (stop <= first) | (stop > self.base[-1])
        if not bad.any():
            bad = stop > self.base[np.searchsorted(self.base, first, side="right")]
        if bad.any():
            row = runs[np.flatnonzero(bad)[0]].tolist()
            raise MessageError(f"a rank names blocks {row}, which are not in one file; {VERSIONS}")

    @property
    def word(self) -> np.dtype[np.uint32] | np.dtype[np.uint64]:
        """The integer type in which numbers of blocks are sent."""
        return np.dtype("<u4") if self.base[-1] < 1 << 32 else np.dtype("<u8")


Floats = npt.NDArray[np.float64]

SWEEPS = 3
"""A set that went early knew nothing of the later ones, so each is poured again. With 1,024 random triples of 512 ranks
the busiest has 1.47 times the mean after one sweep, 1.13 after two, 1.05 after three, and 1.03 after ten."""


@dataclass(frozen=True, slots=True, eq=False)
class RankSets:
    """g sets of ranks. Members of set i: ``rank[begin[i]:begin[i + 1]]``, ascending, at least one."""

    begin: Ints
    rank: Ints

    @property
    def size(self) -> Ints:
        """The number of ranks in each set: int64[g]."""
        return np.diff(self.begin)

    @property
    def owner(self) -> Ints:
        """The set of each member: int64[m]."""
        return np.repeat(np.arange(len(self.begin) - 1), self.size)

    def take(self, rows: Ints) -> RankSets:
        """Return some of the sets."""
        size = self.size[rows]
        source, number = spread(size)
        return RankSets(begins(size), self.rank[self.begin[rows][source] + number])


@dataclass(frozen=True, slots=True, eq=False)
class WantedBlocks:
    """The blocks that all sets of ranks want, in runs laid end to end, those of a set together."""

    block_bytes: int  # bytes of a block; the last one of a run may be shorter
    blocks: Ints  # int64[k + 1], begin of each run, in blocks; then the end of the last one
    nbytes: Ints  # int64[k + 1], the same in bytes
    begin: Ints  # int64[g + 1], first run of each set

    def snap(self, position: Floats) -> tuple[Ints, Ints]:
        """Return the ends of blocks that are nearest to these bytes of the strip: in blocks, and in bytes."""
        run = np.clip(np.searchsorted(self.nbytes, position, side="right") - 1, 0, len(self.nbytes) - 2)
        begin, length = self.nbytes[run], self.nbytes[run + 1] - self.nbytes[run]
        block = (position - begin).astype(np.int64) // self.block_bytes
        low = np.minimum(block * self.block_bytes, length)
        high = np.minimum(low + self.block_bytes, length)
        up = (high - (position - begin)) < (position - begin) - low
        at_block = np.minimum(block + up, self.blocks[run + 1] - self.blocks[run])
        return self.blocks[run] + at_block, begin + np.where(up, high, low)


def fill(strip: WantedBlocks, sets: RankSets, load: Floats, speed: Floats) -> Ints:
    """Divide the wanted blocks: each member of a set reads some of the set's blocks, in the order of its members.

    ``load``, float64[world size], has the bytes that each rank has to read anyway; the assigned bytes are added to it.
    ``speed``, float64[world size], is above 0: a rank of half the speed has as much to do with half the bytes. Returns
    the first block of the strip of each member, and the end of the last one: int64[m + 1].
    """
    cut = np.append(np.zeros(len(sets.rank), dtype=np.int64), strip.blocks[-1])
    given = np.zeros(len(sets.rank))
    begin = strip.nbytes[strip.begin]
    batches = [_DisjointSets.of(sets, rows) for rows in _disjoint(sets)]
    for sweep in range(SWEEPS):
        for batch in batches:
            base = load[batch.rank] - given[batch.member]
            part = batch.pour(base, speed[batch.rank], np.diff(begin)[batch.sets].astype(np.float64))
            if sweep == SWEEPS - 1:  # in whole blocks; whoever comes later makes up for what is lost by rounding
                block, nbytes = strip.snap(begin[batch.sets][batch.owner] + batch.before(part))
                cut[batch.member] = block
                part = np.append(nbytes[1:], 0) - nbytes
                part[batch.last] = begin[batch.sets + 1] - nbytes[batch.last]
            given[batch.member] = part
            load[batch.rank] = base + part
    return cut


@dataclass(frozen=True, slots=True, eq=False)
class _DisjointSets:
    """Sets that have no rank in common: their members one after another, set by set."""

    sets: Ints  # int64[b], rows of the sets
    first: Ints  # int64[b], first member of each in the columns below
    member: Ints  # int64[n], rows in ``RankSets.rank``
    rank: Ints  # int64[n], the ranks
    owner: Ints  # int64[n], index in ``sets`` of each member's set

    @classmethod
    def of(cls, sets: RankSets, rows: Ints) -> _DisjointSets:
        """Gather the members of these sets."""
        size = sets.size[rows]
        owner, number = spread(size)
        member = sets.begin[rows][owner] + number
        return cls(rows, np.cumsum(size) - size, member, sets.rank[member], owner)

    @property
    def last(self) -> Ints:
        """int64[b]: the last member of each set."""
        return np.append(self.first[1:], len(self.owner)) - 1

    def before(self, values: Floats) -> Floats:
        """Add up the values of the members of the same set that come before each.

        Values of at least 0 give sums that do not fall. With ``np.cumsum(values) - values`` they would, by rounding.
        """
        total = np.append(0.0, np.cumsum(values[:-1]))
        return np.asarray(total - total[self.first][self.owner])

    def pour(self, load: Floats, speed: Floats, give: Floats) -> Floats:
        """Return the bytes of each member if every set fills up those of its members that would end first."""
        order = np.lexsort((load / speed, self.owner))
        load_so_far, speed_so_far = (self.before(values[order]) + values[order] for values in (load, speed))
        # The level is when the first k members would all end; with too few or too many of them it would be later.
        levels = (give[self.owner] + load_so_far) / speed_so_far
        return np.maximum(np.minimum.reduceat(levels, self.first)[self.owner] * speed - load, 0.0)


def _disjoint(sets: RankSets) -> list[Ints]:
    """Order the sets, small ones first, and return them in batches without a common rank.

    Every rank takes its sets in that order; a set is ready once all its ranks have come to it. Sets of one size come in
    random order, so that a chain of pairs (0, 1), (1, 2), (2, 3) ... is no chain of as many batches.
    """
    size, owner = sets.size, sets.owner
    place = np.empty_like(size)
    place[np.lexsort((mix(np.arange(len(size)), 1), size))] = np.arange(len(size))
    order = np.lexsort((place[owner], sets.rank))
    same = np.diff(sets.rank[order]) == 0
    follower = np.full(len(owner), -1, dtype=np.int64)
    follower[order[:-1]] = np.where(same, order[1:], -1)
    reached = np.zeros_like(size)
    batches, heads = [], order[np.concatenate(([True], ~same))[: len(order)]]
    while len(heads):
        rows = owner[heads]
        np.add.at(reached, rows, 1)
        ready = np.unique(rows[reached[rows] == size[rows]])
        batches.append(ready)
        source, number = spread(size[ready])
        heads = follower[sets.begin[ready][source] + number]
        heads = heads[heads >= 0]
    return batches


CHUNKS_PER_RANK = 8
"""What travels is cut at least this fine, so that ranks send while they read."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedReads:
    """The blocks that ranks read for each other: c runs in the order (reader, first), each wanted by a group."""

    run: Ints  # int64[c, 2], first block and last block + 1 on the line
    parts: Ints  # int64[c], number of chunks in which it is read, one a round: at least one, at most one a block
    reader: Ints  # int64[c], the rank that reads it; one of the group
    group: Ints  # int64[c], row in ``groups``
    groups: RankSets  # the ranks that want all blocks of a run, the reader among them

    @classmethod
    def nothing(cls) -> SharedReads:
        """Share nothing: every rank reads all its blocks by itself."""
        none = np.empty(0, dtype=np.int64)
        return cls(none.reshape(0, 2), none, none, none, RankSets(np.zeros(1, dtype=np.int64), none))

    @property
    def rounds(self) -> int:
        """How many rounds every rank takes part in."""
        heads = np.flatnonzero(np.diff(self.reader, prepend=-1))
        return int(np.add.reduceat(self.parts, heads).max()) if len(heads) else 0

    def rounds_of(self, rows: Ints) -> Ints:
        """Return the round in which the first chunk of each of these runs travels: runs of a reader take turns."""
        before = np.cumsum(self.parts) - self.parts
        return before[rows] - before[np.searchsorted(self.reader, self.reader[rows])]

    def nbytes(self, line: BlockIndex) -> int:
        """Return how many bytes are read for several ranks."""
        _, start, stop = line.bytes_of(self.run)
        return int((stop - start).sum())

    def of_rank(self, rank: int) -> Ints:
        """Return the rows of the runs that a rank wants, whoever reads them."""
        is_member = np.zeros(len(self.groups.begin) - 1, dtype=np.bool_)
        is_member[np.searchsorted(self.groups.begin, np.flatnonzero(self.groups.rank == rank), side="right") - 1] = True
        return np.flatnonzero(is_member[self.group])

    def encode(self, line: BlockIndex) -> bytes:
        """Return the table as bytes; the same for all ranks. Places are sent as differences, which compress."""
        first, stop = self.run.T
        wide = (np.diff(first, prepend=0), stop - first)
        narrow = (self.parts, self.reader, self.group, self.groups.size, self.groups.rank)
        columns = [column.astype(line.word) for column in wide] + [column.astype("<u4") for column in narrow]
        data = b"".join(column.tobytes() for column in columns)
        packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
        return SharedRuns(len(self.reader), len(self.groups.size), len(self.groups.rank), packed).encode()

    @classmethod
    def decode(cls, data: bytes, line: BlockIndex, world_size: int) -> SharedReads:
        """Undo :meth:`encode`.

        Raises MessageError if this is no such table, or if it names blocks or ranks that do not exist.
        """
        message = SharedRuns.decode(data, sender=0)
        count, groups, members = message.count, message.groups, message.members
        if count > line.base[-1] or members > groups * world_size:  # before so much is allocated
            reason = f"{count} stretches of {line.base[-1]} blocks for {groups} groups of {members} ranks"
            raise refused("SharedRuns", data, reason, sender=0)
        try:
            rows = (count, count, count, count, count, groups, members)
            step, length, parts, reader, group, size, rank = _columns(message.columns, rows, line.word)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise refused("SharedRuns", data, error, sender=0) from error
        first = np.cumsum(step, dtype=line.word).astype(np.int64)  # differences wrap around, and so does their sum
        line.check(run := np.stack((first, first + length), axis=1))
        order = np.argsort(first)
        sound = (
            (parts >= 1).all() and (parts <= length).all() and (np.diff(reader) >= 0).all(),
            (size >= 1).all() and size.sum() == members and group.max(initial=-1) < groups,
            max(reader.max(initial=0), rank.max(initial=0)) < world_size,
            (run[order[1:], 0] >= run[order[:-1], 1]).all(),  # no block is read twice
        )
        sets = RankSets(begins(size), rank)
        if not all(sound) or not np.isin(group * world_size + reader, sets.owner * world_size + rank).all():
            raise MessageError(f"rank 0 says of {count} stretches who reads them, and contradicts itself; {VERSIONS}")
        return cls(run, parts, reader, group, sets)


def _columns(data: bytes, rows: Sequence[int], word: np.dtype[Any]) -> list[Ints]:
    """Decompress the columns, and cut them apart: the first two of ``word``, the others of four bytes a number."""
    types = [word, word] + [np.dtype("<u4")] * (len(rows) - 2)
    sizes = [count * dtype.itemsize for count, dtype in zip(rows, types, strict=True)]
    whole = pa.decompress(data, sum(sizes), codec="zstd", asbytes=True)
    ends = np.cumsum(sizes).tolist()
    parts = [whole[end - nbytes : end] for end, nbytes in zip(ends, sizes, strict=True)]
    return [np.frombuffer(part, dtype).astype(np.int64) for part, dtype in zip(parts, types, strict=True)]


def share_reads(
    line: BlockIndex, runs: Sequence[Ints], *, read_bytes: int, exchange_bytes: int, speed: Floats | None = None
) -> SharedReads:
    """Divide the blocks that at least two ranks want over the ranks that want them. Pure: equal inputs, equal results.

    A rank with much to read for itself reads less for others. So does a slow one, which also sends less in each round.
    A rank receives at most ``exchange_bytes`` in a round, but never less than one block from each rank that it shares
    with. ``speed``, float64[world size] in (0, 1], is how fast each rank sends; None: all are equally fast.
    """
    speed = np.ones(len(runs)) if speed is None else speed
    wanted = _Wanted.of(line, _parties(line, runs))
    several = wanted.sets.size > 1
    nbytes = np.bincount(wanted.set, weights=wanted.nbytes, minlength=len(several))
    alone = wanted.sets.take(np.flatnonzero(~several)).rank
    load = np.bincount(alone, weights=nbytes[~several], minlength=len(runs)).astype(np.float64)
    if not several.any():
        return SharedReads.nothing()
    wanted = wanted.of_sets(np.flatnonzero(several))
    strip = wanted.strip(line)
    cuts = fill(strip, wanted.sets, load, speed)
    fair = strip.nbytes[-1] // (len(runs) * CHUNKS_PER_RANK)
    most = np.minimum(exchange_bytes // _senders(wanted.sets, strip, len(runs)), min(read_bytes, fair))
    return _stretches(wanted, strip, cuts, most / line.block_bytes, speed)


def _senders(sets: RankSets, strip: WantedBlocks, world_size: int) -> Ints:
    """Return int64[g]: the most ranks from which a member of each set may receive in one round, over all its sets."""
    blocks = np.diff(strip.blocks[strip.begin])
    per_set = np.minimum(sets.size - 1, blocks)  # a chunk has a block at least
    senders = np.bincount(sets.rank, weights=per_set[sets.owner], minlength=world_size).astype(np.int64)
    return np.maximum.reduceat(np.minimum(senders, world_size - 1)[sets.rank], sets.begin[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class _Parties:
    """The distinct requests of ranks, called parties: the runs, the party of each run, and the ranks of each party."""

    runs: Ints
    party: Ints
    ranks: RankSets


def _parties(line: BlockIndex, runs: Sequence[Ints]) -> _Parties:
    """Fold ranks that want the same of one kind of state: the replicas of a model differ in their optimizer states."""
    requests: dict[bytes, list[int]] = {}
    for rank, rows in enumerate(runs):
        ends = [0, *np.searchsorted(rows[:, 0], line.kinds).tolist(), len(rows)]
        for first, stop in pairwise(ends):
            if first < stop:
                requests.setdefault(rows[first:stop].tobytes(), []).append(rank)
    rows = np.frombuffer(b"".join(requests), np.int64).reshape(-1, 2)
    sizes = np.array([len(ranks) for ranks in requests.values()], dtype=np.int64)
    members = np.array([rank for ranks in requests.values() for rank in ranks], dtype=np.int64)
    party = np.repeat(np.arange(len(requests)), [len(data) // 16 for data in requests])
    return _Parties(rows, party, RankSets(begins(sizes), members))


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """All blocks that are wanted, cut into k intervals that are each wanted by one set of ranks, all of it."""

    run: Ints  # int64[k, 2], the intervals, sorted
    nbytes: Ints  # int64[k], their bytes
    set: Ints  # int64[k], row in ``sets``
    sets: RankSets  # the ranks that want them

    @classmethod
    def of(cls, line: BlockIndex, parties: _Parties) -> _Wanted:
        """Sweep over the line: a random word for each party that is there, added up, tells sets of parties apart.

        Two sets get one word with probability 2^-64. Ranks then read the blocks that they miss by themselves, since
        :func:`bcp.plan.read.copies.assign` reads all blocks that a rank is not given.
        """
        words = mix(parties.party, 2).view(np.int64)
        run, depth, total = sweep_intervals(parties.runs, np.ones_like(words), words)
        rows = np.flatnonzero(depth)
        run = run[rows]
        _, index, number = np.unique(total[rows], return_index=True, return_inverse=True)
        _, start, stop = line.bytes_of(run)
        return cls(run, stop - start, number, _members(parties, run[index, 0]))

    def of_sets(self, rows: Ints) -> _Wanted:
        """Return the intervals of some of the sets, set by set."""
        number = np.full(len(self.sets.begin) - 1, -1, dtype=np.int64)
        number[rows] = np.arange(len(rows))
        order = np.argsort(number[self.set], kind="stable")
        order = order[number[self.set][order] >= 0]
        return _Wanted(self.run[order], self.nbytes[order], number[self.set[order]], self.sets.take(rows))

    def strip(self, line: BlockIndex) -> WantedBlocks:
        """Lay the intervals end to end; they are in the order of their sets."""
        begin = np.searchsorted(self.set, np.arange(len(self.sets.begin)))
        return WantedBlocks(line.block_bytes, begins(np.diff(self.run)[:, 0]), begins(self.nbytes), begin)


def _members(parties: _Parties, blocks: Ints) -> RankSets:
    """Return the ranks that want block ``blocks[i]``, for each i."""
    order = np.argsort(blocks)
    first, stop = (np.searchsorted(blocks[order], ends) for ends in parties.runs.T)
    run, number = spread(stop - first)
    index = order[first[run] + number]
    party = parties.party[run]
    source, number = spread(parties.ranks.size[party])
    rank = parties.ranks.rank[parties.ranks.begin[party][source] + number]
    order = np.lexsort((rank, index[source]))
    return RankSets(begins(np.bincount(index[source], minlength=len(blocks))), rank[order])


def _stretches(wanted: _Wanted, strip: WantedBlocks, cuts: Ints, most: Floats, speed: Floats) -> SharedReads:
    """Cut the strip at the ends of intervals and at changes of the reader.

    A chunk has at most ``most`` blocks, by set, and less of a slow reader; but one block at least.
    """
    # Both are sorted, so that a stable sort merges them: 4 ms for a million edges, where unique() takes 0.3 s.
    edges = np.sort(np.concatenate((strip.blocks, cuts)), kind="stable")
    length = np.diff(edges)
    begin, length = edges[:-1][length > 0], length[length > 0]
    interval = np.searchsorted(strip.blocks, begin, side="right") - 1
    reader = wanted.sets.rank[np.searchsorted(cuts[:-1], begin, side="right") - 1]
    first = wanted.run[interval, 0] + begin - strip.blocks[interval]
    group = wanted.set[interval]
    order = np.lexsort((first, reader))
    run = np.stack((first, first + length), axis=1)[order]
    parts = -(-length // np.maximum(most[group] * speed[reader], 1).astype(np.int64))
    return SharedReads(run, parts[order], reader[order], group[order], wanted.sets)
