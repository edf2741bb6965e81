"""Blocks that a data file does not store, because an earlier checkpoint of the run has the same bytes.

A save with references stores the other blocks of the file one behind the other. :func:`stretches` finds the bytes of a
range of the whole file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from bcp.format.container import INT, WORD, integers, schema, values
from bcp.format.metadata import OPERATION, data_key
from bcp.plan.columns import Ints
from bcp.plan.shards import KINDS

__all__ = [
    "KEPT",
    "KeptRun",
    "Stretch",
    "check_runs",
    "kept_blocks",
    "kept_columns",
    "kept_rows",
    "runs_of",
    "stretches",
]

KEPT = schema(
    "kept", file=INT, first=INT, count=INT, step=INT, operation=WORD, kind=INT, rank=INT, packed=INT, start=INT
)

_MOST = 1 << 62
"""No byte of any file lies behind this one."""


@dataclass(frozen=True, slots=True)
class KeptRun:
    """Neighbouring blocks of a file, whose bytes lie one behind the other in a file of an earlier checkpoint.

    Attributes:
        first: the first block.
        count: number of blocks; 0 says only that the file is packed.
        step: step of the earlier checkpoint.
        operation: id of the save that wrote the bytes.
        kind: code of the kind of their file.
        rank: that wrote the file.
        packed: whether the file is packed itself.
        start: first byte in the file as it is stored.
    """

    first: int
    count: int
    step: int
    operation: str
    kind: int
    rank: int
    packed: bool
    start: int

    @property
    def key(self) -> str:
        """Key of the file, below the folder of its step."""
        return data_key(self.kind, self.rank, self.operation, encoded=self.packed)

    @property
    def source(self) -> tuple[int, str]:
        """Step and key of the file."""
        return self.step, self.key


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring bytes of a file.

    Attributes:
        run: blocks of an earlier checkpoint that have them; None for the file's own.
        start: first byte, in the stored file of either.
        nbytes: how many there are.
    """

    run: KeptRun | None
    start: int
    nbytes: int


def kept_blocks(runs: Sequence[KeptRun], count: int) -> np.ndarray:
    """Return for each of ``count`` blocks whether it is kept. bool[count]."""
    is_kept = np.zeros(count, bool)
    for run in runs:
        is_kept[run.first : run.first + run.count] = True
    return is_kept


def runs_of(
    is_kept: np.ndarray, sources: Sequence[tuple[int, str, int, int, bool]], source: Ints, start: Ints, length: Ints
) -> tuple[KeptRun, ...]:
    """Join kept blocks to runs.

    Args:
        is_kept: bool[n], for each block of a file.
        sources: step, operation, kind, rank and form of files of earlier checkpoints.
        source: int64[n], the file of each kept block.
        start: int64[n], the block's first byte there.
        length: int64[n], its bytes.

    """
    rows = np.flatnonzero(is_kept)
    if not len(rows):
        return ()
    before, after = rows[:-1], rows[1:]
    joins = (after == before + 1) & (source[after] == source[before]) & (start[after] == start[before] + length[before])
    runs = []
    for run in np.split(rows, np.flatnonzero(~joins) + 1):
        first = int(run[0])
        step, operation, kind, rank, packed = sources[int(source[first])]
        runs.append(KeptRun(first, len(run), step, operation, kind, rank, packed, int(start[first])))
    return tuple(runs)


def stretches(runs: Sequence[KeptRun], block_start: Ints, block_length: Ints, start: int, stop: int) -> list[Stretch]:
    """Return the bytes [start, stop) of a packed file, in order; those that touch in one file are joined.

    Args:
        runs: the kept blocks.
        block_start: int64[n], first byte of each block in the whole file.
        block_length: int64[n], bytes of each block.
        start: first byte, in the whole file.
        stop: one past the last.

    """
    found: list[Stretch] = []
    ends = block_start + block_length
    position = kept = 0

    def add(run: KeptRun | None, at: int, low: int, high: int) -> None:
        """Add bytes [low, high) of the whole file; ``at`` is the place of the first."""
        first, last = max(low, start), min(high, stop)
        if first >= last:
            return
        at += first - low
        if found and _joins(found[-1], run, at):
            found[-1] = Stretch(found[-1].run, found[-1].start, found[-1].nbytes + last - first)
        else:
            found.append(Stretch(run, at, last - first))

    for run in runs:
        if not run.count:
            continue
        low, high = int(block_start[run.first]), int(ends[run.first + run.count - 1])
        add(None, position - kept, position, low)
        add(run, run.start, low, high)
        position, kept = high, kept + high - low
    add(None, position - kept, position, int(ends[-1]) if len(ends) else 0)
    return found


def _joins(before: Stretch, run: KeptRun | None, at: int) -> bool:
    """Whether bytes that begin at ``at`` follow a stretch in the same file."""
    if before.start + before.nbytes != at or (run is None) != (before.run is None):
        return False
    return run is None or before.run is None or run.source == before.run.source


# -- the table ----------------------------------------------------------------------------------


def kept_columns(runs: Iterable[tuple[int, KeptRun]]) -> list[list[int] | list[str]]:
    """Return the columns of the table; each run comes with the row of its file."""
    rows = list(runs)
    return [
        [file for file, _ in rows],
        [run.first for _, run in rows],
        [run.count for _, run in rows],
        [run.step for _, run in rows],
        [run.operation for _, run in rows],
        [run.kind for _, run in rows],
        [run.rank for _, run in rows],
        [int(run.packed) for _, run in rows],
        [run.start for _, run in rows],
    ]


def kept_rows(table: pa.RecordBatch, files: int) -> dict[int, tuple[KeptRun, ...]]:
    """Return the runs of each packed file, by its row. Raises ValueError where they are not sound."""
    names = ("file", "first", "count", "step", "kind", "rank", "packed", "start")
    columns = {name: integers(table, name).tolist() for name in names}
    found: dict[int, list[KeptRun]] = {}
    for row, operation in enumerate(values(table, "operation")):
        number = {name: column[row] for name, column in columns.items()}
        file = number.pop("file")
        if not 0 <= file < files or number["packed"] not in (0, 1) or not OPERATION.fullmatch(operation):
            raise ValueError(f"row {row} of table 'kept' names no file")
        if min(number.values()) < 0 or number["kind"] >= len(KINDS) or max(number["rank"] >> 31, number["start"] >> 62):
            raise ValueError(f"row {row} of table 'kept' has impossible numbers")
        run = KeptRun(operation=operation, **{**number, "packed": bool(number["packed"])})
        found.setdefault(file, []).append(run)
    return {file: tuple(runs) for file, runs in found.items()}


def check_runs(runs: Sequence[KeptRun], blocks: int) -> None:
    """Check that runs ascend among the blocks of their file, and leave it its first block. Raises ValueError."""
    stop = 1
    for run in runs:
        if not stop <= run.first <= run.first + run.count <= blocks:
            raise ValueError(f"blocks {run.first} to {run.first + run.count} of {blocks} are kept out of order")
        stop = run.first + run.count
