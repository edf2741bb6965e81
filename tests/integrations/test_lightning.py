"""Trainings of Lightning are killed in a save, stopped and resumed; their losses are those of an undisturbed one."""

from __future__ import annotations

import runpy
import shutil
import warnings
from typing import Any

import pytest
import torch
from host_jobs import ROOT, Job

import bcp

pytestmark = pytest.mark.hosts
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")
    host = pytest.importorskip("bcp.integrations.lightning")
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
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
    assert (resumed["resumed"], resumed["passed_over"]) == (4, 2)  # 12 is not committed
    assert resumed["losses"] == later(undisturbed["losses"], 4)  # position, schedule and step are those of 4, too
    assert resumed["folders"] == ["step-00000012"]


def test_a_signal_ends_it_behind_a_commit_and_no_step_is_lost_or_made_twice(undisturbed, tmp_path):
    stopped = ALONE.run(tmp_path / "run", "validate=4", "term=6")
    last = stopped["step"]
    assert last in (6, 7)  # a signal within a step may end the next one
    assert stopped["folders"] == ["step-00000004", f"step-{last:08d}"]
    resumed = ALONE.run(tmp_path / "run", "validate=4")
    assert resumed["resumed"] == last
    assert stopped["losses"] | resumed["losses"] == undisturbed["losses"]
    assert not stopped["losses"].keys() & resumed["losses"].keys()


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


class Net(lightning.LightningModule):
    """A line that one optimizer fits, or a tower with an optimizer for each half."""

    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)])
        self.automatic_optimization, self.count = optimizers == 1, optimizers

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.halves[1](torch.nn.functional.dropout(self.halves[0](batch))) - 1).square().mean()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor | None:
        loss = self.loss(batch)
        if self.count == 1:
            return loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("val_loss", (self.halves[1](self.halves[0](batch)) - 1).square().mean() + self.global_step)

    def configure_optimizers(self) -> Any:
        if self.count == 1:
            return torch.optim.AdamW(self.parameters(), lr=0.1)
        return [torch.optim.AdamW(half.parameters(), lr=0.1) for half in self.halves]


def fit(folder, steps, *, optimizers=1, save=2, path="newest", callbacks=(), run_options=None, **settings: Any):
    """Train in this process, and return the callback, the weights and the trainer."""
    save = host.BcpCheckpoint(str(folder), save=save, **(run_options or {}))
    torch.manual_seed(1)
    data = torch.rand(24, 4)
    loader = loaders.StatefulDataLoader(data, batch_size=3, shuffle=True)
    net, defaults = Net(optimizers), {"strategy": save.strategy(), "callbacks": [save, *callbacks], "devices": 1}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", **quiet, **{"enable_checkpointing": False, **defaults, **settings}
    )
    behind = torch.utils.data.DataLoader(data, batch_size=8, generator=torch.Generator())
    trainer.fit(net, loader, behind, ckpt_path=save.newest() if path == "newest" else path)
    return save, [weight.detach().clone() for weight in net.parameters()], trainer


@pytest.fixture
def quiet(recwarn):
    """Lightning warns of much that is as it should be."""
    warnings.simplefilter("ignore")
    return recwarn


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("settings", "steps", "resumed"),
    [({"optimizers": 2}, 24, 16), ({"accumulate_grad_batches": 2}, 10, 6)],  # in epochs of 16 and 4 steps
    ids=["two optimizers", "accumulated gradients"],
)
def test_steps_are_those_of_optimizers(tmp_path, settings, steps, resumed):
    _, whole, _ = fit(tmp_path / "whole", steps, limit_val_batches=0, **settings)
    _, _, first = fit(tmp_path / "run", resumed, limit_val_batches=0, **settings)
    save, weights, last = fit(tmp_path / "run", steps, limit_val_batches=0, **settings)
    assert (first.global_step, save.run.resumed.step, last.global_step) == (resumed, resumed, steps)
    assert all(map(torch.equal, weights, whole))
    assert [info.step for info in save.run.list()] == [steps - 4, steps - 2, steps]


