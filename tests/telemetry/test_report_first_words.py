"""The first words of a report: the phase that took the time, what is unusual in a run, a path with nothing there."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import bcp
from bcp.__main__ import main
from bcp.telemetry.recording import EVENTS, RankRecord, Recording
from bcp.telemetry.store import encode


def recorded(phases: dict[str, float], stages: dict[str, float], *, time: float = 1.8e9, step: int = 1) -> Recording:
    """Return a save of one rank, whose phases follow each other; the stages are in the phase ``write``."""
    rows, start, begun = [], 0.0, 0.0
    for name, seconds in phases.items():
        rows.append(("phase", name, start, seconds))
        begun = start if name == "write" else begun
        start += seconds
    rows += [("stage", name, begun, seconds) for name, seconds in stages.items()]
    events = pa.Table.from_pylist(
        [
            {"rank": 0, "kind": kind, "name": name, "item": "part", "nbytes": 1, "start": begin, "seconds": seconds,
             "waited": 0.0, "attempt": 1, "status": "ok", "said": ""}
            for kind, name, begin, seconds in rows
        ],
        schema=EVENTS,
    )  # fmt: skip
    rank = RankRecord(rank=0, host="h", local_rank=0, started=time, figures={"seconds": start, "nbytes": 1.0})
    return Recording(
        kind="save", path="ckpt", operation="0" * 15 + str(step), step=step, run="", background=False, version="1",
        world_size=1, time=time, ranks=[rank], events=events,
    )  # fmt: skip


def stored(folder: Path, *recordings: Recording) -> Path:
    """Write recordings as saves do, one checkpoint each."""
    for recording in recordings:
        place = folder / f"step-{recording.step}" / "telemetry"
        place.mkdir(parents=True)
        stamp = f"20260131T2359{recording.step:02d}000Z"
        (place / f"save-{stamp}-{recording.operation}.arrow").write_bytes(encode(recording))
    return folder


def bottlenecks(report: bcp.Report) -> list[str]:
    return [line.strip() for line in report.text().splitlines() if line.strip().startswith("Bottleneck")]


def test_a_save_that_planned_for_most_of_its_time_blames_the_plan_and_no_stage(tmp_path: Path) -> None:
    save = recorded({"plan": 0.305, "write": 0.123, "commit": 0.130}, {"d2h": 0.008, "upload": 0.006})
    (line,) = bottlenecks(bcp.report(stored(tmp_path, save)))
    assert line == "Bottleneck: of 558 ms, phase plan took 305 ms, commit took 130 ms, write took 123 ms."


def test_a_save_whose_graph_took_most_of_its_time_blames_a_stage_after_the_phase(tmp_path: Path) -> None:
    save = recorded({"plan": 0.1, "write": 2.0, "commit": 0.1}, {"d2h": 0.1, "upload": 1.9})
    phase, stage = bottlenecks(bcp.report(stored(tmp_path, save)))
    assert phase == "Bottleneck: of 2.2 s, phase write took 2 s."
    assert stage.startswith("Bottleneck of the write: upload had work for 100% of the 1.9 s")


def page_data(html: str) -> dict[str, Any]:
    packed = re.search(r'id="bcp-data">([^<]+)<', html)
    assert packed is not None
    data = gzip.decompress(base64.b64decode(packed[1]))
    found: dict[str, Any] = json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])
    return found


def test_the_page_begins_with_what_is_unusual_in_the_run(tmp_path: Path) -> None:
    saves = [recorded({"write": 0.1, "commit": 0.1}, {}, time=1.8e9 + step, step=step) for step in (1, 2, 3)]
    slow = recorded({"write": 2.6, "commit": 0.2}, {}, time=1.8e9 + 4, step=4)
    load = replace(saves[0], kind="load", operation="0" * 15 + "5", time=1.8e9 + 5, step=5)
    report = bcp.report(stored(tmp_path, *saves, slow, load))
    report.html(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    highlights = page_data(html)["highlights"]
    assert highlights[0] == "save: seconds of the newest one is 14 times the median of those before."
    assert any("save of step 4" in line and "phase write took 2.6 s" in line for line in highlights)
    places = [html.index(f'id="{name}"') for name in ("highlights", "failures", "findings", "tiles", "heat-chart")]
    assert places == sorted(places)


@pytest.mark.parametrize("other", [False, True])
def test_a_path_with_nothing_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, other: bool
) -> None:
    wrong = tmp_path / "wrong"
    if other:
        (wrong / "docs").mkdir(parents=True)
        (wrong / "docs" / "notes.txt").write_text("a user's own")
    with pytest.raises(bcp.NotACheckpointError, match=f"nothing of bcp at {wrong}: neither a checkpoint nor a run"):
        bcp.report(wrong)
    assert main(["report", str(wrong)]) == 2
    printed = capsys.readouterr()
    assert "check the path" in printed.err
    assert printed.out == ""
    assert wrong.exists() == other


def test_a_checkpoint_without_recordings_is_none(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(2)}}, options=bcp.SaveOptions(record=False))
    assert "recordings of saves: 0" in bcp.report(tmp_path).text()
