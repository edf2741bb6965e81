from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from forked import run_forked
from servers.chromium import browser, tab

import bcp

ROOT = Path(__file__).parents[2]
ONE_PROCESS = [
    "quickstart.py",
    "async_harness.py",
    "custom_stage.py",
    "codec_zstd.py",
    "partial_load.py",
    "quantised_moments.py",
]
LAUNCHED = {"gpt.py", "train_gpt.py", "demo.py", "demo_plot.py"}  # test_demo below runs all four
OF_RANKS = {"local_ranks.py", "dataloader_reshard.py", "data_rl.py", "lose_a_node.py"}


def run(script: str, *args: str, cwd: Path) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, ROOT / "examples" / script, *args]
    done = run_forked(command, cwd=cwd, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_example_is_left_out() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {*ONE_PROCESS, *LAUNCHED, *OF_RANKS}


@pytest.mark.parametrize("script", ONE_PROCESS)
def test_example(script: str, tmp_path: Path) -> None:
    assert run(script, cwd=tmp_path).strip()


@pytest.mark.dist
def test_a_node_is_lost(tmp_path: Path) -> None:
    out = run("lose_a_node.py", cwd=tmp_path)
    assert "memory of 3 hosts, 0 bytes from storage" in out
    assert "are those of an undisturbed training" in out


@pytest.mark.long
@pytest.mark.dist
def test_readers_of_data_come_and_go(tmp_path: Path) -> None:
    assert "2400 samples: 0 lost, 0 fed twice" in run("dataloader_reshard.py", cwd=tmp_path)


@pytest.mark.dist
@pytest.mark.long
def test_a_killed_loop_of_rollouts(tmp_path: Path) -> None:
    assert "5 kills, 736 prompts: 0 lost, 0 trained twice" in run("data_rl.py", cwd=tmp_path)


@pytest.mark.long
def test_two_worlds_are_killed(tmp_path: Path) -> None:
    """The losses after the kill are those of a run that nobody has killed."""
    last = json.loads(run("integrations/with_rl.py", "killed", "14", cwd=tmp_path).rpartition("RESULT ")[2])
    assert last["resumed"] == 14 - len(last["losses"])
    assert last["resumed"] in (8, 12)  # the save of step 12 may have committed
    code = "import json, sys, with_rl; print('RESULT', json.dumps(with_rl.drive('whole', 14)))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples" / "integrations")])
    done = run_forked([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.rpartition("RESULT ")[2])[last["resumed"] :] == last["losses"]


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.timeout(3000)  # alone it takes 80 s, on a busy machine many times as long
def test_demo(tmp_path: Path) -> None:
    """Five torchrun jobs, a few steps each; the demo itself asserts that losses and samples are as they should be."""
    output = run("demo.py", "--steps", "8", "--save-every", "2", cwd=tmp_path)
    assert "(a) is bit-identical" in output
    assert "samples of 8 steps once: 0 lost, 0 fed twice" in output
    assert (tmp_path / "demo-out" / "loss.png").stat().st_size > 0
    assert_shows(tmp_path / "demo-out" / "report.html", tmp_path / "demo-out" / "resumed-2x2" / "checkpoints")


def assert_shows(page: Path, run: Path) -> None:
    """Compare the heat map of a page, in a browser, with the newest recording of the run."""
    recording = bcp.report(run).recordings[-1]
    events = recording.events.filter((pc.field("kind") == "stage") & (pc.field("name") == "upload"))
    rows = events.select(["rank", "start", "seconds", "nbytes"]).to_pylist()
    with browser() as address, tab(address, width=1280, dark=False) as shown:
        shown.open(page)
        shown.choose("heat-place", "stage:upload")
        for metric, figure in {"seconds": wall, "bytes": lambda own: sum(row["nbytes"] for row in own)}.items():
            shown.choose("heat-metric", metric)
            cells = {cell["rank"]: cell["value"] for cell in shown.run("bcpReport.heat()")["cells"]}
            wanted = {rank: figure([row for row in rows if row["rank"] == rank]) for rank in range(4)}
            assert cells == pytest.approx(wanted, rel=1e-5)
        assert shown.complaints() == []


def wall(rows: list[dict[str, Any]]) -> float:
    return float(max(row["start"] + row["seconds"] for row in rows) - min(row["start"] for row in rows))
