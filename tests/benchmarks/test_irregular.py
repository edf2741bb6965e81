from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import irregular

pytestmark = [pytest.mark.dist, pytest.mark.long]


@pytest.mark.parametrize(
    "framework", [pytest.param("FSDP1, use_orig_params=False", marks=pytest.mark.full), "Megatron-LM"]
)
def test_a_quick_run_compares_both_ways(framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {name: job for name, job in irregular.JOBS.items() if name.startswith(framework)}
    assert len(jobs) == 1
    monkeypatch.setattr(irregular, "JOBS", jobs)
    monkeypatch.setattr(sys, "argv", ["irregular", "--quick", "--json", str(tmp_path / "figures.json")])
    assert irregular.main() == 0
    official, planned, save, part = json.loads((tmp_path / "figures.json").read_text())
    assert min(official["value"], planned["value"], save["value"]) > 0
    assert part["value"] == pytest.approx(planned["value"] / official["value"])
    assert part["goal"] == 0.05
