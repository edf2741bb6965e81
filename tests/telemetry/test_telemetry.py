from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import bcp
from bcp.events import Event, StageEvent
from bcp.telemetry.watch import Watch


def test_a_watch_knows_the_wall_seconds_of_each_stage() -> None:
    seen: list[Event] = []
    watch = Watch("save", "run", observe=seen.append)
    for stage, started, ended in [("d2h", 1.0, 2.0), ("upload", 1.5, 4.0), ("d2h", 1.5, 2.5)]:
        watch(StageEvent(stage, "part", 10, started, ended))
    assert watch.stage_seconds == {"d2h": 1.5, "upload": 2.5}
    assert seen == watch.events
    assert len(seen) == 3


def test_progress_is_drawn_on_standard_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"w": torch.ones(1000)}}
    bcp.save(tmp_path, state, progress=True)
    bcp.load(tmp_path, state, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "save" in err
    assert "load" in err


def test_without_rich_the_extra_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(bcp.MissingExtraError, match=r"pip install 'bcp-checkpoint\[cli\]'"):
        bcp.save(tmp_path / "c", {"model": {"w": torch.ones(3)}}, progress=True)
    assert not (tmp_path / "c").exists()


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    events: list[Event] = []
    options = bcp.SaveOptions(observe=events.append, part_bytes=1 << 20)
    state = {"model": {"w": torch.zeros(1 << 20)}, "extra_states": {"step": 1}}
    report = bcp.save(tmp_path, state, options=options)
    on_disk = [path for kind in ("model", "extra_states") for path in (tmp_path / kind).iterdir()]
    assert sorted(report.files) == sorted(str(path.relative_to(tmp_path)) for path in on_disk)
    assert report.nbytes == sum(path.stat().st_size for path in on_disk)
    assert report.state_nbytes > 4 << 20
    assert list(report.stage_seconds) == ["d2h", "serialize", "upload", "checksum"]
    assert 0 < report.blocking_seconds <= report.seconds
    assert report.throughput == pytest.approx(report.nbytes / report.seconds)
    assert (
        sum(event.nbytes for event in events if isinstance(event, StageEvent) and event.stage == "upload")
        == report.nbytes
    )
    loaded = bcp.load(tmp_path, {"model": {"w": torch.ones(1 << 20)}})
    assert loaded.nbytes == 4 << 20
    assert list(loaded.stage_seconds) == ["read", "deserialize", "h2d", "exchange"]
