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
    """Return the folder of a run that is killed in a save, then stopped, then finished, and what its lives say."""
    disturbed = folder / "disturbed"
    SINGLE.kill_in_save(disturbed, 4, json.dumps(EACH_STEP))
    assert steps(disturbed)[-2:] == [2, 3]
    stopped = run(SINGLE, disturbed, stop=4, interval=100, keep_latest_k=2)
    assert steps(disturbed) == [3, stopped["step"]]
    last = run(SINGLE, disturbed, last_save_model_only=True, last_save_in_hf=True, snapshot="lazy", **EACH_STEP)
    assert steps(disturbed) == [5, 6]
    return disturbed, [stopped, last]


def test_a_killed_and_stopped_run_has_the_losses_of_an_undisturbed_one(
    undisturbed: dict[str, float], finished: tuple[Path, list[dict[str, Any]]]
) -> None:
    _, (stopped, last) = finished
    assert [*undisturbed] == ["1", "2", "3", "4", "5", "6"]
    assert stopped["step"] in (4, 5)  # a signal within a step may end the next one
    seen = stopped["losses"] | last["losses"]
    assert len(stopped["losses"]) + len(last["losses"]) == 3
    assert seen == {step: undisturbed[step] for step in ("4", "5", "6")}


@pytest.mark.usefixtures("undisturbed")
def test_the_last_save_is_a_model_in_the_dtype_of_exports(folder: Path) -> None:
    assert steps(folder / "undisturbed") == [5, 6]
    checkpoint = folder / "undisturbed" / "checkpoint"
    with bcp.Checkpoint(checkpoint / "model-00000006") as model, bcp.Checkpoint(checkpoint / "step-00000006") as full:
        assert model.kinds == ("model",)
        assert model.names() == full.names()
        for name in model.names():
            assert torch.equal(model.read(name), full.read(name).bfloat16())


@pytest.fixture(scope="module")
def managed(folder: Path, finished: tuple[Path, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what managers of one trainer have loaded, and refused."""
    managers = Job("titan_job.py", ("managers",), environment=ONE)
    return run(managers, folder / "managed", finished=str(finished[0] / "checkpoint"))


def test_managers_load_as_their_config_says(managed: dict[str, Any]) -> None:
    loads = managed["loads"]
    _, weights, _, _ = loads["load_only"]
    assert weights > 1.0
    assert loads["load_only"] == loads["everything"] == [True, weights, 6, [6.0]]
    assert loads["load_step"][0] is True
    assert loads["load_step"][1] != weights
    assert loads["load_step"][2:] == [5, [5.0]]
    assert loads["hf"] == loads["model"] == loads["theirs"] == [True, weights, 0, []]
    assert loads["excluded"] == [True, weights, 0, []]
    assert loads["seed"][0] is True
    assert loads["seed"][1] == pytest.approx(weights, rel=1e-2)  # of bfloat16
    assert loads["seed"][2:] == [0, []]
    assert loads["new"] == [False, 0.0, 0, []]


def test_managers_join_no_url_to_the_folder_of_dumps(managed: dict[str, Any]) -> None:
    assert managed["url"] == "s3://bucket/run"


REFUSED = (
    "create_seed_checkpoint",
    "exclude_from_loading",
    "initial_load_in_hf",
    "initial_load_in_hf_quantized",
    "last_save_in_hf",
    "load_step",
    "tolerate",
)


@pytest.mark.parametrize("name", REFUSED)
def test_managers_refuse_fields_by_name(managed: dict[str, Any], name: str) -> None:
    assert managed["refusals"][name].startswith(f"checkpoint.{name}=")


def test_managers_need_a_folder_of_hugging_face(managed: dict[str, Any]) -> None:
    assert managed["refusals"]["path"].startswith("checkpoint.initial_load_in_hf=")


@pytest.mark.parametrize("name", ["hook", "parameters", "field", "trainer"])
def test_managers_refuse_a_torchtitan_of_other_hooks(managed: dict[str, Any], name: str) -> None:
    assert "torchtitan 0." in managed["seams"][name]


# -- two ranks -------------------------------------------------------------------------------------


def test_two_ranks_that_are_killed_come_back_on_any_parallelism(folder: Path) -> None:
    killed, asked = folder / "pair", {"any_readers": True, **EACH_STEP}
    losses = run(PAIR, folder / "pair-undisturbed", **asked)["losses"]
    rest = {step: losses[step] for step in ("4", "5", "6")}
    PAIR.kill_in_save(killed, 4, json.dumps(asked))
    for copy in ("one", "tensor"):
        shutil.copytree(killed, folder / copy)
    assert run(PAIR, killed, **asked)["losses"] == rest
    assert run(SINGLE, folder / "one", **asked)["losses"] == rest
    stopped = run(PAIR, folder / "tensor", tensor_parallel=2, steps=1000, stop=6, any_readers=True, interval=100)
    first = {step: stopped["losses"][step] for step in rest}
    assert first == pytest.approx(rest, rel=1e-6)  # halves of a matrix product are summed in another order
    assert 6 <= stopped["step"] < 1000
    assert steps(folder / "tensor")[-1] == stopped["step"]


def test_the_example_goes_on_with_another_number_of_readers(folder: Path) -> None:
    one = run(Job("titan_job.py", ("example",), environment=ONE), folder / "example", steps=4)
    assert one == {"step": 4, "tokens": 4 * 2 * 32, "windows": 4 * 2}
    two = run(Job("titan_job.py", ("example",), world_size=2), folder / "example", steps=6)
    assert two == {"step": 6, "tokens": 6 * 2 * 32, "windows": 4 * 2 + 2 * 4}
    assert steps(folder / "example") == [2, 4, 6]
    assert (folder / "example" / "checkpoint" / "model-00000006").is_dir()
