from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import random
import sys
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from telemetry.synthetic import Case, made

from bcp.errors import InputError, MissingExtraError
from bcp.telemetry.page import assemble, data, page
from bcp.telemetry.page.data import data_of, packed
from bcp.telemetry.page.heat import KINDS, columns_of, lane_keys, lanes_of, places_of
from bcp.telemetry.page.storage import latencies_of, slowest_of, throughput_of, verbs_of
from bcp.telemetry.recording import EVENTS, Recording


def rows_of(recording: Recording, **wanted: object) -> list[dict[str, Any]]:
    return [row for row in recording.events.to_pylist() if all(row[name] == value for name, value in wanted.items())]


def test_packed_data_come_back_and_are_letters_only() -> None:
    hostile = "</script><!-- \u2028 \ud800 \" '"
    text = packed({"a": np.arange(3, dtype=np.int32), "b": [np.array([0.5, np.nan])], "c": float("nan"), "d": hostile})
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
    raw = gzip.decompress(base64.b64decode(text))
    length = int.from_bytes(raw[:4], "little")
    found = json.loads(raw[4 : 4 + length])
    start = -(-(4 + length) // 8) * 8
    assert found["c"] is None
    assert found["d"] == hostile
    kind, offset, count = found["a"]["$"]
    assert np.frombuffer(raw, kind, count, start + offset).tolist() == [0, 1, 2]
    kind, offset, count = found["b"][0]["$"]
    np.testing.assert_equal(np.frombuffer(raw, kind, count, start + offset), [0.5, np.nan])


def test_events_are_read_from_plain_and_from_dictionary_columns() -> None:
    recording = made(Case(ranks=3, flaky=0.3))
    plain = columns_of(recording.events)
    coded = {
        name: recording.events[name].dictionary_encode() if pa.types.is_string(recording.events.schema.field(name).type)
        else recording.events[name]
        for name in recording.events.column_names
    }  # fmt: skip
    halves = pa.concat_tables([pa.table(coded).slice(0, 50), pa.table(coded).slice(50)])
    again = columns_of(halves)
    for one in (plain, again):
        rows = sorted(
            zip(one.rank.tolist(), [one.names[code] for code in one.name_code], one.start.tolist(), strict=True)
        )
        wanted = sorted((row["rank"], row["name"], row["start"]) for row in recording.events.to_pylist())
        assert rows == wanted
    assert again.status.tolist() == plain.status.tolist()


def test_lanes_hold_events_that_do_not_overlap_and_are_as_few_as_can_be() -> None:
    recording = made(Case(ranks=2))
    columns = columns_of(recording.events)
    lanes, keys = lanes_of(columns), lane_keys(columns)
    last: dict[tuple[int, int, int], float] = {}
    for row in range(columns.count):
        place = (int(columns.rank[row]), int(keys[row]), int(lanes[row]))
        assert columns.start[row] >= last.get(place, 0.0) - 1e-6
        last[place] = float(columns.end[row])
    upload = [code for code, name in enumerate(columns.names) if name == "upload"]
    mine = (columns.rank == 0) & np.isin(columns.name_code, upload)
    assert set(lanes[mine]) == {0, 1, 2, 3}  # the workers of the stage


def test_places_come_in_the_order_of_a_save() -> None:
    recording = made(Case(ranks=4, flaky=0.0))
    places = places_of(recording, columns_of(recording.events))
    assert [place.id for place in places] == [
        "whole", "phase:plan", "phase:snapshot", "phase:write", "phase:commit", "stage:d2h", "stage:serialize",
        "stage:upload", "stage:checksum", "budget", "requests", "request:begin", "request:part", "request:finish",
        "request:put", "figures",
    ]  # fmt: skip


def test_a_rank_without_events_has_no_figure() -> None:
    recording = made(Case(ranks=4))
    keep = pa.array([row["rank"] != 2 for row in recording.events.to_pylist()])
    part = dataclasses.replace(recording, events=recording.events.filter(keep))
    place = next(place for place in places_of(part, columns_of(part.events)) if place.id == "stage:upload")
    for values in place.metrics.values():
        assert np.isnan(values).tolist() == [False, False, True, False]


def test_events_of_ranks_without_a_record_are_left_out_of_the_figures() -> None:
    recording = made(Case(ranks=4))
    part = dataclasses.replace(recording, ranks=recording.ranks[1:3])
    for place in places_of(part, columns_of(part.events)):
        assert {len(values) for values in place.metrics.values()} == {2}


def test_throughput_has_every_byte_at_its_time() -> None:
    recording = made(Case(ranks=5, flaky=0.2))
    found = throughput_of(recording, columns_of(recording.events))
    assert found is not None
    moved = sum(
        row["nbytes"] for row in rows_of(recording, kind="request", status="ok") if row["name"] in ("part", "put")
    )
    assert found.nbytes.sum() == pytest.approx(moved)
    half = found.seconds * 120
    by_hand = 0.0
    for row in rows_of(recording, kind="request", status="ok"):
        if row["name"] in ("part", "put"):
            share = min(max((half - row["start"]) / row["seconds"], 0.0), 1.0)
            by_hand += share * row["nbytes"]
    assert found.nbytes[:120].sum() == pytest.approx(by_hand, rel=1e-4)


def test_throughput_is_that_of_the_stage_if_no_request_is_recorded() -> None:
    recording = made(Case(ranks=2, kind="load"))
    keep = pa.array([row["kind"] != "request" for row in recording.events.to_pylist()])
    part = dataclasses.replace(recording, events=recording.events.filter(keep))
    found = throughput_of(part, columns_of(part.events))
    assert found is not None
    assert found.source == "stage read"
    assert found.nbytes.sum() == pytest.approx(sum(row["nbytes"] for row in rows_of(part, name="read", kind="stage")))
    assert latencies_of(columns_of(part.events)) is None


def test_latencies_and_verbs_count_every_request_once() -> None:
    recording = made(Case(ranks=6, flaky=0.3))
    columns = columns_of(recording.events)
    latency = latencies_of(columns)
    assert latency is not None
    counted = {(verb, status): int(counts.sum()) for verb, status, counts in latency.counts}
    for (verb, status), count in counted.items():
        assert count == len(rows_of(recording, kind="request", name=verb, status=status))
    assert sum(counted.values()) == len(rows_of(recording, kind="request"))
    verbs = {row["verb"]: row for row in verbs_of(columns)}
    assert verbs["part"]["again"] == counted["part", "again"] > 0
    assert verbs["finish"]["bytes"] == 0  # its parts are counted
    slowest = slowest_of(columns)
    assert slowest[0]["seconds"] == max(row["seconds"] for row in rows_of(recording, kind="request"))
    assert [row["seconds"] for row in slowest] == sorted((row["seconds"] for row in slowest), reverse=True)


def test_events_beyond_the_room_are_those_of_fast_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = made(Case(ranks=16, slow_ranks={9: 3.0}))
    each = recording.events.num_rows // 16
    monkeypatch.setattr(data, "MOST_EVENTS", 3 * each + 20)
    detail = data_of([recording], [])["recordings"][0]["detail"]
    kept = set(detail["events"]["rank"].tolist())
    assert {0, 9} < kept
    assert len(kept) == 3
    assert len(detail["places"][0]["metrics"]["seconds"]) == 16


def test_ranks_beyond_the_room_are_those_of_old_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MOST_RANKS", 8)
    recordings = [made(Case(ranks=4, time=float(time), failing=1 if time == 1 else None)) for time in (3, 1, 2, 4)]
    entries = data_of(recordings, [["third"], ["first"]])["recordings"]
    assert [entry["time"] for entry in entries] == [1.0, 2.0, 3.0, 4.0]
    assert [entry["detail"] is not None for entry in entries] == [
        True,
        False,
        False,
        True,
    ]  # the failed one, the newest
    assert [entry["findings"] for entry in entries] == [["first"], [], ["third"], []]


@pytest.mark.parametrize(
    ("coordinates", "axes"),
    [
        ([{"tp": 0, "pp": 0}, {"tp": 1, "pp": 0}], ["pp", "tp"]),
        ([{"tp": 0}, {"tp": 0}], []),  # two ranks in one place
        ([{"tp": 0}, {"dp": 1}], []),
        ([{"tp": 0}, {}], []),
        ([{"dp": 0, "own": 3}, {"dp": 1, "own": 3}], ["own", "dp"]),
    ],
)
def test_a_topology_is_one_if_every_rank_has_a_place_of_its_own(
    coordinates: list[dict[str, int]], axes: list[str]
) -> None:
    recording = made(Case(ranks=2))
    ranks = [
        dataclasses.replace(record, coordinates=place)
        for record, place in zip(recording.ranks, coordinates, strict=True)
    ]
    entry = data_of([dataclasses.replace(recording, ranks=ranks)], [])["recordings"][0]
    assert entry["detail"]["ranks"]["axes"] == axes


def test_kinds_are_those_of_recordings() -> None:
    recording = made(Case(ranks=2))
    assert set(recording.events["kind"].to_pylist()) == set(KINDS)
    assert recording.events.schema == EVENTS


def test_a_page_needs_a_recording() -> None:
    with pytest.raises(InputError, match="at least one recording"):
        page([])


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assemble._vega.cache_clear()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingExtraError, match=r"bcp-checkpoint\[report\]"):
        page([made(Case(ranks=1))])


