"""Loops of Accelerate are killed in a save, stopped and resumed; their losses are those of an undisturbed one."""

from __future__ import annotations

import runpy
import shutil

import pytest
from host_jobs import ROOT, Job

import bcp

pytestmark = pytest.mark.hosts
accelerate = pytest.importorskip("accelerate")

ALONE = Job("accelerate_job.py")
TWO = Job("accelerate_job.py", world_size=2, environment={"ACCELERATE_USE_CPU": "true"})


def later(losses: dict[str, float], after: int) -> dict[str, float]:
    return {step: loss for step, loss in losses.items() if int(step) > after}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return ALONE.run(tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run with checkpoints in the middle and at the end of its first epoch, killed in its save of step 12."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    ALONE.kill_in_save(folder, 3)
    return folder


def test_killed_in_a_save_it_goes_on_behind_the_newest_checkpoint(undisturbed, killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run")
    resumed = ALONE.run(folder)
    assert resumed["resumed"] == 8
    assert resumed["losses"] == later(undisturbed["losses"], 8)
    for name in ("samples", "rate", "folders"):  # a registered object, a schedule, and what keep=3 leaves
        assert resumed[name] == undisturbed[name], name


def test_a_damaged_checkpoint_is_passed_over_with_all_that_is_registered(undisturbed, killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "run")
    largest = max((folder / "step-00000008").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    largest.write_bytes(b"x" * largest.stat().st_size)
    resumed = ALONE.run(folder)
    assert (resumed["resumed"], resumed["passed_over"]) == (4, 2)  # 12 is not committed
    assert resumed["losses"] == later(undisturbed["losses"], 4)
    assert resumed["samples"] == undisturbed["samples"]


def test_a_signal_ends_it_behind_a_commit_and_no_step_is_lost_or_made_twice(undisturbed, tmp_path):
    stopped = ALONE.run(tmp_path / "run", "term=9")
    assert len(stopped["losses"]) < 16
    resumed = ALONE.run(tmp_path / "run")
    assert resumed["resumed"] == len(stopped["losses"])
    assert stopped["losses"] | resumed["losses"] == undisturbed["losses"]
    assert not stopped["losses"].keys() & resumed["losses"].keys()


def test_two_ranks(tmp_path):
    whole = TWO.run(tmp_path / "whole")
    TWO.kill_in_save(tmp_path / "run", 2)
    resumed = TWO.run(tmp_path / "run")
    assert resumed["resumed"] == 4
    assert resumed["losses"] == later(whole["losses"], 4)


@pytest.mark.parametrize(("before", "after"), [(TWO, ALONE), pytest.param(ALONE, TWO, marks=pytest.mark.long)])
def test_on_another_number_of_ranks_at_the_end_of_an_epoch(tmp_path, before, after):
    """The same samples make a step. Gradients are added in another order."""
    whole = before.run(tmp_path / "whole", "plain=1", "every=8")
    before.kill_in_save(tmp_path / "run", 2, "plain=1", "every=8")
    resumed = after.run(tmp_path / "run", "plain=1", "every=8")
    assert resumed["resumed"] == 8
    assert resumed["losses"] == pytest.approx(later(whole["losses"], 8), rel=1e-5)
    assert resumed["rate"] == whole["rate"]


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_resumed_is_refused_by_name(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    data = pytest.importorskip("torch.utils.data")
    run = pytest.importorskip("bcp.integrations.accelerate").run
    settings = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    with pytest.raises(bcp.InputError, match=r"call run\(\) behind prepare\(\)"):
        run(accelerator, tmp_path / "run")
    accelerator.prepare(torch.nn.Linear(2, 2))
    loader = accelerator.prepare(data.DataLoader(data.TensorDataset(torch.rand(4, 2)), shuffle=True))
    with pytest.raises(bcp.InputError, match=r"dataloader 0 does not save its seed.*use_seedable_sampler=True"):
        run(accelerator, tmp_path / "run")
    accelerator.free_memory(loader)
    accelerator.prepare(torch.nn.Linear(2, 2))
    with run(accelerator, tmp_path / "run", save=1) as made:
        made.resume()
        made.maybe_save(1)
    accelerator.register_for_checkpointing(torch.nn.Linear(2, 2))
    with (
        pytest.raises(bcp.BcpError, match="0 registered of an accelerator, and this one has 1"),
        run(accelerator, tmp_path / "run", save=1) as made,
    ):
        made.resume()
    with monkeypatch.context() as patch:
        patch.setattr(type(accelerator), "distributed_type", accelerate.DistributedType.DEEPSPEED)
        with pytest.raises(bcp.InputError, match="DEEPSPEED is not supported"):
            run(accelerator, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(accelerate, "__version__", "1.12.0")
        with pytest.raises(bcp.InputError, match=r"needs accelerate 1\.13 or newer, and this is 1\.12\.0"):
            run(accelerator, tmp_path / "run")
    monkeypatch.delattr(accelerator, "_custom_objects")
    with pytest.raises(bcp.InputError, match=rf"accelerate {accelerate.__version__} has no _custom_objects"):
        run(accelerator, tmp_path / "run")


@pytest.mark.filterwarnings("ignore")
def test_the_example_trains_and_resumes(tmp_path, capsys):
    main = runpy.run_path(str(ROOT / "examples" / "integrations" / "with_accelerate.py"))["main"]
    main(str(tmp_path / "run"), 6)
    main(str(tmp_path / "run"), 10)
    assert 'RESULT {"resumed": 5, "step": 10}' in capsys.readouterr().out
