"""Jobs of the Hugging Face Trainer that are killed in a save, and resume on the same and on another parallelism."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from host_jobs import Job

import bcp
from bcp.integrations.transformers import attach

pytestmark = pytest.mark.hosts

PLAIN = Job("transformers_job.py", ("plain",))
PLAIN_STILL = Job("transformers_job.py", ("still",))
DDP = Job("transformers_job.py", ("still",), world_size=2)
FSDP2 = Job("transformers_job.py", ("still+fsdp2",), world_size=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an uninterrupted job on one rank reports."""
    return PLAIN.run(tmp_path_factory.mktemp("whole") / "run")


def steps(folder: Path) -> list[int]:
    return [info.step for info in bcp.Run(folder / "bcp", {}).list() if info.is_committed]


def test_a_killed_job_goes_on_bit_for_bit(whole: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    PLAIN.kill_in_save(folder, 2)
    assert steps(folder) == [4]
    again = PLAIN.run(folder, "resume")
    assert again["resumed"] == 4
    assert again["losses"] == whole["losses"]  # the log of the steps before is in the checkpoint
    assert again["final"] == whole["final"]
    assert steps(folder) == [4, 8, 12]


def test_a_job_that_is_asked_to_stop_saves_its_last_step(whole: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped = PLAIN.run(folder, "stop")
    last = stopped["losses"][-1][0]
    assert steps(folder) == [4, last]
    again = PLAIN.run(folder, "resume")
    assert again["resumed"] == last
    assert again["losses"] == whole["losses"]


@pytest.mark.long
def test_a_stop_saves_its_step_also_if_only_the_best_are_saved(tmp_path: Path) -> None:
    job = Job("transformers_job.py", ("only-best",))
    stopped = job.run(tmp_path / "run", "stop")
    last = stopped["losses"][-1][0]
    assert stopped["evaluations"][-1][0] < last
    assert steps(tmp_path / "run")[-1] == last


def test_a_damaged_checkpoint_is_passed_over_with_its_state(whole: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    PLAIN.kill_in_save(folder, 3)
    (file,) = (folder / "bcp/step-00000008/model").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    again = PLAIN.run(folder, "resume")
    assert again["resumed"] == 4
    assert again["passed_over"] == [12, 8]  # 12 was never committed
    assert again["losses"] == whole["losses"]


@pytest.mark.long
def test_another_start_in_the_folder_begins_anew(whole: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    PLAIN.kill_in_save(folder, 3)
    again = PLAIN.run(folder)
    assert again["resumed"] == 0
    assert again["losses"] == whole["losses"]


@pytest.mark.parametrize("mode", [pytest.param("peft", marks=pytest.mark.long), "sft+peft"])
def test_adapters_alone_are_saved(mode: str, tmp_path: Path) -> None:
    job = Job("transformers_job.py", (mode,))
    whole = job.run(tmp_path / "whole")
    job.kill_in_save(tmp_path / "run", 2)
    again = job.run(tmp_path / "run", "resume")
    assert again["losses"] == whole["losses"]
    assert again["kind"] == ("BcpSFTTrainer" if "sft" in mode else "BcpTrainer")
    names = bcp.Checkpoint(tmp_path / "run/bcp/step-00000012").names(kind="model")
    assert len(names) == 8
    assert all("lora_" in name for name in names)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    job = Job("transformers_job.py", ("best",))
    whole = job.run(tmp_path / "whole")
    job.kill_in_save(tmp_path / "run", 3)
    again = job.run(tmp_path / "run", "resume")
    for name in ("losses", "evaluations", "final"):
        assert again[name] == whole[name]
    best = min(whole["evaluations"], key=lambda each: each[1])[0]
    assert steps(tmp_path / "run") == sorted({best, 12})
    with (tmp_path / "run/bcp/run.json").open() as file:
        entries = json.load(file)["checkpoints"]
    assert {entry["step"]: entry["metrics"]["eval_loss"] for entry in entries}[best] == min(
        loss for _, loss in whole["evaluations"]
    )


def test_ranks_of_fsdp2_and_other_parallelisms(tmp_path: Path) -> None:
    alone = FSDP2.run(tmp_path / "alone")
    assert alone["parameter"] == "DTensor"
    FSDP2.kill_in_save(tmp_path / "run", 2)
    assert steps(tmp_path / "run") == [4]
    for name in ("ddp", "plain"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
    same = FSDP2.run(tmp_path / "run", "resume")
    assert same["resumed"] == 4
    assert (same["losses"], same["final"]) == (alone["losses"], alone["final"])
    check_close(DDP.run(tmp_path / "ddp", "resume"), alone)
    check_close(PLAIN_STILL.run(tmp_path / "plain", "resume"), alone)


@pytest.mark.parametrize("stage", [pytest.param("zero2", marks=pytest.mark.long), "zero3"])
def test_ranks_of_deepspeed(stage: str, tmp_path: Path) -> None:
    job = Job("transformers_job.py", (f"still+{stage}",), world_size=2)
    if not hasattr(transformers.Trainer, "_prepare_for_training"):
        with pytest.raises(AssertionError, match=r"InputError: bcp needs Trainer._prepare_for_training"):
            job.run(tmp_path / "alone")
        return
    alone = job.run(tmp_path / "alone")
    job.kill_in_save(tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "plain")
    same = job.run(tmp_path / "run", "resume")
    assert same["resumed"] == 4
    assert (same["losses"], same["final"]) == (alone["losses"], alone["final"])
    check_close(PLAIN_STILL.run(tmp_path / "plain", "resume"), alone)


@pytest.mark.long
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_the_best_model_of_deepspeed_is_loaded_at_the_end(stage: str, tmp_path: Path) -> None:
    job = Job("transformers_job.py", (f"still+best+highest+{stage}",), world_size=2)
    whole = job.run(tmp_path / "whole")
    job.kill_in_save(tmp_path / "run", 3)
    again = job.run(tmp_path / "run", "resume")
    for name in ("losses", "evaluations", "final", "best"):
        assert again[name] == whole[name]
    assert again["best"] < 12
    assert again["evaluated"] == max(loss for _, loss in whole["evaluations"])


def check_close(other: dict[str, Any], alone: dict[str, Any]) -> None:
    """Compare the losses of a job on another parallelism: gradients are added in another order."""
    assert other["resumed"] == 4
    assert other["losses"][:4] == alone["losses"][:4]
    expected = [loss for _, loss in alone["losses"][4:]]
    assert [loss for _, loss in other["losses"][4:]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size does not go with bcp: it restarts"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint does not go with bcp: the run handles SIGTERM"),
        ({"save_only_model": True}, "save_only_model does not go with bcp: a run resumes"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    if not settings.keys() <= transformers.TrainingArguments.__dataclass_fields__.keys():
        pytest.skip(f"transformers {transformers.__version__} has no such setting")
    with pytest.raises(bcp.InputError, match=words):
        attach(trainer_in(tmp_path, **settings))


def test_calls_that_are_refused(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    with pytest.raises(bcp.InputError, match="save_strategy and save_steps"):
        attach(trainer, save=10)
    attach(trainer)
    with pytest.raises(bcp.InputError, match="a second attach"):
        attach(trainer)
    with pytest.raises(bcp.InputError, match=r"resume_from_checkpoint='elsewhere/step-00000004' is no checkpoint of"):
        trainer.train(resume_from_checkpoint="elsewhere/step-00000004")
    with pytest.raises(bcp.InputError, match="hyper-parameters"):
        trainer.train(trial={"lr": 1.0})


@pytest.mark.parametrize("change", ["renamed", "other parameters"])
def test_a_trainer_whose_method_has_changed(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path)
    if change == "renamed":
        monkeypatch.delattr(transformers.Trainer, "_load_rng_state")
    else:
        monkeypatch.setattr(transformers.Trainer, "_load_rng_state", lambda *_: None)
    with pytest.raises(
        bcp.InputError, match=rf"_load_rng_state\(checkpoint\), and transformers {transformers.__version__} (has|does)"
    ):
        attach(trainer)


def test_an_old_version_is_refused_with_deepspeed_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path)
    monkeypatch.delattr(transformers.Trainer, "_prepare_for_training", raising=False)  # as before 5.10
    trainer.is_deepspeed_enabled = True
    with pytest.raises(bcp.InputError, match=r"_prepare_for_training\(.*transformers .* does not have it: install"):
        attach(trainer)
    trainer.is_deepspeed_enabled = False
    attach(trainer)


def trainer_in(folder: Path, **settings: Any) -> transformers.Trainer:
    args = transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **settings)
    return transformers.Trainer(model=torch.nn.Linear(2, 2), args=args, train_dataset=[{"x": torch.ones(2)}] * 4)


def test_the_example(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent.parent / "examples/integrations/with_transformers.py"
    lines = []
    for _ in range(2):
        done = subprocess.run(  # noqa: S603 -- a program of this repository
            [sys.executable, example, str(tmp_path / "out")], capture_output=True, text=True, check=True, timeout=300
        )
        lines.append(done.stdout.splitlines())
    first, second = lines
    assert "resumed from step 0, ended at step 12" in first
    assert any(line.startswith("resumed from step 12") for line in second)
    assert [line.split(":")[0] for line in first if line.startswith("step ")] == ["step 8", "step 12"]
    assert len(example.read_text().splitlines()) < 80
