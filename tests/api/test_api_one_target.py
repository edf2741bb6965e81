"""A target at several places, or in memory of another one, takes one value: no value replaces another one silently."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import sample
from torch import nn, optim

import bcp


class Counted:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", sample(["extra_states", "dataloader"], "dataloader"))
@pytest.mark.parametrize(
    ("best", "last", "shared"),
    [
        (torch.ones(2), torch.full((2,), 2.0), torch.zeros(2)),
        ({"loss": 1.0}, {"loss": 2.0}, {"loss": 0.0}),
        ({"weight": torch.ones(2)}, {"weight": torch.zeros(2)}, {"weight": torch.full((2,), 5.0)}),
        ([1], [2, 3], []),
        (seeded(1), seeded(2), seeded(0)),
        (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse(), torch.ones(2, 2).to_sparse()),
    ],
    ids=["tensor", "dict", "tensors in a dict", "list", "generator", "sparse tensor"],
)
def test_one_object_at_two_places_becomes_two(tmp_path: Path, kind: str, best: Any, last: Any, shared: Any) -> None:
    bcp.save(tmp_path / "c", {kind: {"best": best, "last": last}})
    target = {"best": shared, "last": shared}
    bcp.load(tmp_path / "c", {kind: target})
    alone: dict[str, Any] = {}
    bcp.load(tmp_path / "c", {kind: alone})
    assert plain(target) == plain(alone) == plain({"best": best, "last": last})


def plain(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.initial_seed()
    if isinstance(value, torch.Tensor):
        return value.to_dense().tolist()
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return value


def test_one_object_at_two_places_with_one_value_stays_one(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"extra_states": {"best": {"w": torch.ones(2)}, "last": {"w": torch.ones(2)}}})
    shared = {"w": torch.zeros(2)}
    target, tensor = {"best": shared, "last": shared}, shared["w"]
    bcp.load(tmp_path / "c", {"extra_states": target})
    assert target["best"] is target["last"] is shared
    assert shared["w"] is tensor
    assert tensor.tolist() == [1, 1]


def test_tensors_that_overlap_in_part_get_their_values(tmp_path: Path) -> None:
    values = {"head": torch.ones(3), "tail": torch.full((3,), 2.0), "apart": torch.full((2,), 3.0)}
    bcp.save(tmp_path / "c", {"extra_states": values})
    memory = torch.zeros(6)
    target = {"head": memory[:3], "tail": memory[1:4], "apart": memory[4:]}
    apart = target["apart"]
    bcp.load(tmp_path / "c", {"extra_states": target})
    assert {key: value.tolist() for key, value in target.items()} == {k: v.tolist() for k, v in values.items()}
    assert target["apart"] is apart  # nobody else has these elements


@pytest.mark.parametrize("place", ["module", "state dict", "in a Run"])
def test_extra_states_in_the_model_s_memory_leave_the_model_alone(tmp_path: Path, place: str) -> None:
    model = net()
    best = {key: value + 7 for key, value in model.state_dict().items()}
    target = net()
    states: dict[str, Any] = {"model": target, "extra_states": {"best": target.state_dict()}}
    if place == "in a Run":
        with bcp.Run(tmp_path / "run", {"model": model, "extra_states": {"best": best}}, save=1) as run:
            run.resume()
            run.maybe_save(1)
        with bcp.Run(tmp_path / "run", states, save=1) as run:
            assert run.resume() == 1
    else:
        states["model"] = target if place == "module" else target.state_dict()
        bcp.save(tmp_path / "c", {"model": model, "extra_states": {"best": best}})
        bcp.load(tmp_path / "c", states)
    loaded = states["extra_states"]["best"]
    for key, value in model.state_dict().items():
        assert torch.equal(target.state_dict()[key], value)
        assert torch.equal(loaded[key], best[key])


def test_extra_states_in_the_optimizer_s_memory_leave_it_alone(tmp_path: Path) -> None:
    def made(rate: float) -> tuple[nn.Module, optim.Optimizer]:
        model = net()
        optimizer = optim.Adam(model.parameters(), lr=torch.tensor(rate), foreach=False)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(0.25)
    first = torch.full((2, 2), 3.0)
    bcp.save(
        tmp_path / "c",
        {"model": model, "optimizer": optimizer, "extra_states": {"rate": torch.tensor(0.5), "first": first}},
    )
    target, of_target = made(0.125)
    moment = of_target.state[target[0].weight]["exp_avg"]  # type: ignore[index]
    extra = {"rate": of_target.param_groups[0]["lr"], "first": moment}
    bcp.load(tmp_path / "c", {"model": target, "optimizer": of_target, "extra_states": extra})
    assert of_target.param_groups[0]["lr"].item() == 0.25
    assert torch.equal(moment, optimizer.state[model[0].weight]["exp_avg"])  # type: ignore[index]
    assert extra["rate"].item() == 0.5
    assert torch.equal(extra["first"], first)


def test_one_owner_with_two_states_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"extra_states": {"a": Counted(1), "b": Counted(2)}})
    owner = Counted(0)
    with pytest.raises(bcp.StateError, match=r"extra_states\.b is a Counted that stands at another place"):
        bcp.load(tmp_path / "c", {"extra_states": {"a": owner, "b": owner}})
    bcp.save(tmp_path / "d", {"extra_states": {"a": Counted(3), "b": Counted(3)}})
    bcp.load(tmp_path / "d", {"extra_states": {"a": owner, "b": owner}})
    assert owner.count == 3


@pytest.mark.parametrize("several", [False, True], ids=["groups", "optimizers"])
def test_a_default_that_is_a_tensor_takes_the_rate_of_each_group(
    tmp_path: Path,
    several: bool,  # noqa: FBT001 -- a parameter
) -> None:
    def made(model: nn.Sequential, first: torch.Tensor, second: torch.Tensor) -> Any:
        if several:
            return [optim.Adam(part.parameters(), lr=rate) for part, rate in zip(model, (first, second), strict=True)]
        one, other = ({"params": list(part.parameters())} for part in model)
        groups = [one, other] if first is second else [one | {"lr": first}, other | {"lr": second}]
        return optim.Adam(groups, lr=first)

    def rates(optimizer: Any) -> list[float]:
        parts = optimizer if several else [optimizer]
        return [group["lr"].item() for part in parts for group in part.param_groups]

    model, target = net(), net()
    optimizer = made(model, torch.tensor(0.25), torch.tensor(0.5))
    bcp.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    rate = torch.tensor(1.0)
    of_target = made(target, rate, rate)
    bcp.load(tmp_path / "c", {"model": target, "optimizer": of_target})
    assert rates(of_target) == rates(optimizer) == [0.25, 0.5]


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(list, items)])
def test_items_come_back_in_the_saved_order(tmp_path: Path, kind: Any) -> None:
    bcp.save(tmp_path / "c", {"extra_states": {"cache": kind({"b": 1, "c": 2, "a": 3})}})
    cache = kind({"a": 0, "own": 9, "b": 0, "c": 0})
    target = {"cache": cache}
    bcp.load(tmp_path / "c", {"extra_states": target})
    assert target["cache"] is cache
    assert list(cache.items()) == [("own", 9), ("b", 1), ("c", 2), ("a", 3)]


def test_one_dict_at_two_places_of_a_model_is_refused_if_its_values_differ(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", {"model": {"a": {"n": 1, "m": 3}, "b": {"n": 2, "m": 3}}})
    shared = {"n": 0, "m": 0}
    with pytest.raises(bcp.StateError, match=r"'a\.n' and 'b\.n' are one place in the target"):
        bcp.load(tmp_path / "c", {"model": {"a": shared, "b": shared}})
    bcp.save(tmp_path / "d", {"model": {"a": {"n": 1, "m": 3}, "b": {"n": 1, "m": 3}}})
    bcp.load(tmp_path / "d", {"model": {"a": shared, "b": shared}})
    assert shared == {"n": 1, "m": 3}
