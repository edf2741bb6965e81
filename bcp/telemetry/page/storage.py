"""Figures of storage: throughput over time, latencies of requests, the slowest requests, bytes of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bcp.telemetry.page.heat import IDLE, KINDS, STATUSES, Columns, Numbers
from bcp.telemetry.recording import Recording

__all__ = ["Latency", "Throughput", "latencies_of", "slowest_of", "throughput_of", "verbs_of"]

_WRITES = ("part", "put", "put_if")
_READS = ("get", "read")
_BINS = 240
_EDGES_A_DECADE = 10
_SLOWEST = 12


@dataclass(frozen=True, slots=True)
class Throughput:
    """Bytes that moved in equal intervals from the start of a recording to its end.

    Attributes:
        source: name of the events that tell it, for readers.
        seconds: length of an interval.
        nbytes: bytes that moved in each one, over all ranks. A request's bytes are spread evenly over its time.
    """

    source: str
    seconds: float
    nbytes: Numbers


@dataclass(frozen=True, slots=True)
class Latency:
    """How many requests took how long.

    Attributes:
        edges: limits of the intervals, in seconds, each a fixed multiple of the one before.
        counts: for each verb and status, the requests in each interval.
    """

    edges: Numbers
    counts: Sequence[tuple[str, str, Numbers]]


def throughput_of(recording: Recording, columns: Columns) -> Throughput | None:
    """Return the bytes over time of a recording; None if no event tells them.

    Requests that storage answered tell it, or else the stage that writes or reads.
    """
    verbs = _WRITES if recording.kind == "save" else _READS
    stage = "upload" if recording.kind == "save" else "read"
    ok = columns.status == STATUSES.index("ok")
    for kind, names, source in (("request", verbs, "storage requests"), ("stage", (stage,), f"stage {stage}")):
        codes = [code for code, name in enumerate(columns.names) if name in names]
        mask = (columns.kind == KINDS.index(kind)) & np.isin(columns.name_code, codes) & ok & (columns.nbytes > 0)
        if mask.any():
            moving = columns.rows(mask)
            seconds = float(columns.end.max()) / _BINS
            return Throughput(source, seconds, _spread(moving.start / seconds, moving.end / seconds, moving.nbytes))
    return None


def latencies_of(columns: Columns) -> Latency | None:
    """Return the distribution of the latencies of storage requests; None without any."""
    requests = columns.rows(columns.kind == KINDS.index("request"))
    if not requests.count:
        return None
    seconds = np.maximum(requests.seconds, 1e-6)
    low = int(np.floor(np.log10(seconds.min()) * _EDGES_A_DECADE))
    high = int(np.floor(np.log10(seconds.max()) * _EDGES_A_DECADE)) + 1
    edges = 10 ** (np.arange(low, high + 1) / _EDGES_A_DECADE)
    edges[[0, -1]] = min(edges[0], seconds.min()), max(edges[-1], seconds.max())
    counts = []
    for name, status, mask in _groups(requests):
        counts.append((name, status, np.histogram(seconds[mask], edges)[0].astype(np.int32)))
    return Latency(edges, counts)


def verbs_of(columns: Columns) -> list[dict[str, Any]]:
    """Return a row of figures for each verb of storage requests, the one with most seconds first."""
    requests = columns.rows(columns.kind == KINDS.index("request"))
    rows = []
    for code in np.unique(requests.name_code).tolist():
        mask = requests.name_code == code
        seconds, status = requests.seconds[mask], requests.status[mask]
        half, most = np.percentile(seconds, [50, 99])
        name = requests.names[code]
        rows.append(
            {
                "verb": name,
                "count": int(mask.sum()),
                "bytes": 0 if name in IDLE else int(requests.nbytes[mask & (requests.status == 0)].sum()),
                "seconds": float(seconds.sum()),
                "p50": float(half),
                "p99": float(most),
                "longest": float(seconds.max()),
                "again": int((status == STATUSES.index("again")).sum()),
                "failed": int((status == STATUSES.index("failed")).sum()),
            }
        )
    return sorted(rows, key=lambda row: -row["seconds"])


def slowest_of(columns: Columns) -> list[dict[str, Any]]:
    """Return the slowest storage requests, the slowest first."""
    requests = columns.rows(columns.kind == KINDS.index("request"))
    order = np.argsort(-requests.seconds, kind="stable")[:_SLOWEST]
    return [
        {
            "rank": int(requests.rank[row]),
            "verb": requests.names[requests.name_code[row]],
            "key": requests.items[requests.item_code[row]],
            "bytes": int(requests.nbytes[row]),
            "start": float(requests.start[row]),
            "seconds": float(requests.seconds[row]),
            "attempt": int(requests.attempt[row]),
            "status": STATUSES[requests.status[row]],
            "said": requests.said[requests.said_code[row]],
        }
        for row in order.tolist()
    ]


def _groups(requests: Columns) -> list[tuple[str, str, Numbers]]:
    groups = []
    for code in np.unique(requests.name_code).tolist():
        for number, status in enumerate(STATUSES):
            mask = (requests.name_code == code) & (requests.status == number)
            if mask.any():
                groups.append((requests.names[code], status, mask))
    return groups


def _spread(starts: Numbers, ends: Numbers, nbytes: Numbers) -> Numbers:
    """Spread bytes evenly from start to end, both counted in intervals; return the bytes of each interval.

    The bytes before each edge are summed as a piecewise linear function of time, whose slope changes at starts and
    ends.
    """
    ends = np.maximum(ends, starts + 1e-6)
    rates = nbytes / (ends - starts)
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    times = times[order]
    slopes = np.cumsum(np.concatenate([rates, -rates])[order])
    moved = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(times))])
    edges = np.arange(_BINS + 1, dtype=np.float64)
    edges[-1] = max(edges[-1], times[-1])
    spread: Numbers = np.maximum(np.diff(np.interp(edges, times, moved, left=0.0)), 0.0)
    return spread
