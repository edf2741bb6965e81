"""A checkpoint of every framework but Megatron is loaded by every other, found out by itself, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import any_to_any
import pytest
import torch
from any_to_any import How, Renamed, Task, data_parallel, dtype_of, goes_on
from exact import ADAMW, trained
from fsdp1 import Layout
from logical import differences, hyper, logical
from ranks import Ranks
from samples import sample

import bcp

pytestmark = pytest.mark.dist

Saved, PoolOf = Callable[[How], Path], Callable[[How], Ranks]

FULL, FLAT, MIXED = Layout(), Layout(orig=False), Layout(mixed=True)
FSDP2, DDP = Layout("fsdp2", size=2), Layout("ddp", size=2)
PLANNERS: dict[How, str] = {
    Layout("plain", size=1): "plain",
    **dict.fromkeys((DDP, Layout("zero1")), "ddp"),
    **dict.fromkeys((FULL, FLAT), "fsdp1"),
    **dict.fromkeys((FSDP2, "tp_fsdp2", "hsdp"), "fsdp2"),
    "ragged": "vescale",
    **dict.fromkeys(("z1/fp32", "z2/fp32", "z3/fp32"), "deepspeed"),
}
FRAMEWORKS = list(PLANNERS)
ALL = [(before, after) for before in FRAMEWORKS for after in FRAMEWORKS if before != after]
FEW = list({(PLANNERS[before], PLANNERS[after]): (before, after) for before, after in ALL}.values())
"""One pair for any two planners; every eighth one is in make test. All pairs together take minutes."""
MORE = [pair for pair in ALL if pair not in FEW]
"""Pairs whose two planners another pair has."""
BF16: list[tuple[How, How]] = [
    *(("z1/bf16", DDP), ("z2/bf16", FSDP2), ("z3/bf16", FSDP2)),
    *((DDP, "z1/bf16"), (FSDP2, "z2/bf16"), (FSDP2, "z3/bf16"), (MIXED, "z3/bf16")),
]

SAVED_ADAMW = {**ADAMW, "betas": {"tuple": list(ADAMW["betas"])}}


@pytest.mark.parametrize("how", FRAMEWORKS, ids=str)
def test_the_framework_is_found_out(pool_of: PoolOf, how: How) -> None:
    assert set(pool_of(how).run(any_to_any.planner_of, how)) - {None} == {PLANNERS[how]}


@pytest.mark.parametrize("how", sample(FRAMEWORKS, *FRAMEWORKS[::2]), ids=str)
def test_a_checkpoint_is_what_unsharded_training_gives(saved: Saved, how: How) -> None:
    assert not differences(logical(saved(how)), trained(2, data_parallel(how)).state())


@pytest.mark.parametrize(("before", "after"), sample(ALL, *FEW[::8], full=MORE), ids=str)
def test_training_goes_on_in_any_other_framework(
    pool_of: PoolOf, tmp_path: Path, saved: Saved, before: How, after: How
) -> None:
    twin = trained(2, data_parallel(before))
    goes_on(pool_of(after), saved(before), tmp_path, twin, after)
    known, found = hyper(saved(before)), hyper(tmp_path / "again")
    assert {name: known[name] for name in known.keys() & found.keys() if known[name] != found[name]} == {}
    for fqn in twin.masters:
        assert {key: found["optimizer", f"param_groups.{fqn}.{key}"] for key in ADAMW} == SAVED_ADAMW


@pytest.mark.parametrize("after", sample(FRAMEWORKS, *FRAMEWORKS[::4]), ids=str)
def test_states_from_other_steps_are_overwritten(pool_of: PoolOf, tmp_path: Path, saved: Saved, after: How) -> None:
    before = FSDP2 if after is FLAT else FLAT
    goes_on(pool_of(after), saved(before), tmp_path, trained(2, data_parallel(before)), after, Task(steps_before=1))


@pytest.mark.parametrize(("before", "after"), sample(BF16, *BF16[::4]), ids=str)
def test_16_bits_are_loaded_from_and_into_32(
    pool_of: PoolOf, tmp_path: Path, saved: Saved, before: How, after: How
) -> None:
    task = Task(options=bcp.LoadOptions(cast=dtype_of(after) is torch.bfloat16))
    twin = trained(2, data_parallel(before), dtype=dtype_of(before))
    goes_on(pool_of(after), saved(before), tmp_path, twin, after, task)


def test_masters_survive_a_framework_without_them(pool_of: PoolOf, tmp_path: Path, saved: Saved) -> None:
    twin = trained(2, 4, dtype=torch.bfloat16)
    goes_on(pool_of(FSDP2), saved("z2/bf16"), tmp_path / "fsdp2", twin, FSDP2)
    back = Task(number=3, options=bcp.LoadOptions(cast=True))
    goes_on(pool_of("z2/bf16"), tmp_path / "fsdp2" / "stepped", tmp_path / "back", twin, "z2/bf16", back)


@pytest.mark.parametrize("after", [FLAT, "z3/bf16"], ids=str)
def test_mixed_precision_is_loaded_under_other_names(pool_of: PoolOf, tmp_path: Path, saved: Saved, after: How) -> None:
    rename = [(r"^blocks\.(\d+)\.", r"layers.\1.")]
    task = Task(make=Renamed, options=bcp.LoadOptions(rename=rename, cast=dtype_of(after) is torch.bfloat16))
    twin = trained(2, 4, model=Renamed())
    goes_on(pool_of(after), saved(MIXED), tmp_path, twin, after, task)
