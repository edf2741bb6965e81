"""torchtitan trains, is killed and stopped, and comes back, on CPU and gloo."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from host_jobs import Job

import bcp

pytestmark = pytest.mark.hosts
ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
SINGLE = Job("titan_job.py", ("train",), environment=ONE)
PAIR = Job("titan_job.py", ("train",), world_size=2)
EACH_STEP = {"interval": 1, "keep_latest_k": 2}


def run(job: Job, folder: Path, **asked: Any) -> dict[str, Any]:
    return job.run(folder, json.dumps(asked))


def steps(folder: Path) -> list[int]:
    """Return the committed steps of a job's run."""
    return [info.step for info in bcp.Run(folder / "checkpoint", {}).list() if info.is_committed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("titan")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, float]:
    """Return the losses of a run that nothing disturbs."""
    asked = {"last_save_model_only": True, "export_dtype": "bfloat16", **EACH_STEP}
    losses: dict[str, float] = run(SINGLE, folder / "undisturbed", **asked)["losses"]
    return losses


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder of a run that is killed in its save of step 4 and stopped in step 5, and what its lives say."""
    disturbed = folder / "disturbed"
    SINGLE.kill_in_save(disturbed, 4, json.dumps(EACH_STEP))
    assert steps(disturbed)[-2:] == [2, 3]
    stopped = run(SINGLE, disturbed, stop=5, interval=100, keep_latest_k=2)
    assert steps(disturbed) == [3, 5]
    last = run(SINGLE, disturbed, last_save_model_only=True, last_save_in_hf=True, snapshot="lazy", **EACH_STEP)
    assert steps(disturbed) == [5, 6]
    return disturbed, [stopped, last]


def test_a_killed_and_stopped_run_has_the_losses_of_an_undisturbed_one(
    undisturbed: dict[str, float], finished: tuple[Path, list[dict[str, Any]]]
) -> None:
    _, (stopped, last) = finished
    assert [*undisturbed] == ["1", "2", "3", "4", "5", "6"]
    assert stopped["losses"] == {step: undisturbed[step] for step in ("4", "5")}
    assert stopped["step"] == 5
    assert last["losses"] == {"6": undisturbed["6"]}


@pytest.mark.usefixtures("undisturbed")
def test_the_last_save_is_a_model_in_the_dtype_of_exports(folder: Path) -> None:
    assert steps(folder / "undisturbed") == [5, 6]
    checkpoint = folder / "undisturbed" / "checkpoint"
    with bcp.Checkpoint(checkpoint / "model-00000006") as model, bcp.Checkpoint(checkpoint / "step-00000006") as full:
        names = list(model["model"])
        assert {tensor.dtype for tensor in model["model"].values()} == {torch.bfloat16}
        name = names[0]
        assert torch.equal(model.read(name), full.read(name).bfloat16())
