"""The data of the page: recordings as columns and figures, and which events there is room for.

The data of the page in one compressed text, which cannot end the element around it.

Layout before compression: the length of the JSON text as four bytes (little-endian), and the JSON text in ASCII. Zeros
fill it up to a multiple of 8. The columns follow one after the other, each aligned to 8 bytes. A column in the JSON
text is ``{"$": [type, offset, count]}``. gzip and base64 make it a text of letters, digits, ``+``, ``/`` and ``=``.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from bcp.telemetry.page.heat import (
    KINDS,
    STATUSES,
    Columns,
    Numbers,
    Place,
    columns_of,
    figures_of,
    lane_keys,
    lanes_of,
    places_of,
)
from bcp.telemetry.page.storage import latencies_of, slowest_of, throughput_of, verbs_of
from bcp.telemetry.recording import RankRecord, Recording

__all__ = ["data_of", "packed", "squeezed"]

_ALIGN = 8


def packed(data: Mapping[str, Any]) -> str:
    """Return data as a text; its leaves are columns of numpy and values of JSON.

    Numbers of JSON that are not finite become null. A column may have int8 to int32, uint8 to uint32, float32 or
    float64.
    """
    columns = bytearray()
    text = json.dumps(_plain(data, columns), separators=(",", ":"), allow_nan=False).encode("ascii")
    head = len(text).to_bytes(4, "little") + text
    return squeezed(head + bytes(-len(head) % _ALIGN) + columns)


def squeezed(data: bytes) -> str:
    """Return bytes as the base64 text of their gzip."""
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


def _plain(value: Any, columns: bytearray) -> Any:
    if isinstance(value, np.ndarray):
        return {"$": _added(value, columns)}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(part, columns) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part, columns) for part in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _added(column: Numbers, columns: bytearray) -> tuple[str, int, int]:
    little = column.astype(column.dtype.newbyteorder("<"), copy=False)
    offset = len(columns)
    columns += little.tobytes()
    columns += bytes(-len(columns) % _ALIGN)
    return column.dtype.name, offset, len(column)


MOST_EVENTS = 200_000
"""Events on a page, about 17 bytes each. Beyond that, ranks that were fast have no timeline."""

MOST_RANKS = 20_000
"""Ranks with a heat map on a page, over all recordings. Beyond that, older recordings have their headline only."""

_AXES = ("pp", "ep", "dp", "fsdp", "cp", "sp", "tp")


def data_of(
    recordings: Sequence[Recording], findings: Sequence[Sequence[str]], highlights: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the data of the page, the oldest recording first."""
    told = {id(recording): lines for recording, lines in zip(recordings, findings, strict=False)}
    ordered = sorted(recordings, key=lambda recording: recording.time)
    entries = [_entry(recording, told.get(id(recording), ())) for recording in ordered]
    events, ranks = MOST_EVENTS, MOST_RANKS
    importance = sorted(range(len(ordered)), key=lambda place: (not ordered[place].failures, -place))
    for place in importance:
        recording = replace(ordered[place], ranks=sorted(ordered[place].ranks, key=lambda record: record.rank))
        if ranks < len(recording.ranks) and ranks < MOST_RANKS:
            continue
        ranks -= len(recording.ranks)
        detail = _detail(recording, events)
        events -= len(detail["events"]["rank"])
        entries[place]["detail"] = detail
    return {"kinds": KINDS, "statuses": STATUSES, "highlights": list(highlights), "recordings": entries}


def _entry(recording: Recording, findings: Sequence[str]) -> dict[str, Any]:
    """Return the facts of a recording that concern no single rank."""
    plain = ("kind", "path", "operation", "step", "run", "background", "version", "world_size", "time", "dropped")
    return {
        **{name: getattr(recording, name) for name in plain},
        "probed": recording.probed,
        "findings": list(findings),
        "failures": [asdict(failure) for failure in recording.failures],
        "headline": _headline(recording),
        "detail": None,
    }


