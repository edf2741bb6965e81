"""Which rank reads what several ranks want: every such block is read once in the whole job (paper sec. 4.1).

Rank 0 computes this from what all ranks want, in time that depends on how many different things are wanted and not on
how many ranks want each: about 1 s for 8,960 ranks, see docs/scale.md. The result is the same for everyone;
:func:`bcp.plan.load.assign.assign` makes it one rank's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from bcp.errors import CorruptError
from bcp.plan.columns import Ints, mix, spread
from bcp.plan.flat import swept
from bcp.plan.load.fill import Floats, Sets, Strip, begins, fill
from bcp.plan.load.line import VERSIONS, BlockLine

__all__ = ["Shared", "share"]

CHUNKS_PER_RANK = 8
"""What travels is cut at least this fine, so that ranks send while they read."""

HEAD = struct.Struct("<3q")


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What ranks read for each other: c stretches of blocks in the order (reader, first), each wanted by a group.

    Attributes:
        run: int64[c, 2], first block and last block + 1 on the line.
        parts: int64[c], in how many chunks it is read, one a round: at least one, at most one a block.
        reader: int64[c], the rank that reads it; one of the group.
        group: int64[c], row in ``groups``.
        groups: the ranks that want all blocks of a stretch, the reader among them.
    """

    run: Ints
    parts: Ints
    reader: Ints
    group: Ints
    groups: Sets

    @classmethod
    def nothing(cls) -> Shared:
        """Share nothing: every rank reads what it wants by itself."""
        none = np.empty(0, dtype=np.int64)
        return cls(none.reshape(0, 2), none, none, none, Sets(np.zeros(1, dtype=np.int64), none))

    @property
    def rounds(self) -> int:
        """How many rounds every rank takes part in."""
        heads = np.flatnonzero(np.diff(self.reader, prepend=-1))
        return int(np.add.reduceat(self.parts, heads).max()) if len(heads) else 0

    def rounds_of(self, rows: Ints) -> Ints:
        """Return in which round the first chunk of these stretches travels: those of a reader take turns."""
        before = np.cumsum(self.parts) - self.parts
        return before[rows] - before[np.searchsorted(self.reader, self.reader[rows])]

    def nbytes(self, line: BlockLine) -> int:
        """Return how many bytes are read for several ranks."""
        _, start, stop = line.bytes_of(self.run)
        return int((stop - start).sum())

    def of_rank(self, rank: int) -> Ints:
        """Return the rows of the stretches that a rank wants, whoever reads them."""
        mine = np.zeros(len(self.groups.begin) - 1, dtype=np.bool_)
        mine[np.searchsorted(self.groups.begin, np.flatnonzero(self.groups.rank == rank), side="right") - 1] = True
        return np.flatnonzero(mine[self.group])

    def encode(self, line: BlockLine) -> bytes:
        """Return the table as bytes; the same for all ranks. Places are sent as differences, which compress."""
        first, stop = self.run.T
        wide = (np.diff(first, prepend=0), stop - first)
        narrow = (self.parts, self.reader, self.group, self.groups.size, self.groups.rank)
        columns = [column.astype(line.word) for column in wide] + [column.astype("<u4") for column in narrow]
        data = b"".join(column.tobytes() for column in columns)
        counts = HEAD.pack(len(self.reader), len(self.groups.size), len(self.groups.rank))
        packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
        return counts + packed

    @classmethod
    def decode(cls, data: bytes, line: BlockLine, world_size: int) -> Shared:
        """Return what :meth:`encode` was given.

        Raises:
            CorruptError: this is no such table, or it names what does not exist.

        """
        try:
            count, groups, members = _counts(data, int(line.base[-1]), world_size)
            rows = (count, count, count, count, count, groups, members)
            step, length, parts, reader, group, size, rank = _columns(data[HEAD.size :], rows, line.word)
        except (struct.error, pa.ArrowException, OSError, ValueError) as error:
            raise CorruptError(
                f"rank 0 sent {len(data)} bytes that do not say who reads what: {error}; {VERSIONS}"
            ) from error
        first = np.cumsum(step, dtype=line.word).astype(np.int64)  # differences wrap around, and so does their sum
        line.check(run := np.stack((first, first + length), axis=1))
        sound = (
            (parts >= 1).all() and (parts <= length).all() and (np.diff(reader) >= 0).all(),
            (size >= 1).all() and size.sum() == members and group.max(initial=-1) < groups,
            max(reader.max(initial=0), rank.max(initial=0)) < world_size,
        )
        if not all(sound):
            raise CorruptError(f"rank 0 says of {count} stretches who reads them, and contradicts itself; {VERSIONS}")
        return cls(run, parts, reader, group, Sets(begins(size), rank))


