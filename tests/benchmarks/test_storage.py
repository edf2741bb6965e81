"""What the storage benchmark makes of what it measured; never how long anything takes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from benchmarks.figures import Figures
from benchmarks.speed.tables import plain
from benchmarks.storage.__main__ import Storage, measure, storages, write
from benchmarks.storage.goals import beside, counted_stall, judge, table
from benchmarks.storage.payload import MIB, digest_of, filled, payload_digest, pieces
from benchmarks.storage.section import Sample, Samples, Way
from benchmarks.storage.worker import Heart

OURS, THEIRS, OTHER = "bcp gs://", "gcsfs", "obstore"


def samples(
    kind: str, rate: float = 2e9, cpu: float = 0.3, stall: float = 5.0, control: float = 1.0, theirs: float = 0.9e9
) -> Samples:
    """Return three rounds of one kind; the middle one is what counts."""
    found = Samples()
    for factor in (0.5, 1.0, 1.5):
        found.add(Way(kind, OURS, "parts"), Sample(factor * rate, factor * cpu, stall, control))
        found.add(Way(kind, THEIRS, "slow"), Sample(0.3 * theirs, 0.1, 1.0, 1.0))
        found.add(Way(kind, THEIRS, "quick"), Sample(theirs, 0.5, 100.0, 1.0))
        found.add(Way(kind, OTHER, "put"), Sample(2 * rate, 0.1, 1.0, 1.0))
    return found


def judged(*, goals: Collection[str] = ("cpu", "faster", "rate"), **changes: float) -> Figures:
    figures = Figures()
    judge("GCS", OURS, [THEIRS], lambda kind: samples(kind, **changes), figures, goals=goals)
    return figures


def missed(figures: Figures) -> list[str]:
    return [figure.name for figure in figures.found if figure.missed]


def test_a_run_that_reaches_all_goals() -> None:
    figures = judged()
    assert missed(figures) == []
    assert sum(figure.goal is not None for figure in figures.found) == 7
    assert figures.found[0].value == pytest.approx(2e9 / 0.9e9)  # beside the quickest call, not the first one
    assert figures.found[1].value == pytest.approx(0.3 / 0.5)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"theirs": 1.1e9}, ["GCS, write: times faster than gcsfs"]),
        ({"theirs": 1.4e9}, ["GCS, write: times faster than gcsfs", "GCS, read: times faster than gcsfs"]),
        ({"rate": 0.9e9, "theirs": 0.1e9}, ["GCS, write: MB/s of one process"]),
        ({"stall": 51.0}, ["GCS, write: longest stall of the loop", "GCS, read: longest stall of the loop"]),
        ({"stall": 70.0, "control": 71.0}, []),
        ({"cpu": 0.6}, [f"GCS, {kind}: CPU, as a part of that of gcsfs" for kind in ("write", "read")]),
    ],
)
def test_each_goal_can_be_missed(changes: dict[str, float], names: list[str]) -> None:
    assert missed(judged(**changes)) == names


def test_without_goals_on_speed_only_the_stall_counts() -> None:
    figures = judged(goals=(), rate=1e6, cpu=9.0, stall=51.0)
    assert [name.rpartition(": ")[2] for name in missed(figures)] == ["longest stall of the loop"] * 2


def test_what_the_machine_does_to_an_idle_loop_is_not_counted() -> None:
    assert counted_stall(Sample(1e9, 0.1, 40.0, 10.0)) == 40.0
    assert counted_stall(Sample(1e9, 0.1, 90.0, 80.0)) == 60.0
    assert counted_stall(Sample(1e9, 0.1, 10.0, 500.0)) == 0.0


def test_the_calmest_round_is_the_one_that_differs_least_from_an_idle_loop() -> None:
    found, way = Samples(), Way("write", OURS, "parts")
    for stall, control in ((30.0, 1.0), (90.0, 85.0), (60.0, 2.0)):
        found.add(way, Sample(1e9, 0.1, stall, control))
    assert found.calmest(way) == Sample(1e9, 0.1, 90.0, 85.0)


def test_a_missed_goal_is_measured_by_new_rounds() -> None:
    rounds: Iterator[Samples] = iter([samples("write", theirs=3e9), samples("read"), samples("write")])
    figures = Figures()
    judge("GCS", OURS, [THEIRS], lambda _: next(rounds), figures, goals=("cpu", "faster", "rate"))
    assert missed(figures) == ["GCS, write: times faster than gcsfs"]
    figures.look_again()
    assert missed(figures) == []
    assert next(rounds, None) is None


def test_clients_without_goals_are_compared_too(capsys: pytest.CaptureFixture[str]) -> None:
    figures = Figures()
    beside("S3", OURS, [OTHER, "absent"], samples("write"), figures)
    assert [(figure.value, figure.goal) for figure in figures.found] == [(0.5, None), (pytest.approx(3.0), None)]
    assert "absent" not in capsys.readouterr().out


def test_the_table_has_a_row_for_each_way() -> None:
    text = plain(table("GCS", samples("write")))
    assert [line.split("  ")[1].strip() for line in text.splitlines()[4:]] == [
        "bcp gs://: parts", "gcsfs: slow", "gcsfs: quick", "obstore: put"
    ]  # fmt: skip
    assert "1000 to 3000" in text


def test_a_heart_is_late_if_the_pause_touches_the_transfer() -> None:
    heart = Heart()
    heart.late = [(10.0, 0.5), (11.0, 0.2), (12.0, 0.9), (20.0, 5.0)]
    assert heart.worst(10.5, 11.5) == 0.9  # from 11.1 to 12
    assert heart.worst(10.5, 11.05) == 0.2
    assert heart.worst(12.5, 13.0) == 0.0


def test_the_payload_is_the_same_for_all_and_nowhere_like_itself() -> None:
    data = filled(9 * MIB)
    assert b"".join(pieces(9 * MIB)) == data
    assert digest_of([data[: 5 * MIB], data[5 * MIB :]]) == payload_digest(9 * MIB)
    assert data[:MIB] != data[MIB : 2 * MIB]


def test_a_small_run_over_a_local_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = Figures()
    disk: Storage = storages(tmp_path)["local"]
    found = measure(disk, 9 * MIB, 1, figures)
    assert {(way.kind, way.client) for way in found.taken} == {
        (kind, client) for kind in ("write", "read") for client in ("bcp, directory", "Python", "bcp local://")
    }
    assert all(sample.rate > 0 and sample.cpu > 0 for each in found.taken.values() for sample in each)
    write(tmp_path / "found.json", {"local": found}, figures)
    report = json.loads((tmp_path / "found.json").read_text())
    assert len(report["samples"]) == sum(map(len, found.taken.values()))
    assert len(report["figures"]) == len(figures.found) == 11
    assert "bcp local://: read_into" in capsys.readouterr().out
    assert [one.name for one in tmp_path.iterdir()] == ["found.json"]
