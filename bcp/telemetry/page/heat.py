"""Figures of each rank in each place of a save or load: the cells of the heat map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bcp.telemetry.page.columns import KINDS, STATUSES, Columns, Numbers
from bcp.telemetry.recording import RankRecord, Recording

__all__ = ["IDLE", "Place", "figures_of", "places_of"]

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
    found: Numbers = positions[columns.rank]
    return found


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
