"""Trainings of Lightning are killed in a save, stopped and resumed; their losses are those of an undisturbed one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from host_jobs import ROOT, Job

import bcp

pytestmark = pytest.mark.hosts
ALONE = Job("lightning_job.py", ("auto",))
SHARDED = Job("lightning_job.py", ("fsdp2",), world_size=2)


def later(losses: dict[str, float], after: int) -> dict[str, float]:
    return {step: loss for step, loss in losses.items() if int(step) > after}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return ALONE.run(tmp_path_factory.mktemp("undisturbed") / "run", "validate=4", "test")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run with an epoch's end at step 8, killed in its save of step 12."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    ALONE.kill_in_save(folder, 3, "validate=4")
    return folder


def test_killed_in_a_save_it_goes_on_behind_the_newest_checkpoint(undisturbed, killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run")
    resumed = ALONE.run(folder, "validate=4", "test")
    assert resumed["resumed"] == 8
    assert resumed["losses"] == later(undisturbed["losses"], 8)
    assert resumed["validated"] == later(undisturbed["validated"], 8)
    assert resumed["tested"] == undisturbed["tested"]  # trainer.test(ckpt_path=...) loads weights
    assert resumed["folders"] == ["step-00000004", "step-00000008", "step-00000012"]


def test_a_damaged_checkpoint_is_passed_over_with_its_dump(undisturbed, killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run")
    largest = max((folder / "step-00000008").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    largest.write_bytes(b"x" * largest.stat().st_size)
    resumed = ALONE.run(folder, "validate=4", "keep=1")
    assert (resumed["resumed"], resumed["passed_over"]) == (4, 1)
    assert resumed["losses"] == later(undisturbed["losses"], 4)  # position, schedule and step are those of 4, too
    assert resumed["folders"] == ["step-00000012"]


def test_a_signal_ends_it_behind_a_commit_and_no_step_is_lost_or_made_twice(undisturbed, tmp_path):
    stopped = ALONE.run(tmp_path / "run", "validate=4", "term=6")
    assert stopped["folders"] == ["step-00000004", "step-00000006"]
    resumed = ALONE.run(tmp_path / "run", "validate=4")
    assert resumed["resumed"] == 6
    assert stopped["losses"] | resumed["losses"] == undisturbed["losses"]
    assert not stopped["losses"].keys() & resumed["losses"].keys()


def test_a_save_that_waits_for_a_validation_has_its_metrics(undisturbed, tmp_path):
    ALONE.kill_in_save(tmp_path / "run", 2, "validate=4", "best")
    resumed = ALONE.run(tmp_path / "run", "validate=4", "best")
    assert resumed["resumed"] == 4
    assert resumed["losses"] == later(undisturbed["losses"], 4)
    best = min(undisturbed["validated"], key=undisturbed["validated"].__getitem__)
    kept = {step: metrics["val_loss"] for step, metrics in resumed["metrics"].items()}
    assert kept == {step: pytest.approx(undisturbed["validated"][step]) for step in {best, "12"}}


def test_several_optimizers_and_accumulated_gradients_count_optimizer_steps(tmp_path):
    ALONE.kill_in_save(tmp_path / "two", 2, "two", "steps=12")  # a step of each optimizer is one
    assert ALONE.run(tmp_path / "two", "two", "steps=12")["resumed"] == 4
    found = ALONE.run(tmp_path / "accumulate", "accumulate=2", "steps=8")
    assert found["folders"] == ["step-00000004", "step-00000008"]


def test_fsdp2_on_two_ranks_goes_on_there_and_on_one(tmp_path):
    whole = SHARDED.run(tmp_path / "whole", "still")
    SHARDED.kill_in_save(tmp_path / "run", 2, "still")
    alone = shutil.copytree(tmp_path / "run", tmp_path / "alone")
    resumed = SHARDED.run(tmp_path / "run", "still")
    assert (resumed["resumed"], resumed["parameter"]) == (4, "DTensor")
    assert resumed["losses"] == later(whole["losses"], 4)
    fewer = ALONE.run(alone, "still")
    assert fewer["resumed"] == 4
    # one rank adds up a batch in another order than two do
    assert fewer["losses"] == {step: pytest.approx(loss, rel=1e-5) for step, loss in resumed["losses"].items()}


# -- in this process ------------------------------------------------------------------------------


def refused(words: str, folder: Path, **changes):
    """Train with a misuse, and check the error and that no step was made."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from bcp.integrations.lightning import BcpCheckpoint

    save = BcpCheckpoint(str(folder), save=2)
    path = changes.pop("ckpt_path", None)
    settings = {"strategy": save.strategy(), "callbacks": [save], "enable_checkpointing": False, **changes}
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder.parent,
    }
    trainer = Trainer(max_steps=4, accelerator="cpu", limit_val_batches=0, **quiet, **{"devices": 1, **settings})
    with pytest.raises(bcp.InputError, match=words):
        trainer.fit(BoringModel(), ckpt_path=path)
    assert trainer.global_step in (0, 2)
    return save


