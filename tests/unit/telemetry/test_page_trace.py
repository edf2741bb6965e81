from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from telemetry.synthetic import Case, made

from bcp.telemetry.page import trace_json

NAMES = {"process_name": str, "process_sort_index": int, "thread_name": str, "thread_sort_index": int}


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(ranks=5, local=2, axes={"pp": 1, "dp": 5}, flaky=0.2, failing=3)


@pytest.fixture(scope="module")
def trace(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(trace_json(made(case)), allow_nan=False))
    return found


def of(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_it_is_in_the_trace_event_format(trace: dict[str, Any]) -> None:
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert event["ph"] in {"M", "X", "C"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        assert event["name"]
    for event in of(trace, "M"):
        (value,) = event["args"].values()
        assert isinstance(value, NAMES[event["name"]])
    for event in of(trace, "X"):
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert isinstance(event["dur"], int)
        assert event["dur"] >= 0
        assert event["cat"] in {"phase", "budget", "stage", "request"}
    for event in of(trace, "C"):
        assert isinstance(event["ts"], int)
        assert event["args"]["items"] >= 0


def test_a_rank_is_a_process_named_with_its_host(trace: dict[str, Any]) -> None:
    names = {event["pid"]: event["args"]["name"] for event in of(trace, "M") if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank} on node-{rank // 2:03d}, pp 0, dp {rank}" for rank in range(5)}


def test_every_event_is_a_slice_in_a_named_thread(trace: dict[str, Any], case: Case) -> None:
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in of(trace, "M")
        if event["name"] == "thread_name"
    }
    assert {name for (rank, _), name in threads.items() if rank == 0} >= {
        "phases", "byte budget", "d2h", "d2h 2", "upload", "upload 4", "storage requests",
    }  # fmt: skip
    found = defaultdict(list)
    for event in of(trace, "X"):
        title = threads[event["pid"], event["tid"]].rstrip(" 0123456789") or "d2h"
        found[event["pid"], event["cat"], title].append((event["ts"], event["dur"], event["args"]["bytes"]))
    wanted = defaultdict(list)
    for row in made(case).events.to_pylist():
        title = {"phase": "phases", "budget": "byte budget", "request": "storage requests"}.get(
            row["kind"], row["name"]
        )
        start, end = round(row["start"] * 1e6), round((row["start"] + row["seconds"]) * 1e6)
        wanted[row["rank"], row["kind"], title].append((start, end - start, row["nbytes"]))
    assert {key: sorted(values) for key, values in found.items()} == {
        key: sorted(values) for key, values in wanted.items()
    }


def test_slices_of_a_thread_do_not_overlap(trace: dict[str, Any]) -> None:
    ends: dict[tuple[int, int], int] = {}
    for event in sorted(of(trace, "X"), key=lambda event: (event["ts"], event["dur"])):
        thread = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(thread, 0)
        ends[thread] = event["ts"] + event["dur"]


def test_counters_follow_the_queues(trace: dict[str, Any], case: Case) -> None:
    counted = [event for event in of(trace, "C") if event["pid"] == 1 and event["name"] == "queue of upload"]
    rows = [row for row in made(case).events.to_pylist() if row["rank"] == 1 and row["name"] == "upload"]
    assert max(event["args"]["items"] for event in counted) > 0
    assert counted[-1]["args"]["items"] == 0
    for event in counted:
        spans = [(round((row["start"] - row["waited"]) * 1e6), round(row["start"] * 1e6)) for row in rows]
        assert event["args"]["items"] == sum(start <= event["ts"] < end for start, end in spans)


def test_errors_and_attempts_are_told(trace: dict[str, Any]) -> None:
    failed = [event for event in of(trace, "X") if event["args"]["status"] == "failed" and event["cat"] == "stage"]
    assert [(event["pid"], event["args"]["error"]) for event in failed] == [(3, "StorageError: 503 backend error")]
    again = [event for event in of(trace, "X") if event["args"]["status"] == "again"]
    assert {event["args"]["error"] for event in again} == {"503 slow down"}
    second = [event for event in of(trace, "X") if event["args"].get("attempt") == 2]
    assert len(second) == len(again) > 0
