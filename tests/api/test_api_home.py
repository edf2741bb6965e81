"""A ``~`` in a path is the home in every call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bcp
from bcp.__main__ import main


def states() -> dict[str, Any]:
    return {"model": {"w": torch.ones(3)}}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home that is not the current directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("kind", [str, Path])
def test_saves_loads_and_reports_mean_the_home(home: Path, capsys: pytest.CaptureFixture[str], kind: type[Any]) -> None:
    assert bcp.save(kind("~/ckpt"), states()).path == f"{home}/ckpt"
    assert bcp.load(kind("~/ckpt"), states()).path == f"{home}/ckpt"
    assert bcp.report(kind("~/ckpt")).path == f"{home}/ckpt"
    assert bcp.report(home / "ckpt").recordings[0].path == f"{home}/ckpt"
    assert main(["report", "~/ckpt", "--perfetto", "~/trace.json"]) == 0
    assert f"{home}/ckpt: recordings of saves: 1" in capsys.readouterr().out
    assert (home / "trace.json").exists()
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("kind", [str, Path])
def test_a_run_and_its_readers_mean_the_home(home: Path, kind: type[Any]) -> None:
    with bcp.Run(kind("~/run"), states(), save=1) as run:
        assert run.resume() == 0
        run.maybe_save(1).wait()
    assert (home / "run" / "run.json").exists()
    assert bcp.latest(kind("~/run")) == f"{home}/run/step-00000001"
    with bcp.Run(home / "run", states(), save=1) as run:
        assert run.resume() == 1
    assert not list(Path.cwd().iterdir())


def test_the_home_of_nobody_is_refused(home: Path) -> None:
    for call in (lambda path: bcp.save(path, states()), lambda path: bcp.Run(path, states()), bcp.latest, bcp.report):
        with pytest.raises(bcp.InputError, match="~nobody-of-that-name"):
            call("~nobody-of-that-name/run")
    assert not home.exists()