@pytest.mark.filterwarnings("ignore")
def test_misuse_is_refused_by_name(tmp_path, monkeypatch):
    from lightning.pytorch.callbacks import LambdaCallback
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy

    from bcp.integrations.lightning import BcpCheckpoint

    run = tmp_path / "run"
    refused("saves nothing alone: pass Trainer", run, strategy="auto")
    refused("saves nothing alone: pass callbacks", run, callbacks=[])
    refused("ModelCheckpoint", run, enable_checkpointing=True)
    refused("for one device", run, devices=2)
    refused("no step of the run", run, ckpt_path=str(tmp_path / "other" / "step-00000004"))
    assert not run.exists()

    def export(trainer, *_):
        if trainer.global_step == 2:
            trainer.save_checkpoint(tmp_path / "model.ckpt")

    def weights(trainer, *_):
        trainer.save_checkpoint(run, weights_only=True)

    save = BcpCheckpoint(str(run))
    for function, words in ((export, "no step of the run"), (weights, "alone, in a hook of the training")):
        callback = LambdaCallback(on_train_batch_end=function)
        shutil.rmtree(run, ignore_errors=True)
        from lightning.pytorch import Trainer
        from lightning.pytorch.demos.boring_classes import BoringModel

        save = BcpCheckpoint(str(run), save=2)
        with pytest.raises(bcp.InputError, match=words):
            Trainer(
                max_steps=4, accelerator="cpu", devices=1, strategy=save.strategy(), callbacks=[save, callback],
                enable_checkpointing=False, logger=False, limit_val_batches=0, enable_progress_bar=False,
            ).fit(BoringModel())  # fmt: skip
    assert save.newest() is None
    with bcp.Run(run, {"model": {}}, save=1) as made:
        made.resume()
        made.maybe_save(1)
    refused("has step 1: pass ckpt_path", run)
    for kind in (FSDPStrategy, "ddp_spawn", "deepspeed", int):
        with pytest.raises(bcp.InputError, match="do not work"):
            save.strategy(kind)
    with monkeypatch.context() as patch:
        patch.delattr(Strategy, "remove_checkpoint")
        with pytest.raises(bcp.InputError, match=r"lightning \d.*another DDPStrategy.remove_checkpoint"):
            save.strategy(DDPStrategy)
    monkeypatch.setattr(Strategy, "save_checkpoint", lambda self, checkpoint, filepath, replicas: None)
    with pytest.raises(bcp.InputError, match=r"another DDPStrategy.save_checkpoint than bcp knows"):
        save.strategy(DDPStrategy)


def test_the_example_trains_and_resumes(tmp_path):
    example = Job(str(ROOT / "examples" / "integrations" / "with_lightning.py"))
    assert example.run(tmp_path / "run", "6")["step"] == 6
    assert example.run(tmp_path / "run", "10") == {"resumed": 5, "step": 10}
