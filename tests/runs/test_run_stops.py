"""Jobs of torchrun are asked to stop in every situation, and come back bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_jobs
from by_torchrun import torchrun

from bcp.format.metadata import METADATA_KEY

STEPS = 45
AT = {situation: 21 if situation == "save" else 25 for situation in run_jobs.SITUATIONS}
"""The step in which the signal comes. A save begins behind step 20."""
FEW = 6
"""Most steps that a job goes on after the signal."""


def job(ranks: int, out: Path, *words: object) -> dict[str, Any]:
    """Run the job to its end, and return its outcome."""
    out.mkdir(exist_ok=True)
    done = torchrun(ranks, run_jobs.__file__, str(out), str(STEPS), *map(str, words))
    assert (out / "outcome.json").exists(), done.stdout + done.stderr
    outcome: dict[str, Any] = json.loads((out / "outcome.json").read_text())
    (out / "outcome.json").unlink()
    return outcome


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    digests: dict[int, str] = {}

    def digest(ranks: int) -> str:
        if ranks not in digests:
            outcome = job(ranks, tmp_path_factory.mktemp("undisturbed"))
            assert (outcome["resumed"], outcome["last"], outcome["stopped"]) == (0, STEPS, False)
            digests[ranks] = outcome["digest"]
        return digests[ranks]

    return digest


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("situation", run_jobs.SITUATIONS)
def test_a_job_that_is_asked_to_stop_comes_back_bit_by_bit(
    situation: str, ranks: int, tmp_path: Path, undisturbed: Callable[[int], str]
) -> None:
    stopped = job(ranks, tmp_path / "run", situation, AT[situation])
    assert stopped["stopped"]
    assert AT[situation] <= stopped["last"] <= AT[situation] + FEW
    assert (tmp_path / "run" / f"step-{stopped['last']:08d}" / METADATA_KEY).exists()
    resumed = job(ranks, tmp_path / "run")
    assert (resumed["resumed"], resumed["last"]) == (stopped["last"], STEPS)
    assert resumed["digest"] == undisturbed(ranks)