def _headline(recording: Recording) -> dict[str, Any]:
    """Return the figures of all ranks together: sums, and the longest times of phases that ranks share."""
    columns = columns_of(recording.events)
    ranks = recording.ranks
    seconds = _most(figures_of(ranks, "seconds"))
    if seconds is None and columns.count:
        seconds = float(columns.end.max())
    nbytes = _sum(figures_of(ranks, "nbytes"))
    requests = columns.kind == KINDS.index("request")
    again = int((requests & (columns.status == STATUSES.index("again"))).sum())
    retries = _sum(figures_of(ranks, "retries"))
    return {
        "bytes": nbytes,
        "seconds": seconds,
        "blocking": _most(figures_of(ranks, "blocking_seconds")),
        "throughput": nbytes / seconds if nbytes is not None and seconds else None,
        "deduplicated": _sum(figures_of(ranks, "dedup_saved_bytes")),
        "retries": again if retries is None else retries,
        "requests": int(requests.sum()),
        "failed": int((requests & (columns.status == STATUSES.index("failed"))).sum()),
        "ranks": len(ranks),
        "hosts": len({record.host for record in ranks}),
        "events": columns.count,
    }


def _detail(recording: Recording, room: int) -> dict[str, Any]:
    columns = columns_of(recording.events)
    places = places_of(recording, columns)
    throughput, latency = throughput_of(recording, columns), latencies_of(columns)
    return {
        "ranks": _ranks(recording.ranks),
        "places": [
            {
                "id": place.id,
                "title": place.title,
                "metrics": {key: _narrow(key, v) for key, v in place.metrics.items()},
            }
            for place in places
        ],
        "throughput": throughput
        and {"source": throughput.source, "seconds": throughput.seconds, "bytes": throughput.nbytes},
        "latency": latency
        and {
            "edges": latency.edges,
            "counts": [{"verb": verb, "status": status, "counts": counts} for verb, status, counts in latency.counts],
        },
        "verbs": verbs_of(columns),
        "slowest": slowest_of(columns),
        "events": _events(_roomy(columns, places[0], recording.ranks, room)),
    }


def _narrow(metric: str, values: Numbers) -> Numbers:
    return values.astype(np.float32) if metric in ("seconds", "busy", "wait", "longest", "blocking") else values


def _ranks(ranks: Sequence[RankRecord]) -> dict[str, Any]:
    hosts = list(dict.fromkeys(record.host for record in ranks))
    code = {host: position for position, host in enumerate(hosts)}
    axes = _axes([record.coordinates for record in ranks])
    return {
        "rank": np.array([record.rank for record in ranks], np.int32),
        "host": np.array([code[record.host] for record in ranks], np.int32),
        "hosts": hosts,
        "local": np.array([record.local_rank for record in ranks], np.int32),
        "axes": axes,
        "coordinates": [np.array([record.coordinates[axis] for record in ranks], np.int32) for axis in axes],
    }


def _axes(coordinates: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the axes of the topology, the slowest first; none unless every rank has a place of its own in it."""
    names = list(coordinates[0]) if coordinates else []
    if not names or any(set(place) != set(names) for place in coordinates):
        return []
    if len({tuple(place[name] for name in names) for place in coordinates}) < len(coordinates):
        return []
    return sorted(names, key=lambda name: _AXES.index(name) if name in _AXES else -1)


def _roomy(columns: Columns, whole: Place, ranks: Sequence[RankRecord], room: int) -> Columns:
    """Return the events that there is room for: those of rank 0, then those of the slowest ranks."""
    if columns.count <= room:
        return columns
    numbers = np.array([record.rank for record in ranks], np.int64)
    order = numbers[np.argsort(-np.nan_to_num(whole.metrics.get("seconds", np.zeros(len(ranks)))), kind="stable")]
    order = np.concatenate([order[order == 0], order[order != 0]])
    counts = np.bincount(columns.rank, minlength=int(order.max(initial=0)) + 1)
    kept = order[np.cumsum(counts[order]) <= room]
    return columns.rows(np.isin(columns.rank, kept))


def _events(columns: Columns) -> dict[str, Any]:
    return {
        "rank": columns.rank,
        "kind": columns.kind.astype(np.uint8),
        "name": columns.name_code,
        "item": columns.item_code,
        "bytes": columns.nbytes.astype(np.float64),
        "start": columns.start.astype(np.float32),
        "seconds": columns.seconds.astype(np.float32),
        "waited": columns.waited.astype(np.float32),
        "attempt": columns.attempt,
        "status": columns.status.astype(np.uint8),
        "said": columns.said_code,
        "group": lane_keys(columns).astype(np.int32),
        "lane": lanes_of(columns),
        "names": columns.names,
        "items": columns.items,
        "words": columns.said,
    }


def _sum(values: Numbers) -> float | None:
    return None if np.isnan(values).all() else float(np.nansum(values))


def _most(values: Numbers) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmax(values))
