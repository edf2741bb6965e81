from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import any_to_any
import fsdp1
import pytest
import torch
from any_to_any import How, Task, goes_on
from exact import Exact, Twin, trained
from fsdp1 import Layout
from logical import differences, hyper, logical
from ranks import Ranks
from samples import sample
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle

import bcp
from bcp.errors import InputError
from bcp.planners.fsdp1 import Fsdp1Planner

pytestmark = pytest.mark.dist

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"]
LAYOUTS = [
    Layout(strategy=strategy, orig=orig, mixed=orig == (number % 2 == 0))
    for number, strategy in enumerate(STRATEGIES)
    for orig in (True, False)
]
CHANGES = [
    (Layout(), Layout(strategy="SHARD_GRAD_OP", orig=False)),
    (Layout(orig=False), Layout(size=2)),
    (Layout(strategy="SHARD_GRAD_OP", mixed=True), Layout(strategy="HYBRID_SHARD", orig=False)),
    (Layout(strategy="HYBRID_SHARD", orig=False), Layout(orig=False, size=2, mixed=True)),
    (Layout(strategy="_HYBRID_SHARD_ZERO2"), Layout(strategy="NO_SHARD", orig=False)),
    (Layout(strategy="NO_SHARD"), Layout(strategy="_HYBRID_SHARD_ZERO2", orig=False)),
    (Layout(strategy="NO_SHARD", orig=False), Layout(strategy="NO_SHARD", size=2)),
    (Layout(size=2), Layout(orig=False)),
    (Layout(orig=False, size=2), Layout(strategy="HYBRID_SHARD")),
    (Layout(size=1), Layout(orig=False)),
    (Layout(orig=False), Layout(size=1)),
    (Layout("fsdp2", size=2), Layout(strategy="HYBRID_SHARD")),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_checkpoint_is_what_unsharded_training_gives(saved: Callable[[How], Path], layout: Layout) -> None:
    assert not differences(logical(saved(layout)), trained(2, 4).state())


@pytest.mark.parametrize(
    ("before", "after", "steps_before"),
    sample(
        [(*change, steps) for change in CHANGES for steps in (0, 1)],
        *((*change, at // 2 % 2) for at, change in enumerate(CHANGES) if at % 2 == 0),
    ),
    ids=str,
)
def test_training_goes_on_in_another_layout(
    ranks4: Ranks, tmp_path: Path, saved: Callable[[How], Path], before: Layout, after: Layout, steps_before: int
) -> None:
    goes_on(ranks4, saved(before), tmp_path, trained(2, before.size), after, Task(steps_before=steps_before))


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_before_the_first_step_there_is_only_a_model(ranks4: Ranks, tmp_path: Path, *, orig: bool) -> None:
    ranks4.run(any_to_any.train, tmp_path / "new", Layout(orig=orig), Exact, 0)
    assert not differences(logical(tmp_path / "new"), trained(0, 4).state())
    goes_on(ranks4, tmp_path / "new", tmp_path, trained(0, 4), Layout(orig=not orig), Task(number=0))


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_names_are_those_of_the_bare_model(ranks4: Ranks, tmp_path: Path, *, orig: bool) -> None:
    twin = Twin(model=fsdp1.Odd())
    twin.step(0, 4)
    twin.step(1, 4)
    ranks4.run(any_to_any.train, tmp_path / "odd", Layout(orig=orig, odd=True), fsdp1.Odd)
    assert not differences(logical(tmp_path / "odd"), twin.state())
    assert hyper(tmp_path / "odd")["model", "counter._extra_state"] == {"dict": [["count", 2]]}
    goes_on(ranks4, tmp_path / "odd", tmp_path, twin, Layout(orig=not orig, odd=True), Task(fsdp1.Odd))
    assert hyper(tmp_path / "stepped")["model", "counter._extra_state"] == {"dict": [["count", 3]]}


def test_hyper_parameters_go_by_name(ranks4: Ranks, tmp_path: Path) -> None:
    slow = ("bias", "scale")
    ranks4.run(any_to_any.train, tmp_path / "saved", Layout(slow=slow))
    twin = trained(2, 4, slow=slow)
    assert not differences(logical(tmp_path / "saved"), twin.state())
    goes_on(ranks4, tmp_path / "saved", tmp_path, twin, Layout(slow=slow, swapped=True, size=2))
    assert hyper(tmp_path / "again") == hyper(tmp_path / "saved")


BOTH = list(itertools.product(STRATEGIES, [True, False]))


@pytest.mark.parametrize(("strategy", "orig"), sample(BOTH, *BOTH[::4], *BOTH[3::4]))
def test_saving_between_forward_and_backward(ranks4: Ranks, tmp_path: Path, strategy: str, *, orig: bool) -> None:
    ranks4.run(fsdp1.save_between, tmp_path, Layout(strategy=strategy, orig=orig, mixed=True))
    expected = trained(1, 4).state()
    expected["model", "steps"] += 1  # the buffer is counted up by the forward
    assert not differences(logical(tmp_path / "between"), expected)
    assert not differences(logical(tmp_path / "stepped"), trained(2, 4).state())


@pytest.mark.parametrize("how", ["with grad", "without grad"])
@pytest.mark.parametrize(
    ("strategy", "orig"),
    sample(
        itertools.product(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], [True, False]),
        *[("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("NO_SHARD", True)],
    ),
)
def test_weights_that_fsdp_kept_unsharded_are_dropped_by_a_load(
    ranks4: Ranks, saved: Callable[[How], Path], strategy: str, how: str, *, orig: bool
) -> None:
    layout = Layout(strategy=strategy, orig=orig)
    losses = ranks4.run(fsdp1.load_after_forward, saved(Layout()), layout, how)
    expected = trained(2, 4).model(fsdp1.batch(5, 0))
    torch.testing.assert_close(losses, [expected.detach()] * 4)


@pytest.mark.parametrize("orig", sample([True, False], False))  # noqa: FBT003 -- a case
def test_saving_and_loading_take_the_budget_and_a_part_and_no_more(
    ranks4: Ranks, tmp_path: Path, *, orig: bool
) -> None:
    budget, part, mine = 3 << 20, 1 << 20, 12 << 20
    # imports, threads, and the aligned memory of direct I/O, which a process keeps
    ranks4.run(fsdp1.square, tmp_path / "first", Layout(orig=orig), 2048, budget, part)
    for save, load in ranks4.run(fsdp1.square, tmp_path / "large", Layout(orig=orig), 2048, budget, part):
        assert max(save.largest, load.largest) <= part + (64 << 10)
        # 3 MiB for all that is not data, and for huge pages that are not full
        assert max(save.resident, load.resident) <= budget + part + (3 << 20) < mine


REFUSED = {
    "plain": r"StateError: .*wrapped in FSDP1.*pass framework='fsdp1'",
    "summoned": r"StateError: the parameter 'cube'.* is in use \(summon_full_params\)",
    "state dict": r"StateError: states\['optimizer'\] is no torch optimizer.*pass the optimizer itself",
    "inside, orig": r"StateError: model tensor 'weight' .* FSDP1 unit .*pass the FullyShardedDataParallel module",
    "inside, flat": r"StateError: model tensor '_flat_param' .* FSDP1 unit .*pass the FullyShardedDataParallel module",
    "strides": r"StateError: the parameter 'weight'.*strides \(1, 6\).*make it contiguous before wrapping",
    "module": r"StateError: the Broken '_fsdp_wrapped_module.1' raised ZeroDivisionError: no state",
    "tensor parallelism": r"StateError: .*FSDP1 over tensor parallelism is not supported; use FSDP2",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(ranks4: Ranks, tmp_path: Path, case: str) -> None:
    for said in ranks4.run(fsdp1.refused, tmp_path / "checkpoint", case):
        assert re.match(REFUSED[case], said), said
    assert not any(tmp_path.iterdir())


def test_one_flat_parameter_has_one_set_of_hyper_parameters(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(any_to_any.train, tmp_path / "saved", Layout(slow=("bias", "scale")))
    (said,) = set(ranks4.run(fsdp1.load_refused, tmp_path / "saved", Layout(orig=False)))
    assert re.match(r"MismatchError: .*one param group has .* put them into different groups", said), said


def test_modules_may_stand_in_containers(ranks4: Ranks, tmp_path: Path) -> None:
    assert all(ranks4.run(fsdp1.chunks, tmp_path / "saved"))
    saved = logical(tmp_path / "saved")
    assert not differences(saved, logical(tmp_path / "again"))
    assert torch.equal(saved["model", "rest.0.cube"], Exact(1).cube)


def test_a_parameter_of_two_units_is_saved_by_both_names(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(fsdp1.tied_across_units, tmp_path / "saved")
    assert not differences(logical(tmp_path / "saved"), trained(0, 4).state())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # DCP's, in one process
@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_states_of_a_tied_weight_are_loaded_by_the_name_of_dcp(ranks4: Ranks, tmp_path: Path, *, orig: bool) -> None:
    twin = Twin()
    twin.step(0, 4)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = get_state_dict(twin.model, twin.optimizer, options=flat)
    assert "state.head.weight.exp_avg" not in optimizer
    state = {"model": model, "optim": optimizer}
    dcp.save(state, storage_writer=bcp.dcp.StorageWriter(tmp_path / "saved"), no_dist=True)
    ranks4.run(fsdp1.reload, tmp_path / "saved", tmp_path / "again", Layout(orig=orig))
    assert not differences(logical(tmp_path / "again"), twin.state())


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_a_step_during_a_snapshot_is_noticed(ranks4: Ranks, strategy: str, *, orig: bool) -> None:
    for changed, unchanged in ranks4.run(fsdp1.versions_seen, Layout(strategy=strategy, orig=orig)):
        assert changed
        assert not unchanged


def test_probe_names_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tested with torch 2.13" in Fsdp1Planner().probe()
    monkeypatch.delitem(FlatParameter.__annotations__, "_shard_param_infos")
    with pytest.raises(InputError, match="no _shard_param_infos; pin torch"):
        Fsdp1Planner().probe()
    monkeypatch.undo()
    monkeypatch.delattr(FlatParamHandle, "reshard")
    with pytest.raises(InputError, match="has no reshard"):
        Fsdp1Planner().probe()
