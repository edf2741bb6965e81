"""Which chunks can be read to where they belong, without a copy in between, and how."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bcp.plan.columns import Bools, Ints, order_of
from bcp.plan.load.copies import Copies, Runs

__all__ = ["MOST_RUNS", "Straight", "apart", "straight"]

MOST_RUNS = 1024
"""A chunk of more runs is read into one buffer, and copied from there.

32 MiB of runs of 32 KiB: 5.6 ms of CPU for views and digests straight, 10.8 for digests and copies through a buffer. Of
8 KiB: 9.0 against 14.3, but then Python takes most of it, and one thread at a time.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Straight:
    """Where the bytes go of those of c chunks that are read to where they belong.

    Attributes:
        begin: int64[c + 1]; chunk i has the runs ``begin[i]`` to ``begin[i + 1]``. None: it is not one of them.
        runs: in file order within each chunk; they do not overlap, and what lies between them nobody wants.
    """

    begin: Ints
    runs: Runs

    @property
    def chunks(self) -> Bools:
        """bool[c]: which chunks they are."""
        return np.diff(self.begin) > 0

    def of_chunk(self, chunk: int) -> Runs:
        """Return the runs of one chunk."""
        mine, runs = slice(self.begin[chunk], self.begin[chunk + 1]), self.runs
        return Runs(runs.row[mine], runs.start[mine], runs.nbytes[mine], runs.to[mine])


def straight(found: Copies, private: Bools, plain: Bools) -> Straight:
    """Choose the chunks that consist of few runs, of which nobody wants a byte twice, all of them to plain memory.

    Args:
        found: the copies of c chunks.
        private: bool[c], whether no other rank needs the chunk, and nothing has to be done to its bytes.
        plain: bool[n], of each shard, whether its elements can be written as bytes, as they lie in the file.

    """
    chunk, counts = found.chunk, found.numel // found.run
    number = np.bincount(chunk, weights=counts, minlength=len(private))
    odd = np.bincount(chunk, weights=~plain[found.row], minlength=len(private))
    able = private & (odd == 0) & (number <= MOST_RUNS)
    copies = np.flatnonzero(able[chunk])
    runs, chunk = found.runs(copies), np.repeat(chunk[copies], counts[copies])
    order = order_of((runs.start, chunk))
    start, stop, chunk = runs.start[order], (runs.start + runs.nbytes)[order], chunk[order]
    twice = (chunk[1:] == chunk[:-1]) & (start[1:] < stop[:-1])
    able[chunk[1:][twice]] = False
    kept = able[chunk]
    order, chunk = order[kept], chunk[kept]
    begin = np.searchsorted(chunk, np.arange(len(private) + 1))
    return Straight(begin, Runs(runs.row[order], runs.start[order], runs.nbytes[order], runs.to[order]))


def apart(address: Ints, nbytes: Ints) -> Bools:
    """bool[n]: which pieces of memory share no byte with another one of them."""
    order = np.argsort(address, kind="stable")
    start, reach = address[order], np.maximum.accumulate((address + nbytes)[order])
    meets = np.zeros(len(order) + 1, dtype=np.bool_)
    meets[1:-1] = start[1:] < reach[:-1]
    alone = np.empty(len(order), dtype=np.bool_)
    alone[order] = ~(meets[:-1] | meets[1:])
    return alone
