"""What one rank reads, and what it sends and receives: made of what it wants and of what all ranks share.

Shared chunks travel in rounds of an all-to-all, while reading goes on; every rank takes part in every round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bcp.plan.columns import Ints, spread
from bcp.plan.flat import swept
from bcp.plan.load.fill import Sets
from bcp.plan.load.line import BlockLine
from bcp.plan.load.share import Shared

__all__ = ["Assignment", "Chunk", "assign"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of whole blocks of one file, read by one rank.

    Attributes:
        file: row of the file in the layout; -1 for an empty chunk, which only takes part in its round.
        start: first byte in the file's data section.
        stop: one past the last.
        reader: the rank that reads it.
        round: in which round it travels to the ranks that need it too; -1 where there are none.
        number: row in :attr:`Assignment.chunks` of the rank that was given this record; -1 where it is not in there.
    """

    file: int
    start: int
    stop: int
    reader: int
    round: int
    number: int = field(default=-1, compare=False)

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """What one rank does.

    Attributes:
        rank: the rank.
        rounds: how many rounds every rank takes part in.
        private: chunks that only this rank reads, in file order.
        file, start, stop, reader, round: int64[c], chunks that it shares with others, as in :class:`Chunk`, by round.
        group: int64[c], row in ``groups``: who wants the chunk.
        groups: sets of ranks.
    """

    rank: int
    rounds: int
    private: tuple[Chunk, ...]
    file: Ints
    start: Ints
    stop: Ints
    reader: Ints
    round: Ints
    group: Ints
    groups: Sets

    def __repr__(self) -> str:
        """Show how much there is to do."""
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
        mine = self.reader != self.rank
        nbytes = np.bincount(self.round[mine], weights=(self.stop - self.start)[mine])
        return int(nbytes.max(initial=0))

    def items(self) -> list[Chunk]:
        """Return what the rank reads, in order: one chunk for each round, its private chunks spread evenly between.

        A rank that has no chunk left for a round takes part in it with an empty one.
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
        """Return the rows of a round."""
        return range(*np.searchsorted(self.round, (number, number + 1)).tolist())

    def _chunk(self, row: int) -> Chunk:
        """Return one chunk as a record."""
        file, start, stop, reader, number = (
            int(column[row]) for column in (self.file, self.start, self.stop, self.reader, self.round)
        )
        return Chunk(file, start, stop, reader, number, len(self.private) + row)


def assign(line: BlockLine, rank: int, runs: Ints, shared: Shared, *, read_bytes: int) -> Assignment:
    """Say what a rank does. Whatever it wants and does not get by sharing, it reads by itself.

    Args:
        line: the files.
        rank: this rank.
        runs: what it wants, :meth:`BlockLine.runs`.
        shared: what ranks read for each other; the same on all ranks.
        read_bytes: the largest read; but never less than one block.

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
        tuple(Chunk(file, start, stop, rank, -1, at) for at, (file, start, stop) in enumerate(private.tolist())),
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
    """Return what is in the runs and in none of the others; both are disjoint by themselves."""
    intervals, depth = swept(np.concatenate((runs, others)), np.repeat([1, 2], [len(runs), len(others)]))
    return intervals[np.flatnonzero(depth == 1)]
