from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dtensor_layouts as jobs
import pytest
import torch
from exact import Exact, Twin, trained
from logical import State, differences, logical
from ranks import Ranks
from samples import sample

import bcp

pytestmark = pytest.mark.dist

DATA_PARALLEL = {"tp_fsdp2": 2}
"""Layouts that take a step with another number of batches than four."""

MOVES = [
    ("hsdp", "last_dim"),
    ("last_dim", "tp_fsdp2"),
    ("ddp", "tp"),
    ("tp", "plain"),
]


@pytest.mark.parametrize(("saved", "loaded"), sample(MOVES, *MOVES[::2]))
def test_trained_states_load_under_another_layout_to_the_bit(
    ranks4: Ranks, tmp_path: Path, saved: str, loaded: str
) -> None:
    first, again, after = (tmp_path / name for name in ("first", "again", "after"))
    ranks4.run(jobs.train_and_save, saved, first)
    twin = trained(jobs.STEPS, DATA_PARALLEL.get(saved, 4))
    assert not differences(logical(first), twin.state())
    ranks4.run(jobs.load_and_save, loaded, first, again, after)
    assert not differences(logical(again), logical(first))
    twin.step(jobs.STEPS, DATA_PARALLEL.get(loaded, 4))
    assert not differences(logical(after), twin.state())


@pytest.fixture(scope="module")
def ranks8() -> Iterator[Ranks]:
    ranks = Ranks(8)
    yield ranks
    ranks.close()


def test_nine_rows_over_tp_2_and_fsdp2_4(ranks8: Ranks, tmp_path: Path) -> None:
    first, again, after = (tmp_path / name for name in ("first", "again", "after"))
    ranks8.run(jobs.train_and_save, "tp_fsdp2", first, jobs.nine)
    twin = Twin(model=jobs.nine(0))
    for step in range(jobs.STEPS):
        twin.step(step, 4)
    assert not differences(logical(first), twin.state())
    ranks8.run(jobs.load_and_save, "fsdp2", first, again, after, jobs.nine)
    assert not differences(logical(again), logical(first))
    twin.step(jobs.STEPS, 8)
    assert not differences(logical(after), twin.state())
    empty = (
        tmp_path / "empty"
    )  # over TP 4 the last rank has none of the 9 columns; torch loads that, and cannot train it
    ranks8.run(jobs.load_and_save, "tp4_fsdp2", first, empty, None, jobs.nine)
    assert not differences(logical(empty), logical(first))


def test_fsdp2_over_a_mesh_of_two_dimensions(ranks8: Ranks, tmp_path: Path) -> None:
    whole = dict(jobs.grid().named_parameters())
    for gathered in ranks8.run(jobs.save_grid, tmp_path / "on8"):
        assert all(torch.equal(gathered[name], values) for name, values in whole.items())
    target = jobs.grid(empty=True)
    bcp.load(tmp_path / "on8", {"model": target})
    assert all(torch.equal(parameter, whole[name]) for name, parameter in target.named_parameters())
    bcp.save(tmp_path / "on1", {"model": jobs.grid()})
    for gathered in ranks8.run(jobs.load_grid, tmp_path / "on1"):
        assert all(torch.equal(gathered[name], values) for name, values in whole.items())


def test_stages_on_parts_of_the_ranks(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(jobs.stages, tmp_path)
    expected = {("model", f"blocks.{fqn}"): value.detach() for fqn, value in Exact().blocks.named_parameters()}
    assert not differences(logical(tmp_path), expected)


def test_experts_on_another_mesh_than_dense_parameters(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(jobs.save_experts, tmp_path / "2", 2)
    found = logical(tmp_path / "2")
    names = {name for kind, name in found if kind == "model"}
    assert {f"experts.{at}.{part}" for at in range(jobs.EXPERTS) for part in ("weight", "bias")} < names
    assert not differences({name: found[name] for name in found if name[0] == "model"}, _experts())
    ranks4.run(jobs.load_experts, tmp_path / "2", 1, tmp_path / "1")
    ranks4.run(jobs.load_experts, tmp_path / "1", 2, tmp_path / "again")
    for path in (tmp_path / "1", tmp_path / "again"):
        assert not differences(logical(path), found)


def _experts() -> State:
    """The parameters after one step with gradients of 1, in one piece."""
    modules = [("moe", jobs.Mixture(0)), *((f"experts.{at}", expert) for at, expert in enumerate(jobs.experts(0)))]
    named = {f"{prefix}.{fqn}": p for prefix, module in modules for fqn, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(named.values(), **jobs.ADAMW)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {("model", name): parameter.detach() for name, parameter in named.items()}


def test_local_tensors_that_say_by_closures_which_rows_they_are(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(jobs.hooked_parameters, tmp_path / "first")
    found = logical(tmp_path / "first")
    parameter = torch.nn.Parameter(torch.arange(33.0).view(11, 3))
    optimizer = torch.optim.AdamW([parameter], **jobs.ADAMW)
    parameter.grad = parameter.detach() + 1
    optimizer.step()
    states = {("optimizer", f"state.w.{key}"): value for key, value in optimizer.state[parameter].items()}
    assert not differences(found, {("model", "w"): parameter.detach(), **states})
    assert not differences(logical(tmp_path / "again"), found)


def test_several_local_shards_in_one_dtensor(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(jobs.wrapped_shards, tmp_path)
    assert torch.equal(logical(tmp_path)["model", "table"], torch.arange(56.0).view(8, 7))
