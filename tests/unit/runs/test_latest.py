"""The newest checkpoint of a run, as a job that only reads it finds it."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import torch
from logs import captured_logs

import bcp
from bcp.format.metadata import METADATA_KEY


def states() -> dict[str, torch.nn.Module]:
    return {"model": torch.nn.Linear(3, 3)}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Return the folder of a run with checkpoints of the steps 10, 20 and 30."""
    with bcp.Run(str(tmp_path / "run"), states(), save=10) as run:
        run.resume()
        for step in (10, 20, 30):
            run.maybe_save(step)
    return tmp_path / "run"


def test_no_folder_has_no_checkpoint_and_is_not_made(tmp_path: Path) -> None:
    assert bcp.latest(tmp_path / "run") is None
    assert not (tmp_path / "run").exists()


def test_the_newest_checkpoint_loads_and_nothing_is_written(trained: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    path = bcp.latest(f"{trained}/")
    assert path == f"{trained}/step-00000030"
    assert anyio.run(bcp.alatest, trained) == path
    assert {found: found.stat().st_mtime_ns for found in trained.rglob("*")} == before
    bcp.load(path, states())


def test_an_uncommitted_checkpoint_is_passed_over(trained: Path) -> None:
    (trained / "step-00000030" / METADATA_KEY).unlink()
    (trained / "step-00000040").mkdir()
    assert bcp.latest(trained) == f"{trained}/step-00000020"


@pytest.mark.parametrize("path", ["gone/../run", "./gone/../run/", "run/step-00000030/.."])
def test_a_path_with_dots_leads_where_the_run_saves(trained: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    for place, found in ((f"{trained.parent}/{path}", f"{trained}/step-00000030"), (path, "run/step-00000030")):
        monkeypatch.chdir(trained.parent)
        with bcp.Run(place, states(), save=10) as run:
            assert run.resume() == 30
        assert bcp.latest(place) == found
        bcp.load(found, states())
    monkeypatch.chdir(trained)
    assert bcp.latest("../run") == "../run/step-00000030"


def test_marks_decide(trained: Path) -> None:
    with bcp.Run(str(trained), states(), save=10) as run:
        run.resume()
        run.mark(30, "suspect", "loss spike")
        run.mark(10, "verified")
    assert bcp.latest(trained) == f"{trained}/step-00000020"
    assert bcp.latest(trained, trust="verified") == f"{trained}/step-00000010"


def test_a_broken_ledger_hides_no_checkpoint(trained: Path) -> None:
    (trained / "run.json").write_text("{")
    with captured_logs() as lines:
        assert bcp.latest(trained) == f"{trained}/step-00000030"
    assert "marks are unknown" in lines[0]["event"]
    assert (trained / "run.json").read_text() == "{"


def test_another_word_for_trust_is_refused(trained: Path) -> None:
    with pytest.raises(bcp.InputError, match="trust='suspect': pass 'any' or 'verified'"):
        bcp.latest(trained, trust="suspect")  # type: ignore[arg-type]  # the error is tested
