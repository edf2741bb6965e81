"""A recording as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bcp.telemetry.page.heat import KINDS, STATUSES, Columns, columns_of, lane_keys, lanes_of
from bcp.telemetry.recording import RankRecord, Recording

__all__ = ["trace_json"]

_TITLES = {"phase": "phases", "budget": "byte budget", "request": "storage requests"}


def trace_json(recording: Recording) -> dict[str, Any]:
    """Return a recording in the trace event format, for :func:`json.dump`.

    A rank is a process, named with its host. A phase, a stage, the byte budget and the storage requests are threads.
    Items that a stage worked on at the same time have more threads. Counters show the items in each stage's queue.
    Times are microseconds since :attr:`Recording.time`.
    """
    columns = columns_of(recording.events)
    return {
        "traceEvents": [*_processes(recording), *_threads_and_slices(columns), *_queues(columns)],
        "displayTimeUnit": "ms",
        "otherData": {
            "kind": recording.kind,
            "path": recording.path,
            "operation": recording.operation,
            "step": recording.step,
            "run": recording.run,
            "bcp": recording.version,
            "time": recording.time,
        },
    }


def _processes(recording: Recording) -> Iterator[dict[str, Any]]:
    for record in sorted(recording.ranks, key=lambda record: record.rank):
        place = "".join(f", {axis} {coordinate}" for axis, coordinate in record.coordinates.items())
        yield _meta("process_name", record, {"name": f"rank {record.rank} on {record.host}{place}"})
        yield _meta("process_sort_index", record, {"sort_index": record.rank})


def _meta(name: str, record: RankRecord, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": record.rank, "tid": 0, "args": args}


def _threads_and_slices(columns: Columns) -> Iterator[dict[str, Any]]:
    threads: dict[tuple[int, int, int], int] = {}
    keys, lanes = lane_keys(columns), lanes_of(columns)
    first = dict(zip(*np.unique(keys, return_index=True), strict=True))  # order of lanes: by kind, then by first start
    order = {key: place for place, key in enumerate(sorted(first, key=lambda key: _flow(columns, int(first[key]))))}
    for row, (key, lane) in enumerate(zip(keys.tolist(), lanes.tolist(), strict=True)):
        rank = int(columns.rank[row])
        kind = KINDS[columns.kind[row]]
        name = columns.names[columns.name_code[row]]
        thread = threads.get((rank, key, lane))
        if thread is None:
            thread = threads[rank, key, lane] = len(threads) + 1
            title = _TITLES.get(kind, name) + (f" {lane + 1}" if lane else "")
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": title}}
            place = {"sort_index": order[key] * 1000 + lane}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": place}
        yield _slice(columns, row, kind, name, thread)


def _flow(columns: Columns, row: int) -> tuple[int, float]:
    return int(columns.kind[row]), float(columns.start[row])


def _slice(columns: Columns, row: int, kind: str, name: str, thread: int) -> dict[str, Any]:
    start = round(float(columns.start[row]) * 1e6)
    end = round(float(columns.end[row]) * 1e6)
    item = columns.items[columns.item_code[row]]
    args = {
        "item": item,
        "bytes": int(columns.nbytes[row]),
        "queue wait (seconds)": float(columns.waited[row]),
        "attempt": int(columns.attempt[row]),
        "status": STATUSES[columns.status[row]],
        "error": columns.said[columns.said_code[row]],
    }
    return {
        "ph": "X",
        "cat": kind,
        "name": item if kind in ("stage", "budget") and item else name or kind,
        "pid": int(columns.rank[row]),
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": {key: value for key, value in args.items() if value or key == "bytes"},
    }


def _queues(columns: Columns) -> Iterator[dict[str, Any]]:
    """Yield the number of items in the queue of each stage of each rank, whenever it changes."""
    stages = columns.rows(columns.kind == KINDS.index("stage"))
    order = np.lexsort((stages.name_code, stages.rank))
    pairs = np.stack([stages.rank, stages.name_code], axis=1)[order]
    groups, first = np.unique(pairs, axis=0, return_index=True)
    for (rank, code), rows in zip(groups.tolist(), np.split(order, first[1:])[: len(groups)], strict=True):
        events = stages.rows(rows)
        times = np.concatenate([events.start - events.waited, events.start])
        steps = np.concatenate([np.ones(events.count), -np.ones(events.count)])
        micros, inverse = np.unique(np.rint(times * 1e6).astype(np.int64), return_inverse=True)
        waiting = np.cumsum(np.bincount(inverse, weights=steps)).astype(np.int64)
        for timestamp, items in zip(micros.tolist(), waiting.tolist(), strict=True):
            yield {
                "ph": "C",
                "name": f"queue of {stages.names[code]}",
                "pid": int(rank),
                "tid": 0,
                "ts": timestamp,
                "args": {"items": items},
            }
