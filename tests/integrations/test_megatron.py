"""Jobs of Megatron-LM's loop that are killed in a save, and resume on the same and on other layouts."""

# ruff: noqa: ARG005, FBT001, FBT002 -- signatures of Megatron

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host_jobs import HERE, ROOT, Job

import bcp
from bcp.integrations import megatron
from bcp.integrations.megatron import LOOP, arguments, install, uninstall
from bcp.integrations.megatron.loop import TRACKER

pytestmark = [pytest.mark.hosts, pytest.mark.filterwarnings("ignore")]  # its import warns of much

PATHS = [ROOT, HERE, HERE.parent, HERE.parent / "jobs", HERE.parent / "support"]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
STILL = ("--dropout", "0")


def job(*arguments: str, ranks: int = 2) -> Job:
    return Job("megatron_job.py", arguments, ranks, ENVIRONMENT)


TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")


def steps(folder: Path) -> list[int]:
    return [info.step for info in bcp.Run(folder, {}).list() if info.is_committed]


def tracker(folder: Path) -> int:
    return int((folder / TRACKER).read_text())


def after(losses: list[list[Any]], step: int) -> list[list[Any]]:
    return [loss for loss in losses if loss[0] > step]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an uninterrupted job with dropout on two tensor-parallel ranks reports."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    found = job(*TP2).run(folder)
    assert found["bad"] == []
    assert steps(folder) == [4, 8, 12]
    assert tracker(folder) == 12
    return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What an uninterrupted job without dropout reports, and the folder of one that was killed in its third save."""
    folder = tmp_path_factory.mktemp("still")
    alone = job(*TP2, *STILL).run(folder / "alone")
    job(*TP2, *STILL).kill_in_save(folder / "run", 3)
    assert steps(folder / "run") == [4, 8]
    assert tracker(folder / "run") in (4, 8)  # the loop may not have been told of the second
    return alone, folder / "run"


def test_a_killed_job_goes_on_bit_for_bit(whole: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job(*TP2).kill_in_save(folder, 2)
    assert steps(folder) == [4]
    assert not (folder / TRACKER).exists() or tracker(folder) == 4
    again = job(*TP2).run(folder, "resume")
    assert (again["loaded"], again["samples"], again["bad"]) == (4, 48, [])
    assert again["losses"] == after(whole["losses"], 4)
    assert again["final"] == whole["final"]
    for (drawn, tracked), (all_drawn, as_tracked) in zip(again["drawn"], whole["drawn"], strict=True):
        assert (drawn, tracked) == (after(all_drawn, 4), as_tracked)
    assert whole["drawn"][0][1] != whole["drawn"][1][1]  # each tensor-parallel rank has its own states
    assert steps(folder) == [4, 8, 12]
    assert tracker(folder) == 12


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param((), 2, marks=pytest.mark.long, id="two data-parallel ranks"),
        pytest.param((), 1, id="one rank"),
        pytest.param(PP2, 2, marks=pytest.mark.long, id="two stages"),
    ],
)
def test_other_layouts(
    killed: tuple[dict[str, Any], Path], layout: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    alone, folder = killed
    shutil.copytree(folder, tmp_path / "run")
    again = job(*layout, *STILL, ranks=ranks).run(tmp_path / "run", "resume")
    assert (again["loaded"], again["bad"]) == (8, [])
    expected = [loss for _, loss in after(alone["losses"], 8)]
    assert [step for step, _ in again["losses"]] == [9, 10, 11, 12]
    # partial sums are added in another order, in float32
    assert [loss for _, loss in again["losses"]] == pytest.approx(expected, rel=1e-5)
    assert tracker(tmp_path / "run") == 12


@pytest.mark.long
def test_random_states_do_not_come_back_on_other_layouts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job(ranks=2).run(folder, "--exit-interval", "4")
    again = job(*TP2).run(folder, "resume", "--exit-interval", "6")
    assert again["loaded"] == 4
    (first, of_first), (second, of_second) = again["drawn"]
    assert first == second  # outside of the tensor-parallel region, ranks draw alike
    assert of_first != of_second  # and each its own numbers in it


@pytest.mark.long
def test_a_signal_is_megatrons(whole: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped = job(*TP2, "--exit-signal-handler").run(folder, "stop=6")
    last = stopped["losses"][-1][0]
    assert steps(folder) == [4, last]
    assert tracker(folder) == last
    again = job(*TP2).run(folder, "resume")
    assert [*stopped["losses"], *again["losses"]] == whole["losses"]


@pytest.mark.long
def test_the_last_step_is_saved_behind_the_loop(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    found = job("--save-interval", "5", ranks=1).run(folder, "keep=1")
    assert found["bad"] == []
    assert steps(folder) == [10, 12]
    assert tracker(folder) == 12
    again = job("--save-interval", "5", ranks=1).run(folder, "resume")
    assert again["losses"] == []
    assert steps(folder) == [10, 12]


@pytest.mark.long
def test_retained_multiples(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    found = job("--save-interval", "2", "--save-retain-interval", "6", "--async-save", ranks=1).run(folder)
    assert found["bad"] == []
    assert steps(folder) == [6, 10, 12]


@pytest.mark.long
def test_other_sources(tmp_path: Path) -> None:
    first, other = tmp_path / "first", str(tmp_path / "other")
    alone = job(ranks=1)
    whole = alone.run(first)
    back = alone.run(Path(other), "--load", str(first), "--ckpt-step", "4")
    assert (back["loaded"], back["losses"]) == (4, after(whole["losses"], 4))
    assert steps(Path(other)) == [8, 12]
    back = alone.run(first, "resume", "--ckpt-step", "4", "--exit-interval", "7")
    assert (back["loaded"], back["losses"]) == (4, after(whole["losses"], 4)[:3])
    tuned = alone.run(Path(other), "--load", str(first), "--finetune", "--exit-interval", "2")
    assert (tuned["loaded"], tuned["samples"], tuned["losses"][0][0]) == (0, 8, 1)
    assert tuned["losses"][0][1] < whole["losses"][0][1]
    fresh = alone.run(Path(other), "--load", str(first), "--no-load-optim", "--exit-interval", "12")
    assert (fresh["loaded"], fresh["samples"]) == (7, 48)
    assert fresh["losses"] != after(whole["losses"], 7)
    anew = alone.run(first, "--exit-interval", "4")
    assert anew["losses"] == whole["losses"][:4]
    assert tracker(first) == 4


@pytest.mark.long
def test_a_damaged_checkpoint_is_passed_over(killed: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    alone, folder = killed
    shutil.copytree(folder, tmp_path / "run")
    file = next((tmp_path / "run/step-00000008/model").iterdir())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    again = job(*TP2, *STILL).run(tmp_path / "run", "resume")
    assert (again["loaded"], again["bad"]) == (4, [])
    assert again["losses"] == after(alone["losses"], 4)


REFUSALS = [
    ("--ckpt-format=torch_dcp", "--ckpt-format=torch_dcp does not go with bcp: bcp has one format"),
    ("--no-save-optim", "--no-save-optim does not go with bcp: a restart needs all states"),
    ("--override-opt-param-scheduler", "--override-opt-param-scheduler does not go with bcp: all values"),
    ("--dist-ckpt-strictness=ignore_all", "--dist-ckpt-strictness=ignore_all does not go with bcp: a load is strict"),
    ("--dataloader-save=/x", "--dataloader-save does not go with bcp: its files would not commit"),
    ("--load=FOREIGN", "foreign has a latest_checkpointed_iteration.txt, but no checkpoint of bcp"),
    ("--load=NOTHING --exit-on-missing-checkpoint", "--exit-on-missing-checkpoint: there is no checkpoint at"),
]


@pytest.mark.parametrize(("given", "words"), REFUSALS, ids=[given for given, _ in REFUSALS])
def test_settings_that_are_refused_before_the_first_step(given: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / TRACKER).write_text("100")
    given = given.replace("FOREIGN", str(tmp_path / "foreign")).replace("NOTHING", str(tmp_path / "nothing"))
    with pytest.raises(AssertionError) as failure:
        job(*given.split(), ranks=1).run(tmp_path / "run")
    assert words in str(failure.value)
    assert not (tmp_path / "run").exists()


class Loop(types.ModuleType):
    """The names that bcp needs, and no others."""

    def get_args(self) -> None: ...

    def update_num_microbatches(self, consumed_samples: int) -> None: ...

    def maybe_finalize_async_save(self, blocking: bool = False, terminate: bool = False) -> None: ...

    def save_checkpoint(
        self,
        iteration: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        num_floating_point_operations_so_far: Any,
    ) -> None: ...

    def load_checkpoint(
        self, ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load", strict: bool = True
    ) -> None: ...


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    module = Loop(LOOP)
    monkeypatch.setitem(sys.modules, LOOP, module)
    yield module
    uninstall()


def test_install_and_back(loop: Loop) -> None:
    before = {name: getattr(loop, name) for name in megatron.REPLACED}
    install()
    assert all(getattr(loop, name) != function for name, function in before.items())
    with pytest.raises(bcp.InputError, match="a second install"):
        install()
    uninstall()
    assert {name: getattr(loop, name) for name in before} == before


@pytest.mark.parametrize("name", [*megatron.REPLACED, *megatron.CALLED])
def test_a_loop_whose_function_is_renamed(loop: Loop, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Loop, name)
    with pytest.raises(bcp.InputError, match=rf"bcp needs {LOOP}\.{name}\(.*and megatron \d\S* does not have it"):
        install()
    assert "save_checkpoint" not in vars(loop)


@pytest.mark.parametrize("name", megatron.REPLACED)
def test_a_loop_whose_function_takes_something_else(loop: Loop, name: str) -> None:
    setattr(loop, name, lambda step: None)
    with pytest.raises(
        bcp.InputError, match=rf"bcp needs {LOOP}\.{name}\(.*and megatron \d\S* has the parameters \(step\)"
    ):
        install()


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize("name", ["save", "preemption", "standby_steps"])
def test_arguments_that_are_megatrons(name: str) -> None:
    with pytest.raises(bcp.InputError, match=rf"install\({name}=...\) does not go with bcp: .* decides"):
        install(**{name: 1})


def test_the_wheel_has_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LOOP, None)
    with pytest.raises(bcp.InputError, match="put the Megatron-LM repository on PYTHONPATH"):
        install()


def test_each_setting_is_named_once() -> None:
    names = list(itertools.chain(arguments.IGNORED.split(), *map(str.split, arguments.REFUSED.values())))
    assert len(names) == len(set(names))


def test_the_example(tmp_path: Path) -> None:
    example = ROOT / "examples/integrations/with_megatron.py"
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("import sys\nfrom megatron.training import pretrain\npretrain(sys.argv[1:])\n")
    start = f"import megatron_stand_in, runpy; runpy.run_path({str(example)!r}, run_name='__main__')"
    given = ["--train-iters", "6", "--save-interval", "2", "--save", "run", "--load", "run"]
    for _ in range(2):
        done = subprocess.run(  # noqa: S603 -- a program of this repository
            [sys.executable, "-c", start, str(script), *given],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=tmp_path,
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-4000:]
    assert steps(tmp_path / "run") == [2, 4, 6]
    assert len(example.read_text().splitlines()) < 80