def test_lanes_are_the_lowest_free_ones_and_are_found_in_one_go_over_the_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dice = random.Random(3)  # noqa: S311 -- no secret
    rows = [(dice.randrange(2), dice.randrange(50), dice.randrange(30)) for _ in range(400)]
    columns = columns_of(events_of(rows))
    wanted: list[int] = []
    open_until: dict[int, list[float]] = {}
    for rank, start, end in zip(columns.rank, columns.start, columns.end, strict=True):
        group = open_until.setdefault(int(rank), [])
        lane = next((lane for lane, until in enumerate(group) if until <= start), len(group))
        group[lane : lane + 1] = [end]
        wanted.append(lane)
    assert lanes_of(columns).tolist() == wanted

    steps = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal steps
            steps += 1
            return function(*arguments)

        return call

    monkeypatch.setattr("bcp.telemetry.page.heat.heappush", counted(heappush))
    monkeypatch.setattr("bcp.telemetry.page.heat.heappop", counted(heappop))
    many = columns_of(events_of([(0, 0, 1000)] * 20_000 + [(0, 2000, 1)] * 20_000))
    lanes = lanes_of(many)
    assert lanes.max() == 19_999
    assert steps <= 4 * 40_000


def events_of(rows: list[tuple[int, int, int]]) -> pa.Table:
    """Return events of one stage: rank, start and seconds."""
    made_rows = [
        {"rank": rank, "kind": "stage", "name": "upload", "item": "", "nbytes": 0, "start": float(start),
         "seconds": float(seconds), "waited": 0.0, "attempt": 1, "status": "ok", "said": ""}
        for rank, start, seconds in rows
    ]  # fmt: skip
    return pa.Table.from_pylist(made_rows, schema=EVENTS)
