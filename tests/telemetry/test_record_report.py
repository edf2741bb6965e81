"""Reports of checkpoints and runs: in Python, as text, as JSON and on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bcp
from bcp.__main__ import main
from bcp.backends import MemoryBackend
from bcp.telemetry.store import decode, encode

MIB = 1 << 20


def state() -> dict[str, Any]:
    return {"model": {"w": torch.ones(MIB // 4)}}


def failing(graph: Any) -> Any:
    async def fail(_: object) -> object:
        raise ValueError("boom")

    return graph.after("d2h", bcp.extend.Stage("mine", fail))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of a run, of which the second failed."""
    folder = tmp_path_factory.mktemp("run")
    bcp.save(folder / "step-100", state())
    with pytest.raises(bcp.StageError):
        bcp.save(folder / "step-200", state(), options=bcp.SaveOptions(edit=failing))
    bcp.save(folder / "step-300", state(), async_checkpoint=True).wait()
    bcp.load(folder / "step-300", state())
    return folder


def test_a_run_is_reported_newest_last_and_a_checkpoint_alone(run: Path) -> None:
    report = bcp.report(run)
    assert [(each.kind, each.step, bool(each.failures)) for each in report.recordings] == [
        ("save", 100, False),
        ("save", 200, True),
        ("save", 300, False),
        ("load", 300, False),
    ]
    assert [each.step for each in bcp.report(run, last=2).recordings] == [300, 300]
    assert [each.kind for each in bcp.report(run / "step-300").recordings] == ["save", "load"]
    assert [summary.step for summary in report.summaries] == [100, 200, 300, 300]
    assert {(trend.kind, trend.figure) for trend in report.trends} >= {("save", "seconds")}
    assert not report.unreadable


def test_roles_and_memory_are_reported(tmp_path: Path) -> None:
    bcp.save(tmp_path, state(), role="actor")
    bcp.save(tmp_path, state(), role="critic")
    assert len(bcp.report(tmp_path).recordings) == 2
    try:
        backend = MemoryBackend("reported")
        bcp.save(backend, state())
        assert len(bcp.report(backend).recordings) == len(bcp.report("memory://reported").recordings) == 1
    finally:
        MemoryBackend.forget("reported")


def test_the_text_begins_with_failures(run: Path) -> None:
    head, _, failure, *others = bcp.report(run).text().splitlines()
    assert head == f"{run}: recordings of saves: 2, of loads: 1, of failures: 1"
    assert failure.startswith("FAILED save of step 200, ")
    assert failure.endswith("stage mine, on model part 0: w: ValueError: boom")
    text = "\n".join(others)
    for words in ("tensors: w", "Bottleneck: ", "upload", "put_if", "save of step 300", "load of step 300", "commit"):
        assert words in text


def test_the_findings_are_json(run: Path) -> None:
    data = json.loads(json.dumps(bcp.report(run).data()))
    assert [each["step"] for each in data["summaries"]] == [100, 200, 300, 300]
    assert data["summaries"][1]["failures"][0]["stage"] == "mine"
    assert data["summaries"][2]["blocking"] <= data["summaries"][2]["seconds"]


def test_recordings_that_cannot_be_read_are_listed(run: Path, tmp_path: Path) -> None:
    bcp.save(tmp_path, state())
    (good,) = (tmp_path / "telemetry").iterdir()
    bad = good.with_name("load-20300101T000000000Z-0123456789abcdef.arrow")
    bad.write_bytes(good.read_bytes()[:-7])
    (tmp_path / "telemetry" / "notes.txt").write_text("a user's own")
    report = bcp.report(tmp_path)
    assert len(report.recordings) == 1
    assert list(report.unreadable) == [f"telemetry/{bad.name}"]
    assert "Recordings that cannot be read" in report.text()
    assert run


def test_a_forged_name_commands_no_terminal(tmp_path: Path) -> None:
    bcp.save(tmp_path, state())
    (file,) = (tmp_path / "telemetry").iterdir()
    recording = decode(file.read_bytes(), "x")
    rows = [{**row, "name": f"\x1b[2J{row['name']}\r\n"} for row in recording.events.to_pylist()]
    forged = replace(recording, events=type(recording.events).from_pylist(rows, schema=recording.events.schema))
    file.write_bytes(encode(forged))
    text = bcp.report(tmp_path).text()
    assert "[2Jupload" in text
    assert "\x1b" not in text
    assert "\r" not in text


def test_the_command_prints_text_or_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == bcp.report(run).text()
    assert main(["report", str(run / "step-100"), "--json"]) == 0
    assert [each["step"] for each in json.loads(capsys.readouterr().out)["summaries"]] == [100]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "saves: 0, of loads: 0, of failures: 0" in capsys.readouterr().out
    assert main(["report", "nowhere://x"]) == 2
    assert "bcp report: 'nowhere://x': unknown scheme" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--perfetto", str(tmp_path / "t.json")]) == 2
    assert "there are no recordings below" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--last", "0"]) == 2


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_gets_the_same_with_and_without_rich(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, rich: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["report", str(run)]) == 0
    out, found = capsys.readouterr().out, bcp.report(run)
    words = [line.strip() for line in found.text().splitlines() if line.startswith(("FAILED", "  Bottle"))]
    assert words
    assert all(line in out for line in words)
    tables = [[block.columns, *block.rows] for block in found.blocks if block.rows]
    assert tables
    shown = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines()]
    assert [row for rows in tables for row in rows if " ".join(row).split() not in shown] == []


def test_the_command_runs_as_a_process(run: Path) -> None:
    done = subprocess.run(  # noqa: S603 -- our own program
        [sys.executable, "-m", "bcp", "report", str(run)], capture_output=True, text=True, check=True
    )
    assert done.stdout == bcp.report(run).text()
    assert done.stderr == ""
