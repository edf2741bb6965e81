"""Figures of each rank in each place of a save or load: the cells of the heat map.

Events of a recording as numpy columns, and the lanes in which a timeline draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bcp.telemetry.recording import RankRecord, Recording

__all__ = [
    "IDLE",
    "KINDS",
    "STATUSES",
    "Columns",
    "Numbers",
    "Place",
    "columns_of",
    "figures_of",
    "lane_keys",
    "lanes_of",
    "places_of",
    "words",
]

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
    said_code, errors = words(table["said"])
    rank, start = _numbers(table["rank"], np.int32), _numbers(table["start"], np.float64)
    columns = Columns(
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
        said=errors,
    )
    return columns.rows(np.lexsort((start, rank)))


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

    Events of one rank and group that overlap have different lanes. Times are compared as whole microseconds. The time
    is n log n for n events, however many of them overlap.
    """
    keys = lane_keys(columns)
    starts = np.rint(columns.start * 1e6).astype(np.int64)
    ends = np.rint(columns.end * 1e6).astype(np.int64)
    lanes = np.zeros(columns.count, np.int32)
    groups: dict[tuple[int, int], tuple[list[tuple[int, int]], list[int]]] = {}
    for row in np.argsort(starts, kind="stable").tolist():
        busy, free = groups.setdefault((int(columns.rank[row]), int(keys[row])), ([], []))
        while busy and busy[0][0] <= starts[row]:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        heappush(busy, (int(ends[row]), lane))
        lanes[row] = lane
    return lanes


def _numbers(column: pa.ChunkedArray, kind: type[np.number[Any]]) -> Numbers:
    values: Numbers = column.fill_null(0).to_numpy().astype(kind)
    return values


def _positions(texts: Sequence[str], known: Sequence[str]) -> Numbers:
    return np.array([known.index(text) if text in known else 0 for text in texts] or [0], np.int32)


_FLOW = ("plan", "open", "snapshot", "write", "read", "finish", "commit")
IDLE = ("begin", "finish")
"""Verbs of storage requests whose bytes other requests have moved."""


@dataclass(frozen=True, slots=True)
class Place:
    """One phase, stage or other part of a save or load.

    Attributes:
        id: ``whole``, ``figures``, ``budget``, ``requests``, or a kind and a name, as in ``stage:upload``.
        title: its name for readers.
        metrics: numbers of the ranks, in the order of the recording; NaN for a rank without that figure.
    """

    id: str
    title: str
    metrics: Mapping[str, Numbers]


def places_of(recording: Recording, columns: Columns) -> list[Place]:
    """Return all places of a recording: the whole, phases and stages in order of time, the budget, the requests."""
    rows = _rows(recording.ranks, columns)
    return [
        _whole(recording, columns, rows),
        *_phases(recording, columns, rows),
        *_stages(recording, columns, rows),
        *_others(recording, columns, rows),
        *_reported(recording.ranks),
    ]


def figures_of(ranks: Sequence[RankRecord], name: str) -> Numbers:
    """Return one figure of all ranks; NaN for ranks without it."""
    return np.array([record.figures.get(name, np.nan) for record in ranks], np.float64)


def _rows(ranks: Sequence[RankRecord], columns: Columns) -> Numbers:
    """Return the position in ``ranks`` of each event's rank; -1 for a rank without a record."""
    most = max([record.rank for record in ranks] + [int(rank) for rank in columns.rank[-1:]], default=0)
    positions = np.full(most + 1, -1, np.int64)
    positions[[record.rank for record in ranks]] = np.arange(len(ranks))
    rows: Numbers = positions[columns.rank]
    return rows


def _whole(recording: Recording, columns: Columns, rows: Numbers) -> Place:
    ranks = recording.ranks
    known = rows >= 0
    seen = _sums(rows[known], columns.rows(known), len(ranks))
    again = _sums(*_only(rows, columns, known & (columns.status == STATUSES.index("again"))), len(ranks))
    seconds = figures_of(ranks, "seconds")
    nbytes = figures_of(ranks, "nbytes")
    retries = figures_of(ranks, "retries")
    seconds = np.where(np.isnan(seconds), seen["seconds"], seconds)
    metrics = {
        "seconds": seconds,
        "blocking": figures_of(ranks, "blocking_seconds"),
        "wait": figures_of(ranks, "budget_wait_seconds"),
        "bytes": nbytes,
        "throughput": _rate(nbytes, seconds),
        "retries": np.where(np.isnan(retries), np.nan_to_num(again["items"]), retries),
    }
    return Place("whole", f"whole {recording.kind}", _said(metrics))


