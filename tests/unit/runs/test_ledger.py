"""The ledger of a run as a value, and as bytes that anybody may have written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcp.errors import CorruptError, FormatVersionError, InputError
from bcp.policies import Entry
from bcp.runs.ledger import LARGEST_STEP, MOST_BYTES, WITH_REFERENCES, Ledger, Life, Removal

EMPTY = Ledger(run_id="pretrain", owner="a1")
FULL = (
    EMPTY.with_checkpoint(10, 1000.0, {"loss": 2.5})
    .with_checkpoint(30, 3000.0, {})
    .with_checkpoint(20, 2000.0, {"loss": 2.0, "accuracy": 1})
    .with_checkpoint(40, 4000.0, {})
    .marked(20, "suspect", "a spike")
    .pinned(10)
    .leaving(40, "8f0e")
    .with_life(Life(1.0, "node-1", 1))
    .observed(2.5)
    .ended("preempted")
    .with_life(Life(2.0, "node-2", 2))
)


def steps(ledger: Ledger) -> list[int]:
    return [entry.step for entry in ledger.entries]


def test_entries_stand_by_step_and_are_replaced() -> None:
    assert steps(FULL) == [10, 20, 30]
    again = FULL.marked(10, "verified").with_checkpoint(10, 9000.0, {"loss": 1.0})
    assert steps(again) == [10, 20, 30]
    assert again.entries[0] == Entry(step=10, committed=9000.0, metrics={"loss": 1.0}, pinned=True)
    assert steps(FULL.without(20).without(20).without(99)) == [10, 30]
    assert FULL.without(40).removing == ()


def test_a_checkpoint_whose_deletion_begins_is_no_entry() -> None:
    ledger = FULL.leaving(20, "77")
    assert steps(ledger) == [10, 30]
    assert ledger.removing == (Removal(40, "8f0e"), Removal(20, "77"))
    assert ledger.leaving(20, "78").removing == (Removal(40, "8f0e"), Removal(20, "78"))
    saved_again = ledger.with_checkpoint(20, 5.0, {})
    assert steps(saved_again) == [10, 20, 30]
    assert saved_again.removing == (Removal(40, "8f0e"),)
    assert saved_again.entries[1].trust == "unknown"


def test_marks_and_pins_need_a_checkpoint() -> None:
    assert FULL.entries[1].trust == "suspect"
    assert FULL.entries[1].reason == "a spike"
    assert FULL.entries[0].pinned
    assert not FULL.pinned(10, yes=False).entries[0].pinned
    unknown = r"'pretrain' has no checkpoint of step 40; it has 10, 20, 30$"
    with pytest.raises(InputError, match=unknown):
        FULL.marked(40, "verified")
    with pytest.raises(InputError, match=unknown):
        FULL.pinned(40)
    with pytest.raises(InputError, match="has none yet"):
        EMPTY.pinned(1)
    many = EMPTY.with_entries(Entry(step=step, committed=0.0) for step in range(25))
    with pytest.raises(InputError, match=r"it has 15, .* 24 and 15 older ones"):
        many.pinned(99)
    with pytest.raises(InputError, match="'trusted' is unknown; use one of 'unknown', 'verified', 'suspect'"):
        FULL.marked(10, "trusted")  # type: ignore[arg-type]  # the mistake that is tested
    with pytest.raises(InputError, match="reason=7"):
        FULL.marked(10, "verified", 7)  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None, LARGEST_STEP + 1])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(InputError, match="whole number"):
        EMPTY.with_checkpoint(step, 0.0, {})


def test_metrics_become_finite_floats() -> None:
    metrics: dict[str, Any] = {"a": torch.tensor(1.5), "b": 2, "c": math.nan, "d": -math.inf, "e": True}
    (entry,) = EMPTY.with_checkpoint(1, 0.0, metrics).entries
    assert entry.metrics == {"a": 1.5, "b": 2.0, "e": 1.0}
    assert all(type(value) is float for value in entry.metrics.values())
    for bad in ({"": 1.0}, {3: 1.0}, {"x" * 5000: 1.0}, {"\ud800": 1.0}):
        with pytest.raises(InputError, match="is no name"):
            EMPTY.with_checkpoint(1, 0.0, bad)  # type: ignore[arg-type]  # as above
    for value in ("low", None, [1.0], torch.zeros(2), 10**400):
        with pytest.raises(InputError, match=r"'loss' is .* has to be a number"):
            EMPTY.with_checkpoint(1, 0.0, {"loss": value})  # type: ignore[dict-item]  # as above


@pytest.mark.parametrize(("end", "failures"), [("", 1), ("failed", 1), ("preempted", 0), ("finished", 0)])
def test_killed_and_failed_lives_are_failures(end: Any, failures: int) -> None:
    ledger = EMPTY.with_life(Life(1.0, "a", 1))
    assert ledger.failures == 0, "a life that runs is none"
    ledger = ledger.ended(end) if end else ledger
    assert ledger.with_life(Life(2.0, "a", 2)).failures == failures
    assert [life.ended for life in ledger.with_life(Life(2.0, "a", 2)).lives] == [end, ""]


def test_an_end_is_one_of_three_words() -> None:
    with pytest.raises(InputError, match="ending='dead'"):
        FULL.ended("dead")  # type: ignore[arg-type]  # as above
    assert EMPTY.ended("finished") == EMPTY, "there is no life that could end"


def test_a_hundred_lives_are_kept_and_all_are_counted() -> None:
    ledger = EMPTY
    for number in range(130):
        ledger = ledger.with_life(Life(float(number), "node", number)).observed(0.5)
    assert [life.pid for life in ledger.lives] == list(range(30, 130))
    assert ledger.total_lives == 130
    assert ledger.failures == 129
    assert ledger.observed_hours == pytest.approx(65.0)
    assert Ledger.from_bytes(ledger.to_bytes(), "x") == ledger


def test_hours_of_a_life_add_up_once() -> None:
    assert FULL.observed_hours == 2.5
    ledger = FULL.observed(1.0).observed(1.5).observed(0.5).observed(-3.0)
    assert ledger.observed_hours == 4.0, "a clock that goes back takes nothing away"
    assert [life.hours for life in ledger.lives] == [2.5, 1.5]
    assert EMPTY.observed(1.0) == EMPTY
    for hours in (math.nan, math.inf):
        with pytest.raises(InputError, match="finite"):
            FULL.observed(hours)


# -- bytes


def test_the_file_is_readable_json() -> None:
    lines = FULL.to_bytes().decode().splitlines()
    assert lines[:4] == ["{", ' "version": 1,', ' "run_id": "pretrain",', ' "owner": "a1",']
    fields = json.loads(FULL.to_bytes())
    assert fields["checkpoints"][1]["reason"] == "a spike"
    assert fields["removing"] == [{"step": 40, "version": "8f0e"}]
    assert Ledger.from_bytes(FULL.to_bytes(), "run.json") == FULL


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ENTRIES = st.builds(
    Entry,
    step=st.integers(0, LARGEST_STEP),
    committed=NUMBERS,
    metrics=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), NUMBERS),
    trust=st.sampled_from(["unknown", "verified", "suspect"]),
    reason=TEXTS,
    pinned=st.booleans(),
)
LIVES = st.builds(
    Life,
    NUMBERS,
    TEXTS,
    st.integers(0, 1 << 32),
    st.sampled_from(["", "finished", "preempted", "failed"]),
    st.floats(0, 1e6),
)


@given(st.lists(ENTRIES, max_size=5), st.lists(LIVES, max_size=5), TEXTS)
def test_every_ledger_comes_back(entries: list[Entry], lives: list[Life], owner: str) -> None:
    ledger = Ledger(run_id="r", owner=owner).with_entries(entries)
    for life in lives:
        ledger = ledger.with_life(life)
    assert Ledger.from_bytes(ledger.to_bytes(), "run.json") == ledger


def test_what_no_file_could_hold_is_replaced() -> None:
    ledger = FULL.marked(10, "suspect", "\ud800" + "x" * 9000).with_life(Life(3.0, "\udcff", 1))
    assert ledger.entries[0].reason == "?" + "x" * 4095
    assert ledger.lives[-1].host == "?"
    assert Ledger.from_bytes(ledger.to_bytes(), "run.json") == ledger


def test_a_ledger_above_the_limit_is_refused_before_it_is_written() -> None:
    entries = [Entry(step=step, committed=0.0, reason="x" * 4096) for step in range(5000)]
    with pytest.raises(InputError, match=r"takes \d+ bytes for 5000 checkpoints, and 16777216 is the most"):
        EMPTY.with_entries(entries).to_bytes()
    with pytest.raises(CorruptError, match="16777216 is the most"):
        Ledger.from_bytes(b" " * (MOST_BYTES + 1), "run.json")


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    fields = json.loads(FULL.to_bytes())
    change(fields)
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(FULL.to_bytes()[:-40], id="half"),
        pytest.param(b"\xff\xfe{}", id="no UTF-8"),
        pytest.param(b"[1]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"version": 1' + b"0" * 5000 + b"}", id="an endless number"),
        pytest.param(FULL.to_bytes().replace(b'"owner"', b'"run_id"'), id="a name twice"),
        pytest.param(FULL.to_bytes().replace(b"2.5", b"NaN"), id="NaN"),
        pytest.param(FULL.to_bytes().replace(b"2.5", b"1e999"), id="too large"),
        pytest.param(FULL.to_bytes().replace(b"node-1", b"\\ud800"), id="half a character"),
        pytest.param(changed(lambda f: f.pop("version")), id="no version"),
        pytest.param(changed(lambda f: f.update(version=True)), id="version of another type"),
        pytest.param(changed(lambda f: f.update(version=0)), id="version 0"),
        pytest.param(changed(lambda f: f.update(run_id="")), id="no run id"),
        pytest.param(changed(lambda f: f.update(run_id=7)), id="run id of another type"),
        pytest.param(changed(lambda f: f.update(failures=-1)), id="negative"),
        pytest.param(changed(lambda f: f.update(failures=1.5)), id="no whole number"),
        pytest.param(changed(lambda f: f.update(observed_hours="1")), id="hours of another type"),
        pytest.param(changed(lambda f: f.update(checkpoints={})), id="checkpoints of another type"),
        pytest.param(changed(lambda f: f["checkpoints"].append(7)), id="checkpoint of another type"),
        pytest.param(changed(lambda f: f["checkpoints"].append(f["checkpoints"][0])), id="a step twice"),
        pytest.param(changed(lambda f: f["removing"].append({"step": 10, "version": ""})), id="there and going"),
        pytest.param(changed(lambda f: f["checkpoints"][0].update(step=10.0)), id="step of another type"),
        pytest.param(changed(lambda f: f["checkpoints"][0].update(step=True)), id="step is true"),
        pytest.param(changed(lambda f: f["checkpoints"][0].update(step=1 << 63)), id="step too large"),
        pytest.param(changed(lambda f: f["checkpoints"][0].update(trust="full")), id="unknown trust"),
        pytest.param(changed(lambda f: f["checkpoints"][0].update(pinned=1)), id="pin of another type"),
        pytest.param(changed(lambda f: f["checkpoints"][0].update(metrics=[])), id="metrics of another type"),
        pytest.param(changed(lambda f: f["checkpoints"][0]["metrics"].update(loss=None)), id="no number"),
        pytest.param(changed(lambda f: f["checkpoints"][0]["metrics"].update({"": 1.0})), id="metric without name"),
        pytest.param(changed(lambda f: f["checkpoints"][0].pop("reason")), id="no reason"),
        pytest.param(changed(lambda f: f["lives"][0].update(ended="dead")), id="unknown end"),
        pytest.param(changed(lambda f: f["lives"][0].update(pid=-1)), id="negative pid"),
        pytest.param(changed(lambda f: f["lives"][0].update(host="x" * 5000)), id="endless host"),
    ],
)
def test_what_is_no_ledger_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"^s3://b/run.json is no ledger of a run: .{5}"):
        Ledger.from_bytes(data, "s3://b/run.json")


def test_unknown_fields_are_left_out_and_whole_numbers_are_floats() -> None:
    data = changed(lambda f: (f.update(note="mine"), f["checkpoints"][0].update(committed=1000, more=[])))
    assert Ledger.from_bytes(data, "run.json") == FULL


def test_a_newer_version_is_told_apart_whatever_else_it_has() -> None:
    data = json.dumps({"version": WITH_REFERENCES + 1, "checkpoints": "elsewhere"}).encode()
    with pytest.raises(FormatVersionError, match=r"run.json has version 3, and this bcp knows 2"):
        Ledger.from_bytes(data, "run.json")


SPOTS = st.tuples(st.integers(0, len(FULL.to_bytes()) - 1), st.binary(max_size=3), st.integers(0, 4))


@given(st.lists(SPOTS, min_size=1, max_size=4))
def test_damaged_bytes_raise_nothing_else(spots: list[tuple[int, bytes, int]]) -> None:
    data = bytearray(FULL.to_bytes())
    for at, new, old in spots:
        data[at : at + old] = new
    try:
        ledger = Ledger.from_bytes(bytes(data), "run.json")
    except (CorruptError, FormatVersionError):
        return
    assert Ledger.from_bytes(ledger.to_bytes(), "run.json") == ledger
