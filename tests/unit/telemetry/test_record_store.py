"""Files of recordings: equal after a round trip, and refused if cut, damaged or forged."""

from __future__ import annotations

import base64
import json
import random
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import bcp
from bcp.telemetry import store
from bcp.telemetry.recording import EVENTS, FailureRecord, RankRecord, Recording
from bcp.telemetry.store import decode, encode

ROW = {
    "rank": 1,
    "kind": "stage",
    "name": "upload",
    "item": "model part 0: w",
    "nbytes": 7,
    "start": 0.5,
    "seconds": 0.25,
    "waited": 0.125,
    "attempt": 1,
    "status": "ok",
    "said": "",
}


def rows(count: int = 3, **changed: Any) -> pa.Table:
    return pa.Table.from_pylist([{**ROW, **changed}] * count, schema=EVENTS)


def recording(**changed: Any) -> Recording:
    ranks = [
        RankRecord(
            rank=rank, host=f"h{rank}", local_rank=0, coordinates={"dp": rank}, started=1.5, figures={"nbytes": 3}
        )
        for rank in range(2)
    ]
    failure = FailureRecord(
        rank=1,
        host="h1",
        time=2.0,
        guilty=0,
        phase="write",
        stage="upload",
        item="a",
        tensors=("w",),
        file="model/x",
        attempt=3,
        errors=(("StageError", "boom"), ("OSError", "disk")),
        notes=("a note",),
    )
    fields: dict[str, Any] = {
        "kind": "save",
        "path": "/ckpt/ä",
        "operation": "0" * 16,
        "step": 3,
        "run": "r",
        "background": True,
        "version": "0.1",
        "world_size": 2,
        "time": 1.5,
        "ranks": tuple(ranks),
        "events": rows(),
        "dropped": 4,
        "failures": (failure,),
        "probed": 1e9,
        "more": {"stores": ["gs://b"]},
    }
    return Recording(**(fields | changed))


def written(about: dict[str, Any], table: pa.Table | None = None, version: bytes = b"1") -> bytes:
    """Write a file with whatever facts."""
    packed = base64.b64encode(zlib.compress(json.dumps(about).encode()))
    metadata = {store.VERSION_KEY: version, store.ABOUT_KEY: packed}
    table = (rows() if table is None else table).replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def facts(**changed: Any) -> dict[str, Any]:
    about: dict[str, Any] = {name: getattr(recording(), name) for name in store._ABOUT}
    return {**about, "ranks": [], "failures": [], **changed}


def test_a_round_trip_changes_nothing() -> None:
    first = recording()
    again = decode(encode(first), "x")
    assert again.events.equals(first.events)
    assert replace(again, events=first.events) == first
    empty = recording(events=EVENTS.empty_table(), ranks=(), failures=(), step=None, probed=None)
    assert replace(decode(encode(empty), "x"), events=empty.events) == empty


def test_any_arrow_library_reads_the_events() -> None:
    table = pa.ipc.open_file(pa.py_buffer(encode(recording()))).read_all()
    assert table.column("name").to_pylist() == ["upload"] * 3


def test_a_file_cut_anywhere_is_refused() -> None:
    data = encode(recording())
    for length in range(len(data)):
        with pytest.raises(bcp.CorruptError, match="x is no sound recording"):
            decode(data[:length], "x")


def test_damage_anywhere_is_refused_or_harmless() -> None:
    data = encode(recording(events=rows(200)))
    dice = random.Random(5)  # noqa: S311 -- a sample, no secret
    refused = 0
    for _ in range(3000):
        forged = bytearray(data)
        for _ in range(dice.choice((1, 1, 2, 8))):
            forged[dice.randrange(len(forged))] = dice.randrange(256)
        try:
            found = decode(bytes(forged), "x")
        except (bcp.CorruptError, bcp.FormatVersionError):
            refused += 1
        else:
            assert isinstance(found, Recording)
            assert len(found.events) <= 200
    assert refused > 1000