def _counts(data: bytes, blocks: int, world_size: int) -> tuple[int, int, int]:
    """Return how many stretches, groups and members there are, before anything of that size is allocated."""
    count, groups, members = HEAD.unpack_from(data)
    if not (0 <= groups <= count <= blocks and 0 <= members <= groups * world_size):
        raise ValueError(f"{count} stretches of {blocks} blocks for {groups} groups of {members} ranks")
    return count, groups, members


def _columns(data: bytes, rows: Sequence[int], word: np.dtype[Any]) -> list[Ints]:
    """Undo the compression, and cut columns apart: the first two of ``word``, the others of four bytes a number."""
    types = [word, word] + [np.dtype("<u4")] * (len(rows) - 2)
    sizes = [count * each.itemsize for count, each in zip(rows, types, strict=True)]
    whole = pa.decompress(data, sum(sizes), codec="zstd", asbytes=True)
    ends = np.cumsum(sizes).tolist()
    parts = [whole[end - nbytes : end] for end, nbytes in zip(ends, sizes, strict=True)]
    return [np.frombuffer(part, each).astype(np.int64) for part, each in zip(parts, types, strict=True)]


def share(
    line: BlockLine, runs: Sequence[Ints], *, read_bytes: int, exchange_bytes: int, speed: Floats | None = None
) -> Shared:
    """Divide the blocks that at least two ranks want over the ranks that want them. Pure: equal inputs, equal results.

    A rank with much to read for itself reads less for others, and so does a slow one, which also sends less in each
    round. What a rank receives in a round is at most ``exchange_bytes``, but never less than one block from each rank
    that it shares with.

    Args:
        line: the files.
        runs: :meth:`BlockLine.runs` of every rank.
        read_bytes: the largest read.
        exchange_bytes: most bytes that one rank receives in one round.
        speed: float64[world size], how fast each rank sends, in (0, 1]; None: all the same.

    """
    speed = np.ones(len(runs)) if speed is None else speed
    wanted = _Wanted.of(line, _parties(line, runs))
    several = wanted.sets.size > 1
    nbytes = np.bincount(wanted.set, weights=wanted.nbytes, minlength=len(several))
    alone = wanted.sets.take(np.flatnonzero(~several)).rank
    load = np.bincount(alone, weights=nbytes[~several], minlength=len(runs)).astype(np.float64)
    if not several.any():
        return Shared.nothing()
    wanted = wanted.of_sets(np.flatnonzero(several))
    strip = wanted.strip(line)
    cuts = fill(strip, wanted.sets, load, speed)
    fair = strip.nbytes[-1] // (len(runs) * CHUNKS_PER_RANK)
    most = np.minimum(exchange_bytes // _senders(wanted.sets, strip, len(runs)), min(read_bytes, fair))
    return _stretches(wanted, strip, cuts, most / line.block_bytes, speed)


def _senders(sets: Sets, strip: Strip, world_size: int) -> Ints:
    """int64[g]: from how many ranks a member of each set may receive in one round, of whatever set, at most."""
    blocks = np.diff(strip.blocks[strip.begin])
    each = np.minimum(sets.size - 1, blocks)  # a chunk has a block at least
    senders = np.bincount(sets.rank, weights=each[sets.owner], minlength=world_size).astype(np.int64)
    return np.maximum.reduceat(np.minimum(senders, world_size - 1)[sets.rank], sets.begin[:-1])


@dataclass(frozen=True, slots=True, eq=False)
class _Parties:
    """Different things that ranks want: their runs, the party of each run, and the ranks of each party."""

    runs: Ints
    party: Ints
    ranks: Sets


def _parties(line: BlockLine, runs: Sequence[Ints]) -> _Parties:
    """Fold ranks that want the same of one kind of state: the replicas of a model differ in their optimizer states."""
    found: dict[bytes, list[int]] = {}
    for rank, rows in enumerate(runs):
        ends = [0, *np.searchsorted(rows[:, 0], line.kinds).tolist(), len(rows)]
        for first, stop in pairwise(ends):
            if first < stop:
                found.setdefault(rows[first:stop].tobytes(), []).append(rank)
    rows = np.frombuffer(b"".join(found), np.int64).reshape(-1, 2)
    sizes = np.array([len(ranks) for ranks in found.values()], dtype=np.int64)
    members = np.array([rank for ranks in found.values() for rank in ranks], dtype=np.int64)
    party = np.repeat(np.arange(len(found)), [len(data) // 16 for data in found])
    return _Parties(rows, party, Sets(begins(sizes), members))


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """All blocks that are wanted, cut into k intervals that are each wanted by one set of ranks, all of it.

    Attributes:
        run: int64[k, 2], the intervals, sorted.
        nbytes: int64[k], their bytes.
        set: int64[k], row in ``sets``.
        sets: who wants them.
    """

    run: Ints
    nbytes: Ints
    set: Ints
    sets: Sets

    @classmethod
    def of(cls, line: BlockLine, parties: _Parties) -> _Wanted:
        """Sweep over the line: a random word for each party that is there, added up, tells sets of parties apart.

        Two sets get one word with probability 2^-64. Then ranks read by themselves what this makes them
        miss: :func:`bcp.plan.load.assign.assign` takes as their own whatever is not given to them.
        """
        words = mix(parties.party, 2).view(np.int64)
        run, depth, here = swept(parties.runs, np.ones_like(words), words)
        rows = np.flatnonzero(depth)
        run = run[rows]
        _, index, which = np.unique(here[rows], return_index=True, return_inverse=True)
        _, start, stop = line.bytes_of(run)
        return cls(run, stop - start, which, _members(parties, run[index, 0]))

    def of_sets(self, rows: Ints) -> _Wanted:
        """Return the intervals of some of the sets, set by set."""
        number = np.full(len(self.sets.begin) - 1, -1, dtype=np.int64)
        number[rows] = np.arange(len(rows))
        order = np.argsort(number[self.set], kind="stable")
        order = order[number[self.set][order] >= 0]
        return _Wanted(self.run[order], self.nbytes[order], number[self.set[order]], self.sets.take(rows))

    def strip(self, line: BlockLine) -> Strip:
        """Lay the intervals end to end; they are in the order of their sets."""
        begin = np.searchsorted(self.set, np.arange(len(self.sets.begin)))
        return Strip(line.block_bytes, begins(np.diff(self.run)[:, 0]), begins(self.nbytes), begin)


def _members(parties: _Parties, at: Ints) -> Sets:
    """Return the ranks that want block ``at[i]``, for each i."""
    order = np.argsort(at)
    first, stop = (np.searchsorted(at[order], ends) for ends in parties.runs.T)
    run, number = spread(stop - first)
    which = order[first[run] + number]
    party = parties.party[run]
    source, number = spread(parties.ranks.size[party])
    rank = parties.ranks.rank[parties.ranks.begin[party][source] + number]
    order = np.lexsort((rank, which[source]))
    return Sets(begins(np.bincount(which[source], minlength=len(at))), rank[order])


def _stretches(wanted: _Wanted, strip: Strip, cuts: Ints, most: Floats, speed: Floats) -> Shared:
    """Cut the strip where an interval ends or another rank reads on.

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
    return Shared(run, parts[order], reader[order], group[order], wanted.sets)
