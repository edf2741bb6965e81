"""Events of a recording as numpy columns, and the lanes in which a timeline draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["KINDS", "STATUSES", "Columns", "Numbers", "columns_of", "lane_keys", "lanes_of", "words"]

KINDS = ("phase", "budget", "stage", "request")
"""Kinds of events; their codes are positions here."""

STATUSES = ("ok", "again", "failed")
"""Ends of events; their codes are positions here."""

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of :data:`~bcp.telemetry.recording.EVENTS`, with a row for each event.

    Rows are sorted by rank, then by start. ``names``, ``items`` and ``said`` are the words of the columns of codes
    that end in ``_code``.
    """

    rank: Numbers
    kind: Numbers
    name_code: Numbers
    item_code: Numbers
    nbytes: Numbers
    start: Numbers
    seconds: Numbers
    waited: Numbers
    attempt: Numbers
    status: Numbers
    said_code: Numbers
    names: Sequence[str]
    items: Sequence[str]
    said: Sequence[str]

    @property
    def count(self) -> int:
        """Return the number of events."""
        return len(self.rank)

    @property
    def end(self) -> Numbers:
        """Return the end of each event, in seconds since the recording's time."""
        return self.start + self.seconds

    def rows(self, mask: Numbers) -> Columns:
        """Return some rows; the words stay as they are."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[str, Any] = {name: value[mask] for name, value in values.items() if isinstance(value, np.ndarray)}
        return replace(self, **taken)


def columns_of(table: pa.Table) -> Columns:
    """Return the columns of a table of events."""
    kinds, kind_words = words(table["kind"])
    statuses, status_words = words(table["status"])
    name_code, names = words(table["name"])
    item_code, items = words(table["item"])
    said_code, said = words(table["said"])
    rank, start = _numbers(table["rank"], np.int32), _numbers(table["start"], np.float64)
    found = Columns(
        rank=rank,
        kind=_positions(kind_words, KINDS)[kinds],
        name_code=name_code,
        item_code=item_code,
        nbytes=_numbers(table["nbytes"], np.int64),
        start=start,
        seconds=_numbers(table["seconds"], np.float64),
        waited=_numbers(table["waited"], np.float64),
        attempt=_numbers(table["attempt"], np.int32),
        status=_positions(status_words, STATUSES)[statuses],
        said_code=said_code,
        names=names,
        items=items,
        said=said,
    )
    return found.rows(np.lexsort((start, rank)))


def words(column: pa.ChunkedArray) -> tuple[Numbers, list[str]]:
    """Return the codes of a column of texts, and the texts that they stand for."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    whole = column.unify_dictionaries().combine_chunks()
    texts = [text or "" for text in whole.dictionary.to_pylist()]
    codes = whole.indices
    if codes.null_count:
        codes = codes.fill_null(len(texts))
        texts.append("")
    return codes.to_numpy(zero_copy_only=False).astype(np.int32), texts


def lane_keys(columns: Columns) -> Numbers:
    """Return a number for each event; events with equal ones share a group of lanes: one stage, for example.

    The requests of a rank share one group, whatever their verbs.
    """
    names = np.where(columns.kind == KINDS.index("stage"), columns.name_code + 1, 0)
    return columns.kind.astype(np.int64) * (len(columns.names) + 1) + names


def lanes_of(columns: Columns) -> Numbers:
    """Return the lane of each event inside its group: the lowest one that is free when the event starts.

    Events of one rank and group that overlap have different lanes. Times are compared as whole microseconds.
    """
    keys = lane_keys(columns)
    starts = np.rint(columns.start * 1e6).astype(np.int64)
    ends = np.rint(columns.end * 1e6).astype(np.int64)
    lanes = np.zeros(columns.count, np.int32)
    free: dict[tuple[int, int], list[int]] = {}
    for row, (rank, key, start, end) in enumerate(
        zip(columns.rank.tolist(), keys.tolist(), starts.tolist(), ends.tolist(), strict=True)
    ):
        group = free.setdefault((rank, key), [])
        lane = next((lane for lane, until in enumerate(group) if until <= start), len(group))
        group[lane : lane + 1] = [end]
        lanes[row] = lane
    return lanes


def _numbers(column: pa.ChunkedArray, kind: type[np.number[Any]]) -> Numbers:
    values: Numbers = column.fill_null(0).to_numpy().astype(kind)
    return values


def _positions(texts: Sequence[str], known: Sequence[str]) -> Numbers:
    return np.array([known.index(text) if text in known else 0 for text in texts] or [0], np.int32)