@pytest.mark.parametrize(
    "about",
    [
        {"kind": "other"},
        {"world_size": 0},
        {"world_size": 10**12},
        {"world_size": True},
        {"world_size": "2"},
        {"time": "now"},
        {"time": 1e999},
        {"time": 10**40},
        {"time": None},
        {"step": 2.5},
        {"dropped": -1},
        {"ranks": [3]},
        {"ranks": [{"rank": 0}]},
        {"ranks": {}},
        {"more": []},
        {"failures": [{}]},
        {"failures": "many"},
    ],
    ids=str,
)
def test_forged_facts_are_refused(about: dict[str, Any]) -> None:
    decode(written(facts()), "x")
    with pytest.raises(bcp.CorruptError, match="x is no sound recording"):
        decode(written(facts(**about)), "x")


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 2},
        {"rank": -1},
        {"coordinates": {"dp": -1}},
        {"coordinates": {"dp": "a"}},
        {"coordinates": {"dp": 2**70}},
        {"figures": {"nbytes": "many"}},
        {"figures": {"nbytes": 2**70}},
        {"figures": {"nbytes": True}},
        {"started": 1e999},
        {"host": 3},
        {"local_rank": -1},
    ],
    ids=str,
)
def test_forged_ranks_are_refused(changed: dict[str, Any]) -> None:
    rank = {"rank": 0, "host": "h", "local_rank": 0, "coordinates": {"dp": 1}, "started": 1.0, "figures": {"a": 1.5}}
    decode(written(facts(ranks=[rank])), "x")
    with pytest.raises(bcp.CorruptError, match="x is no sound recording"):
        decode(written(facts(ranks=[{**rank, **changed}])), "x")
    with pytest.raises(bcp.CorruptError, match="two records of one rank"):
        decode(written(facts(ranks=[rank, rank])), "x")


@pytest.mark.parametrize(
    "changed",
    [
        {"rank": 2},
        {"rank": -1},
        {"kind": "virus"},
        {"status": "maybe"},
        {"start": float("nan")},
        {"start": float("inf")},
        {"seconds": -1.0},
        {"waited": float("inf")},
        {"nbytes": -1},
        {"said": None},
    ],
    ids=str,
)
def test_forged_events_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(bcp.CorruptError, match="x is no sound recording"):
        decode(written(facts(), rows(**changed)), "x")


def test_other_columns_and_versions_are_refused() -> None:
    with pytest.raises(bcp.CorruptError, match="other columns"):
        decode(written(facts(), rows().drop_columns(["said"])), "x")
    with pytest.raises(bcp.FormatVersionError, match="version 2, this bcp reads version 1"):
        decode(written(facts(), version=b"2"), "x")
    table, sink = rows(), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    with pytest.raises(bcp.CorruptError, match="bcp has not written it"):
        decode(sink.getvalue().to_pybytes(), "x")


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    many = pa.table({name: pa.array(np.zeros(2_000_000), kind) for name, kind in _numbers()}).cast(_schema())
    table = many
    for at, field in enumerate(EVENTS):
        if field.type == pa.string():
            table = table.add_column(at, field, pa.array([""]).take(pa.array(np.zeros(2_000_000, np.int64))))
    data = written(facts(), table)
    assert len(data) < 1 << 20
    monkeypatch.setattr(store, "MOST_DECODED_BYTES", 1 << 24)
    with pytest.raises(bcp.CorruptError, match="bytes of memory, more than"):
        decode(data, "x")
    monkeypatch.setattr(store, "MOST_BYTES", 1000)
    with pytest.raises(bcp.CorruptError, match="more than 1000"):
        decode(data, "x")


def test_facts_that_expand_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_ABOUT_BYTES", 1000)
    with pytest.raises(bcp.CorruptError, match="more than 1000 bytes"):
        decode(written(facts(path="a" * 2000)), "x")


def _numbers() -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in EVENTS if field.type != pa.string()]


def _schema() -> pa.Schema:
    return pa.schema(_numbers())
