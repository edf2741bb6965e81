"""Jobs of TRL's GRPO that are killed in a save, and resume with prompts, completions and losses of a whole job."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from host_jobs import Job

import bcp
from bcp.integrations.transformers import attach
from bcp.integrations.trl import Generation

pytestmark = pytest.mark.hosts


@pytest.mark.long
@pytest.mark.parametrize(("mode", "ranks"), [("each", 1), ("reuse", 1), ("reuse", 2)])
def test_grpo_goes_on_bit_for_bit_in_its_second_epoch(mode: str, ranks: int, tmp_path: Path) -> None:
    job = Job("trl_job.py", (mode,), world_size=ranks)
    whole = job.run(tmp_path / "whole")
    job.kill_in_save(tmp_path / "run", 3)
    again = job.run(tmp_path / "run", "resume")
    assert again["resumed"] == 6
    assert again["logs"] == whole["logs"]
    assert again["seen"] == whole["seen"][len(whole["seen"]) - len(again["seen"]) :]
    assert again["final"] == whole["final"]


def trainer(**changed: Any) -> SimpleNamespace:
    """Return the parts of a trainer that generates for four steps, after its sixth."""
    settings = {"per_device_train_batch_size": 4, "world_size": 1, "steps_per_generation": 2} | changed
    return SimpleNamespace(
        args=SimpleNamespace(**settings, gradient_accumulation_steps=1),
        num_iterations=2,
        accelerator=SimpleNamespace(device="cpu"),
        _step=6,
        _buffered_inputs=[{"completion_ids": torch.arange(4), "tools": None}],
    )


@pytest.mark.parametrize("changed", [{}, {"world_size": 2}, {"per_device_train_batch_size": 2}])
def test_completions_of_other_batches_are_generated_anew(
    changed: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bcp.save(tmp_path / "one", {"extra_states": {"generation": Generation(trainer())}})
    other = trainer(**changed)
    other._step, other._buffered_inputs = 0, None
    with caplog.at_level(logging.WARNING, logger="bcp"):
        bcp.load(tmp_path / "one", {"extra_states": {"generation": Generation(other)}})
    assert other._step == 6
    assert (other._buffered_inputs is None) == bool(changed)
    assert ("generates anew" in caplog.text) == bool(changed)
    if not changed:
        assert other._buffered_inputs[0]["completion_ids"].tolist() == [0, 1, 2, 3]


def test_completions_that_no_step_needs_are_not_saved() -> None:
    made = trainer()
    made._step = 8
    assert Generation(made).state_dict()["completions"] is None
    assert not Generation.is_in(SimpleNamespace())


def test_a_reference_model_that_changes_is_refused(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    args.sync_ref_model = True  # of GRPOConfig and others
    with pytest.raises(bcp.InputError, match="sync_ref_model does not go with bcp: no checkpoint has"):
        attach(transformers.Trainer(model=torch.nn.Linear(2, 2), args=args))
