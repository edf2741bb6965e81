"""The benchmark of the command line measures what it says it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_a_small_run_measures_every_command(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.tools",
        "--quick",
        "--gib",
        "0.03",
        "--json",
        str(tmp_path / "figures.json"),
    ]
    subprocess.run([*command, "--folder", str(tmp_path)], check=True)  # noqa: S603 -- our own
    figures = {figure["name"]: figure["value"] for figure in json.loads((tmp_path / "figures.json").read_text())}
    names = ["verify", "cp", "export safetensors", "export hf", "export torch", "export dcp"]
    assert all(figures[f"{name}: speed / raw"] > 0 for name in names)
    assert all(figures[f"{name}: memory above imports"] < 1 for name in names)
    assert figures["diff: speed"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
