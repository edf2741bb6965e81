"""The events of a recording as numpy columns, and sums of time over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Columns", "Floats", "Ints", "covered"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Events of one kind.

    Attributes:
        table: their rows.
        names: names of phases or stages, or verbs, in the order in which the first event of each began.
        rank: int64[n].
        name: int64[n], which of the names.
        nbytes: int64[n].
        start, end, seconds, waited: float64[n], in seconds.
    """

    table: pa.Table
    names: Sequence[str]
    rank: Ints
    name: Ints
    nbytes: Ints
    start: Floats
    end: Floats
    seconds: Floats
    waited: Floats

    @classmethod
    def of(cls, events: pa.Table, kind: str) -> Columns:
        """Return the events of a kind."""
        table = events.filter(pc.equal(events.column("kind"), kind)).combine_chunks()
        start = _numbers(table, "start", np.float64)
        names, name = _by_start(table.column("name"), start)
        seconds = _numbers(table, "seconds", np.float64)
        return cls(
            table=table,
            names=names,
            rank=_numbers(table, "rank", np.int64),
            name=name,
            nbytes=_numbers(table, "nbytes", np.int64),
            start=start,
            end=start + seconds,
            seconds=seconds,
            waited=_numbers(table, "waited", np.float64),
        )

    def __len__(self) -> int:
        return len(self.rank)

    def is_status(self, status: str) -> Bools:
        """bool[n]: whether each event has that status."""
        return np.asarray(pc.equal(self.table.column("status"), status), np.bool_)


def covered(start: Floats, end: Floats, group: Ints, groups: int) -> Floats:
    """Return for each group the seconds that its intervals cover, overlaps counted once.

    Args:
        start: of each interval.
        end: of each interval.
        group: number of the group of each interval.
        groups: how many there are.

    """
    if not len(start):
        return np.zeros(groups)
    apart = float(end.max() - start.min()) + 1.0  # so that intervals of different groups never meet
    order = np.lexsort((start, group))
    sorted_groups = group[order]
    first, last = start[order] + sorted_groups * apart, end[order] + sorted_groups * apart
    reached = np.maximum.accumulate(last)
    before = np.concatenate([[-np.inf], reached[:-1]])
    return np.bincount(sorted_groups, np.maximum(reached - np.maximum(first, before), 0.0), groups).astype(np.float64)


def _numbers(table: pa.Table, column: str, kind: Any) -> Any:
    return np.asarray(table.column(column).to_numpy(), kind)


def _by_start(column: pa.ChunkedArray, start: Floats) -> tuple[list[str], Ints]:
    """Return the names in the order of their first events, and each event's place among them."""
    if not len(column):
        return [], np.empty(0, np.int64)
    words = pc.dictionary_encode(column).combine_chunks()
    codes = np.asarray(words.indices.to_numpy(zero_copy_only=False), np.int64)
    known: list[str] = words.dictionary.to_pylist()
    first = np.full(len(known), np.inf)
    np.minimum.at(first, codes, start)
    order = np.argsort(first, kind="stable")
    place = np.empty(len(known), np.int64)
    place[order] = np.arange(len(known))
    return [known[code] for code in order.tolist()], place[codes]
