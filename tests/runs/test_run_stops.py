"""Jobs of torchrun are asked to stop in every situation, one after the other, and come back bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_jobs
from by_torchrun import torchrun

from bcp.format.metadata import METADATA_KEY

STEPS = 150
FEW = 9
"""Most steps that a job goes on after the signal; together they take almost a minute."""


def job(ranks: int, out: Path, *words: str) -> dict[str, Any]:
    """Run a job to its end, and return its words and the program's output."""
    done = torchrun(ranks, run_jobs.__file__, str(out), str(STEPS), *words)
    words_of_job: dict[str, Any] = {"output": done.stdout + done.stderr}
    for name in ("asked.json", "outcome.json"):
        if (out / name).exists():
            words_of_job |= json.loads((out / name).read_text())
            (out / name).unlink()
    return words_of_job


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(4000)  # eight jobs of torchrun, one after the other
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.kills)])
def test_jobs_that_are_asked_to_stop_come_back_bit_by_bit(ranks: int, tmp_path: Path) -> None:
    last = 0
    for situation in run_jobs.SITUATIONS:
        job_of = job(ranks, tmp_path, situation)
        assert job_of.get("resumed") == last, f"{situation}: {job_of}"
        if situation == "hang":  # it never comes to the end of the step; the step before it was held in memory
            assert "last" not in job_of
            last = job_of["at"] - 1
        else:
            assert job_of.get("stopped"), f"{situation}: {job_of}"
            last = job_of["last"]
            assert job_of["at"] <= last <= job_of["at"] + FEW, situation
        assert (tmp_path / f"step-{last:08d}" / METADATA_KEY).exists(), f"{situation}: {job_of}"
    ended = job(ranks, tmp_path)
    assert (ended["resumed"], ended["last"], ended["stopped"]) == (last, STEPS, False)
    assert ended["digest"] == ended["undisturbed"]
