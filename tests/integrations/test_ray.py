"""Trainings of Ray Train lose a worker in a save, a node and a checkpoint; their losses are those of a whole one."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from typing import Any

import pytest
from host_jobs import Job

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(3600)]
pytest.importorskip("ray")

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process of its own
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how often Ray looks after its workers
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1200",  # a process begins with the import of torch
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "1200",
}
TRAININGS = Job("ray_job.py", environment=ENVIRONMENT, hang_seconds=1800.0)
EXAMPLE = Job("../../examples/integrations/with_ray.py", environment=ENVIRONMENT, hang_seconds=1800.0)


def later(losses: dict[str, float], after: int) -> dict[str, float]:
    return {step: loss for step, loss in losses.items() if int(step) > after}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder and the result of a training that has lost a worker in its save of step 8."""
    folder = tmp_path_factory.mktemp("ray") / "results"
    return folder, TRAININGS.run(folder, "killed")["killed"]


@pytest.fixture(scope="module")
def whole(trained):
    """Return the losses of a loop without bcp and without a failure."""
    return json.loads((trained[0] / "whole.json").read_text())


def test_a_worker_killed_in_a_save_is_restarted_by_ray_behind_the_newest_checkpoint(trained, whole):
    folder, killed = trained
    assert (folder / "killed" / "died").exists()
    assert (killed["resumed"], killed["passed_over"]) == (4, 1)  # 8 is not committed
    assert killed["losses"] == later(whole, 4)
    assert killed["reported"] == [4, 8, 12]
    assert killed["metrics"] == {"step": 12, "loss": whole["12"]}
    assert killed["checkpoint"] == killed["latest"] == f"{folder}/killed/bcp/step-00000012"
    folders = sorted(path.name for path in (folder / "killed" / "bcp").glob("step-*"))
    assert folders == ["step-00000008", "step-00000012"]  # keep=2; Ray has a pointer of step 4 nevertheless


@pytest.fixture(scope="module")
def others(trained, tmp_path_factory):
    """Return results of further trainings, and of what is refused."""
    folder = shutil.copytree(trained[0], tmp_path_factory.mktemp("ray") / "results")
    return folder, TRAININGS.run(folder, "one", "drained", "refused")


@pytest.mark.long
def test_one_worker_goes_on_for_two_and_passes_over_a_damaged_checkpoint(whole, others):
    folder, results = others
    one: dict[str, Any] = results["one"]
    assert (one["resumed"], one["passed_over"]) == (8, 1)
    assert one["losses"] == pytest.approx(later(whole, 8), rel=1e-5)  # one rank adds up in another order
    assert one["reported"] == [4, 8, 12, 8, 12]
    assert one["checkpoint"] == f"{folder}/killed/bcp/step-00000012"


@pytest.mark.long
def test_a_drained_node_ends_training_behind_a_commit_and_ray_restarts_it(whole, others):
    folder, results = others
    drained = results["drained"]
    stop = drained["resumed"]
    assert 5 <= stop < 12
    assert drained["losses"] == later(whole, stop)
    assert stop in drained["reported"]
    assert drained["checkpoint"] == f"{folder}/elsewhere/step-00000012"


@pytest.mark.long
def test_what_cannot_be_obeyed_is_refused_by_name(others):
    words = others[1]["refused"]
    expected = [
        "CheckpointConfig(num_to_keep=...) does not go with bcp: pass keep=... to run()",
        "torch.distributed with 1 of 2 workers does not go with bcp: use TorchTrainer",
        "path='folder' does not go with bcp: workers run in folders of their own",
        "call the method without 'a'",
        "RunConfig(storage_path='...?...') does not go with bcp: pass path=... to run()",
        "has no attribute 'get_train_context' (docs/integrations/ray.md: calls, versions)",
        "TrainContext has not been initialized",
        "points to no checkpoint of bcp",
    ]
    assert len(words) == len(expected)
    for found, part in zip(words, expected, strict=True):
        assert part in found


@pytest.mark.long
def test_the_example_trains_and_resumes(tmp_path):
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place:  # sockets need a short path
        example = replace(EXAMPLE, environment={**ENVIRONMENT, "RAY_TMPDIR": place})
        assert example.run(tmp_path / "results", "6") == {"resumed": 0, "step": 6, "loads": 5}
        assert example.run(tmp_path / "results", "10") == {"resumed": 5, "step": 10, "loads": 10}
