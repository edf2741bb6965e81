"""What the benchmark makes of what it measured; never how long anything takes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.figures import Figures
from benchmarks.speed import __main__ as speed
from benchmarks.speed import disk
from benchmarks.speed.cases import CASES, MANY, ONE, RANKS, SINGLE
from benchmarks.speed.crew import combined
from benchmarks.speed.goals import judge
from benchmarks.speed.libraries import LIBRARIES, Listed, missing
from benchmarks.speed.raw import READ_WARM, READS_COLD, WRITES, Raw
from benchmarks.speed.rounds import Run
from benchmarks.speed.samples import RAW, Samples
from benchmarks.speed.state import equal_tensors, gpt
from benchmarks.speed.tables import BEGIN, END, plain, put_into, tables
from benchmarks.speed.usage import Usage

MIB = 1 << 20


def measured(**changes: float) -> Samples:
    """Return a run in which every goal is reached, in which some values are others."""
    take = {
        "raw": 1.0,
        "bcp": 1.05,
        "DCP": 2.2,
        "blocking": 0.19,
        "durable": 1.0,
        "lost": 0.2,
        "worst": 0.012,
        "lazy": 0.004,
        "memory": 1024.0 * MIB,
        "balance": 1.02,
        "many": 0.19,
    } | changes
    samples = Samples(about={"torch": "2"})
    of_save = {"state": 1e9, "memory": take["memory"], "budget": 1024.0 * MIB, "cpu": 0.5}
    trained = {"lost": take["lost"], "worst": take["worst"], "alone": 0.005, "worst_alone": 0.008, "stall": 0.2}
    for case in (SINGLE, *RANKS.values()):
        for way, slower in zip(WRITES, (1.0, 2.0, 3.0), strict=True):
            samples.add("write", RAW, way, {"seconds": slower * take["raw"]}, case)
        samples.add("save", "bcp", "save", {"seconds": take["bcp"], "balance": take["balance"], **of_save}, case)
        samples.add("save", "DCP", "save, 1 thread", {"seconds": 2 * take["DCP"], "state": 1e9}, case)
        samples.add("save", "DCP", "save, 2 threads", {"seconds": take["DCP"], "state": 1e9}, case)
    samples.add("first save", "bcp", "save", {"seconds": 1.5})
    samples.add("copy", RAW, "memcpy, 2 threads", {"seconds": 0.15})
    background = {"seconds": take["durable"], "blocking": take["blocking"], **of_save, **trained}
    samples.add("background", "bcp", "async", background)
    samples.add("background", "bcp", "async, lazy", background | {"blocking": take["lazy"]})
    samples.add("background", "DCP", "async, process", {"seconds": 3.0, "blocking": 0.3, "lost": 0.5, "state": 1e9})
    samples.add("background", "torch_checkpointing", "async", {"seconds": 2.1, "blocking": 0.0, "state": 1e9})
    for kind in ("cold load", "warm load"):
        samples.add(kind, RAW, "O_DIRECT", {"seconds": take["raw"]})
        samples.add(kind, "bcp", "load", {"seconds": take["bcp"], "cached": 0.0, **of_save})
        samples.add(kind, "DCP", "load", {"seconds": take["DCP"], "state": 1e9})
    for kind, way in (("save", "save"), ("warm load", "load")):
        samples.add(kind, "bcp", way, {"seconds": take["many"]}, MANY)
        samples.add(kind, "bcp", way, {"seconds": 0.1}, ONE)
    return samples


def missed(samples: Samples) -> list[str]:
    figures = Figures()
    judge(samples, figures)
    return [figure.name for figure in figures.found if figure.missed]


def test_a_run_that_reaches_all_goals() -> None:
    figures = Figures()
    judge(measured(), figures)
    assert sum(figure.goal is not None for figure in figures.found) == 20
    assert missed(measured()) == []
    assert figures.verdict(check=True) == 0


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"raw": 0.9}, ["save: share of", "load, cold: share of", "2 ranks, save: share", "4 ranks, save: share"]),
        ({"DCP": 2.0}, ["save: times faster", "load, warm: times faster"]),
        ({"blocking": 0.21}, ["background: training waits", "background: training waits, as"]),
        ({"durable": 1.1}, ["background: durable, as a part"]),
        ({"lost": 0.26}, ["background: training lost"]),
        ({"worst": 0.016}, ["background: worst step"]),
        ({"lazy": 0.006}, ["background, lazy"]),
        ({"memory": 1281.0 * MIB}, ["save: peak", "background: peak", "load: peak"]),
        ({"balance": 1.06}, ["2 ranks, save: bytes", "4 ranks, save: bytes"]),
        ({"many": 0.21}, [f"{MANY}, save", f"{MANY}, load"]),
    ],
)
def test_each_goal_is_missed_where_it_should_be(changes: Mapping[str, float], names: list[str]) -> None:
    found = missed(measured(**changes))
    assert len(found) == len(names)
    assert all(name.startswith(start) for name, start in zip(found, names, strict=True))


def test_what_was_not_measured_is_said_and_is_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    samples = measured()
    samples.taken = [one for one in samples.taken if one.library != "DCP" and one.way != "async, lazy"]
    figures = Figures()
    judge(samples, figures)
    said = [line for line in capsys.readouterr().out.splitlines() if line.endswith("not measured")]
    assert [line.split("  ")[0] for line in said] == [
        "save: times faster than DCP at its best",
        "background: training lost, as a part of DCP's process",
        "background, lazy: training waits",
        "load, warm: times faster than DCP",
        "2 ranks, save: times faster than DCP at its best",
        "4 ranks, save: times faster than DCP at its best",
    ]
    assert figures.verdict(check=True) == 0


def test_medians_are_of_a_way_and_the_best_is_the_least_of_them() -> None:
    samples = Samples()
    for seconds in (3.0, 1.0, 2.0):
        samples.add("save", "a", "slow", {"seconds": seconds})
    samples.add("save", "a", "fast", {"seconds": 1.5})
    samples.add("save", "a", "fast", {"seconds": 0.1}, "2 ranks")
    assert samples.median("save", "a", "slow") == 2.0
    assert samples.best("save", "a") == 1.5
    assert samples.best("save", "a", case="2 ranks") == 0.1
    assert samples.median("save", "a", "slow", name="cpu") is None
    assert samples.best("load", "a") is None
    assert list(samples.ways("save")) == [("a", "slow"), ("a", "fast")]


def test_the_slowest_rank_counts_and_the_rest_adds_up() -> None:
    values = combined([{"seconds": 1.0, "nbytes": 30, "budget": 5}, {"seconds": 2.0, "nbytes": 10, "budget": 5}])
    assert values == {"seconds": 2.0, "nbytes": 40, "budget": 10, "balance": 1.5}
    assert combined([{"seconds": 1.0, "nbytes": 30}]) == {"seconds": 1.0, "nbytes": 30}


def test_samples_survive_json(tmp_path: Path) -> None:
    samples = measured()
    samples.absent["torchsnapshot"] = "not installed"
    samples.write(tmp_path / "new" / "run.json", [{"name": "x"}])
    assert Samples.read(tmp_path / "new" / "run.json") == samples


def test_tables_have_a_row_for_each_way_and_dashes_for_what_is_not_known() -> None:
    written = {table.title: plain(table).splitlines() for table in tables(measured())}
    assert list(written) == [
        "The machine",
        f"Save, {SINGLE}",
        f"Background save, {SINGLE}",
        f"Load, {SINGLE}",
        *(f"Save, {case}" for case in RANKS.values()),
        "Small tensors",
    ]
    rows = {line[:20].strip(): line.split() for line in written[f"Save, {SINGLE}"][3:]}
    assert rows["bcp: save"][2:] == ["1.05", "0.95", "95", "%", "1.50", "0.50", "1.07"]
    assert rows["DCP: save, 2 threads"][4:] == ["2.20", "0.45", "45", "%", "-", "-", "-"]
    assert len({len(line) for line in written[f"Save, {SINGLE}"][3:]}) == 1


def test_a_page_gets_the_tables_between_its_marks_again_and_again(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", Figures()
    judge(measured(lost=1.0), figures)
    page.write_text(f"before\n{BEGIN}\nan earlier run\n{END}\nafter\n", "utf-8")
    put_into(page, measured(), figures.found)
    once = page.read_text("utf-8")
    put_into(page, measured(), figures.found)
    assert page.read_text("utf-8") == once
    assert once.startswith(f"before\n{BEGIN}\n")
    assert once.endswith(f"{END}\nafter\n")
    assert "an earlier run" not in once
    assert "| **bcp: save** | 1.05 |" in once
    assert "| background: training lost, as a part of DCP's process | 2 | at most 0.5 | **missed** |" in once
    page.write_text("no marks", "utf-8")
    with pytest.raises(SystemExit, match="needs one line"):
        put_into(page, measured(), figures.found)


def test_sizes_are_read_with_their_units() -> None:
    assert speed.nbytes("2GiB") == 2 << 30
    assert speed.nbytes("1.5 MB") == 1_500_000
    with pytest.raises(argparse.ArgumentTypeError, match="write 2GiB"):
        speed.nbytes("2")


def test_everybody_plays_in_the_first_round_and_some_in_all() -> None:
    single = CASES[0]
    turns = {library: [single.plays(library, number, 5) for number in range(5)] for library in LIBRARIES}
    assert all(first for first, *_ in turns.values())
    assert {library: sum(each) for library, each in turns.items()} == {
        "bcp": 5,
        "DCP": 3,
        "torch_checkpointing": 3,
        "torch.save": 2,
        "safetensors": 2,
        "torchsnapshot": 1,
        "bytecheckpoint": 1,
    }
    assert [single.plays_quickly("bcp", 1, 2), single.plays_quickly("DCP", 1, 2)] == [True, False]
    assert not any(
        case.plays(library, 0, 5) for case in CASES[1:] for library in LIBRARIES if library not in case.libraries
    )


def test_a_library_that_is_not_there_is_missing_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.speed.libraries.find_spec", lambda name: None if name == "bytecheckpoint" else 1)
    assert missing("bcp") == ""
    assert missing("bytecheckpoint") == "not installed; it asks for torch<=2.5.0"


def test_a_state_has_the_size_that_was_asked_for_and_notices_every_change() -> None:
    state = gpt(4 * MIB)
    assert state.nbytes == pytest.approx(4 * MIB, rel=0.25)
    empty = state.digest()
    state.fill()
    filled = state.digest()
    assert filled != empty
    names = [name for name, _ in state.local()]
    assert len(names) == len(set(names)) == 4 * 195
    state.update()
    assert state.digest() == filled
    next(tensor for name, tensor in state.local() if name.startswith("exp_avg_sq"))[0, 0] += 1
    assert state.digest() != filled
    state.clear()
    assert state.digest() == empty
    assert torch.equal(equal_tensors(3, 24).tensors["model"]["tensor.2"], torch.zeros(2))


def test_a_checkpoint_is_made_durable_warm_and_gone(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "data").write_bytes(os.urandom(MIB))
    (path / "empty").touch()
    disk.make_durable(path)
    disk.make_durable(path / "empty")
    disk.cool(path)
    disk.warm_up(path)
    assert disk.cached_share(path) == 1.0
    disk.remove(path)
    assert not path.exists()
    disk.remove(path)


def test_raw_writes_what_raw_reads(tmp_path: Path) -> None:
    raw = Raw(3 * MIB, tmp_path / "raw")
    possible = []
    for way in (*WRITES, *READS_COLD, READ_WARM):
        try:
            assert raw.ways[way]() > 0
            possible.append(way)
        except OSError:  # a file system without O_DIRECT
            assert way.startswith("O_DIRECT")
    assert set(possible) >= {WRITES[1], READS_COLD[1], READ_WARM}
    assert (tmp_path / "raw").stat().st_size == raw.nbytes == 3 * MIB


def test_usage_sees_memory_and_cpu_of_this_process() -> None:
    usage = Usage(os.getpid())
    before = usage.peak
    held = bytearray(os.urandom(64 * MIB))
    usage.look()
    assert usage.peak - before > 0.9 * len(held)
    assert usage.cpu > 0


@pytest.mark.dist
@pytest.mark.long
def test_a_tiny_run_measures_verifies_and_writes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, page, picture = (str(tmp_path / name) for name in ("run.json", "page.md", "picture.png"))
    Path(page).write_text(f"{BEGIN}\n{END}\n", "utf-8")
    run = ["--size", "1MiB", "--runs", "1", "--folder", str(tmp_path / "out"), "--parts", "single"]
    libraries = ["bcp", "torch.save", "bytecheckpoint"]
    monkeypatch.setattr("benchmarks.speed.libraries.find_spec", lambda name: name != "bytecheckpoint" or None)
    monkeypatch.setattr(sys, "argv", ["speed", *run, "--libraries", *libraries, "--json", found])
    assert speed.main() == 0
    samples = Samples.read(Path(found))
    assert list(samples.absent) == ["bytecheckpoint"]
    assert {one.library for one in samples.taken} == {RAW, "bcp", "torch.save"}
    assert all(one.values["seconds"] > 0 for one in samples.taken)
    assert not (tmp_path / "out" / "checkpoints").exists()
    figures = {row["name"]: row for row in json.loads(Path(found).read_text("utf-8"))["figures"]}
    assert figures["save: share of the best raw write"]["value"] > 0
    monkeypatch.setattr(sys, "argv", ["speed", "--from", found, "--markdown", page, "--picture", picture])
    assert speed.main() == 0
    assert "**bcp: load**" in Path(page).read_text("utf-8")
    assert Path(picture).stat().st_size > 10_000


@pytest.mark.dist
def test_a_library_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIBRARIES, "nobody", Listed("nobody", "torch"))  # here; the process that opens it knows nothing
    monkeypatch.setattr("benchmarks.speed.rounds.CASES", [replace(CASES[0], libraries=("nobody",))])
    said: list[str] = []
    run = Run(MIB, 2, tmp_path / "out", ["nobody"], say=said.append)
    run.part("single")
    assert run.samples.absent == {"nobody": "failed: KeyError: 'nobody'"}
    assert run.samples.taken == []
    assert sum("round" in line for line in said) == 1


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.full
def test_ranks_share_a_state_and_load_it_again(tmp_path: Path) -> None:
    run = Run(MIB, 1, tmp_path, ["bcp", "DCP"], quick=True)
    run.part("ranks")
    assert run.samples.absent == {}
    assert {(one.library, one.case) for one in run.samples.taken} == {(who, RANKS[2]) for who in (RAW, "bcp", "DCP")}
    kinds = {one.kind for one in run.samples.taken if one.library == "DCP"}
    assert kinds == {"first save", "save", "first background", "background", "cold load", "warm load"}
    assert 1.0 <= run.samples.each("save", "bcp", "save", name="balance", case=RANKS[2])[0] < 2.0