@pytest.mark.usefixtures("quiet")
def test_a_save_that_waits_for_a_validation_has_its_metrics(tmp_path):
    keep = bcp.policies.AnyKept(1, bcp.policies.Best("val_loss"))
    waits = {"run_options": {"wait_for_validation": True, "keep": keep}, "val_check_interval": 4, "save": 1}
    _, whole, trainer = fit(tmp_path / "whole", 16, **waits)
    for steps in (8, 16):  # 8 is the end of an epoch
        save, weights, _ = fit(tmp_path / "run", steps, **waits)
    assert save.run.resumed.step == 8
    assert all(map(torch.equal, weights, whole))
    metrics = {info.step: info.metrics["val_loss"] for info in save.run.list() if info.committed}
    assert metrics.keys() == {4, 16}  # the best and the newest
    assert metrics[16] == pytest.approx(trainer.callback_metrics["val_loss"].item())


@pytest.mark.usefixtures("quiet")
def test_a_path_names_an_earlier_step(tmp_path):
    fit(tmp_path / "run", 6, limit_val_batches=0)
    save, _, _ = fit(tmp_path / "run", 6, limit_val_batches=0, path=f"{tmp_path}/run/step-00000004")
    assert save.run.resumed.step == 4
    with pytest.raises(bcp.InputError, match="has step 6: pass ckpt_path"):
        fit(tmp_path / "run", 8, limit_val_batches=0, path=None)


@pytest.mark.usefixtures("quiet")
def test_a_user_saves_the_step_that_has_ended(tmp_path):
    run = tmp_path / "run"
    user = lightning.callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(run) if trainer.global_step == 3 else None
    )
    save, _, _ = fit(run, 4, save=None, callbacks=[user], limit_val_batches=0)
    assert [info.step for info in save.run.list()] == [3]
    for path, options in ((tmp_path / "model.ckpt", {}), (run, {"weights_only": True})):
        user.on_train_batch_end = lambda trainer, *_, to=path, how=options: trainer.save_checkpoint(to, **how)
        with pytest.raises(bcp.InputError, match="alone, in a hook of the training"):
            fit(tmp_path / "other", 4, save=None, callbacks=[user], limit_val_batches=0)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (r"saves nothing alone: pass Trainer\(strategy", {"strategy": "auto"}),
        ("ModelCheckpoint: the run saves", {"enable_checkpointing": True}),
        ("is for one device", {"devices": 2}),
        ("is no checkpoint of the run", {"path": "elsewhere/step-00000004"}),
    ],
)
def test_misuse_is_refused_before_a_step(tmp_path, words, changes):
    with pytest.raises(bcp.InputError, match=words):
        fit(tmp_path / "run", 4, **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("quiet")
def test_a_strategy_that_cannot_save_is_refused(tmp_path, monkeypatch):
    save = host.BcpCheckpoint(str(tmp_path / "run"))
    with pytest.raises(bcp.InputError, match=r"saves nothing alone: pass callbacks"):
        lightning.Trainer(strategy=save.strategy(), accelerator="cpu", logger=False, enable_checkpointing=False).fit(
            Net(), torch.utils.data.DataLoader(torch.rand(4, 4))
        )
    with monkeypatch.context() as patch:
        patch.setattr("lightning.__version__", "2.4.0")
        with pytest.raises(bcp.InputError, match=r"needs lightning 2\.5 or newer, and this is 2\.4\.0"):
            host.BcpCheckpoint(str(tmp_path / "run"))
    known = lightning.strategies
    for kind in (known.FSDPStrategy, known.DeepSpeedStrategy, "ddp_spawn", int):
        with pytest.raises(bcp.InputError, match="do not work; use"):
            save.strategy(kind)
    for change in (lambda patch: patch.delattr(known.Strategy, "remove_checkpoint"), _pass_more):
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(bcp.InputError, match=r"bcp needs DDPStrategy\.\w+\(.*lightning \d\S* (does|has)"):
                save.strategy("ddp")


def _pass_more(patch):
    def save_checkpoint(self, checkpoint, filepath, replicas):
        raise AssertionError((self, checkpoint, filepath, replicas))

    patch.setattr(lightning.strategies.Strategy, "save_checkpoint", save_checkpoint)


@pytest.mark.usefixtures("quiet")
def test_the_example_trains_and_resumes(tmp_path, capsys):
    main = runpy.run_path(str(ROOT / "examples" / "integrations" / "with_lightning.py"))["main"]
    main(str(tmp_path / "run"), 6)
    main(str(tmp_path / "run"), 10)
    assert 'RESULT {"resumed": 5, "step": 10}' in capsys.readouterr().out