def _phases(recording: Recording, columns: Columns, rows: Numbers) -> Iterator[Place]:
    for name, mask in _named(columns, rows, "phase"):
        sums = _sums(*_only(rows, columns, mask), len(recording.ranks))
        yield Place(f"phase:{name}", f"phase {name}", {"seconds": sums["seconds"]})


def _stages(recording: Recording, columns: Columns, rows: Numbers) -> Iterator[Place]:
    for name, mask in _named(columns, rows, "stage"):
        sums = _sums(*_only(rows, columns, mask), len(recording.ranks))
        yield Place(f"stage:{name}", f"stage {name}", sums)


def _others(recording: Recording, columns: Columns, rows: Numbers) -> Iterator[Place]:
    count = len(recording.ranks)
    known = rows >= 0
    mask = known & (columns.kind == KINDS.index("budget"))
    if mask.any():
        sums = _sums(*_only(rows, columns, mask), count)
        yield Place("budget", "waits for the byte budget", {"wait": sums["busy"], "items": sums["items"]})
    mask = known & (columns.kind == KINDS.index("request"))
    for title, of_verb in [("", mask), *_named(columns, rows, "request")]:
        if of_verb.any():
            yield _requests(title, columns.rows(of_verb), rows[of_verb], count)


def _requests(verb: str, columns: Columns, rows: Numbers, count: int) -> Place:
    idle = [position for position, name in enumerate(columns.names) if name in IDLE]
    moved = ~np.isin(columns.name_code, idle) & (columns.status == STATUSES.index("ok"))
    sums = _sums(rows, columns, count)
    nbytes = _sums(*_only(rows, columns, moved), count)["bytes"]
    again = _sums(*_only(rows, columns, columns.status == STATUSES.index("again")), count)["items"]
    longest = np.full(count, np.nan)
    np.fmax.at(longest, rows, columns.seconds)
    metrics = {
        "seconds": sums["seconds"],
        "busy": sums["busy"],
        "longest": longest,
        "bytes": nbytes,
        "throughput": _rate(nbytes, sums["seconds"]),
        "items": sums["items"],
        "retries": np.where(np.isnan(sums["items"]), np.nan, np.nan_to_num(again)),
    }
    title = f"storage requests: {verb}" if verb else "storage requests: all"
    return Place(f"request:{verb}" if verb else "requests", title, _said(metrics))


def _reported(ranks: Sequence[RankRecord]) -> Iterator[Place]:
    names = {name: None for record in ranks for name in record.figures}
    if names:
        yield Place("figures", "figures of the report", {name: figures_of(ranks, name) for name in names})


def _named(columns: Columns, rows: Numbers, kind: str) -> list[tuple[str, Numbers]]:
    """Return the names among events of a kind, in the order of their first starts, each with the mask of its events."""
    of_kind = (columns.kind == KINDS.index(kind)) & (rows >= 0)
    first: dict[str, tuple[int, float]] = {}
    masks: dict[str, Numbers] = {}
    for code in np.unique(columns.name_code[of_kind]).tolist():
        name = columns.names[code]
        masks[name] = of_kind & (columns.name_code == code)
        order = _FLOW.index(name) if kind == "phase" and name in _FLOW else len(_FLOW)
        first[name] = (order, float(columns.start[masks[name]].min()))
    return [(name, masks[name]) for name in sorted(first, key=first.__getitem__)]


def _only(rows: Numbers, columns: Columns, mask: Numbers) -> tuple[Numbers, Columns]:
    return rows[mask], columns.rows(mask)


def _sums(rows: Numbers, columns: Columns, count: int) -> dict[str, Numbers]:
    """Return figures of each rank over its events; NaN for ranks without any."""
    items = np.bincount(rows, minlength=count).astype(np.float64)
    none = items == 0
    first, last = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(first, rows, columns.start)
    np.maximum.at(last, rows, columns.end)
    seconds = np.where(none, np.nan, np.where(none, 0, last) - np.where(none, 0, first))
    sums = {
        name: np.where(none, np.nan, np.bincount(rows, weights=column, minlength=count))
        for name, column in (("busy", columns.seconds), ("wait", columns.waited), ("bytes", columns.nbytes))
    }
    throughput = _rate(sums["bytes"], seconds)
    return {"seconds": seconds, **sums, "throughput": throughput, "items": np.where(none, np.nan, items)}


def _rate(nbytes: Numbers, seconds: Numbers) -> Numbers:
    rates: Numbers = np.divide(nbytes, seconds, out=np.full(len(seconds), np.nan), where=seconds > 0)
    return rates


def _said(metrics: Mapping[str, Numbers]) -> dict[str, Numbers]:
    return {name: values for name, values in metrics.items() if not np.isnan(values).all()}
