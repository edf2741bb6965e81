"""The benchmark of publications measures what it says it measures, and its kills are judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bcp
from benchmarks.publish.kills import weights
from benchmarks.publish.sizes import check


@pytest.mark.long
def test_a_small_run_of_publications(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"w": torch.randn(300, 40) * 0.04, "ids": torch.arange(3)}, tmp_path / "model" / "model.safetensors")
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.publish", "--quick", "--kills", "4", "--json", str(out)]
    subprocess.run([*command, "--model", str(tmp_path / "model")], check=True)  # noqa: S603 -- our own
    figures = {figure["name"]: figure["value"] for figure in json.loads(out.read_text())}
    assert 0 < figures["bytes of a step, of the bf16 bytes; mean"] < 100
    assert figures["kills of a process at work"] == 4
    assert {figures[f"kills of a {what}"] for what in ("publisher", "subscriber", "rank")} == {1, 2}
    assert figures["publish_async blocks, calls and steps, to a lazy save"] > 0
    assert figures["versions"] >= 1
    assert figures["versions lost, though their call had returned"] == 0


def test_other_weights_of_a_publication_are_noticed(tmp_path: Path) -> None:
    bcp.publish(weights(2), tmp_path, 1)
    bcp.Subscriber(tmp_path, tmp_path / "local").pull()
    check(tmp_path / "local", weights(2))
    with pytest.raises(RuntimeError, match="12 tensors differ from those of the run, as w0"):
        check(tmp_path / "local", weights(3))
