"""States, groups and step counts that optimizers of torch's own do not have: as torch's state dict brings them back."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import exactly_alike
from samples import sample_of
from torch import nn, optim

import bcp


class Own(optim.Optimizer):
    """Keeps what it is given of each parameter."""

    def __init__(self, parameters: Any, values: dict[Any, Any] | None = None) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for group in self.param_groups:
            for parameter in group["params"] if values else ():
                self.state[parameter] = {**values, "size": torch.full_like(parameter, 3.0, dtype=torch.float32)}


def reloaded(path: Path, model: nn.Module, optimizer: optim.Optimizer, make: Any) -> tuple[Any, Any]:
    """Return the state dict of an optimizer that bcp has loaded, and of one that torch has."""
    other, fresh = make()
    bcp.save(path, {"model": model, "optimizer": optimizer})
    bcp.load(path, {"model": other, "optimizer": fresh})
    _, wanted = make()
    wanted.load_state_dict(optimizer.state_dict())
    return fresh.state_dict(), wanted.state_dict()


VALUES: dict[str, dict[Any, Any]] = {
    "master": {"master_param": torch.arange(3.0)},
    "master beside others": {"master_param": torch.arange(12.0).view(3, 4), "exp_avg": torch.ones(3, 4), "step": 3},
    "master that is no tensor": {"master_param": {"scale": 0.5, "of": [torch.ones(2)]}},
    "mark of nothing": {":empty": torch.ones(3)},
    "mark of nothing, no tensor": {":empty": 5},
    "ending of a tree": {"a:tree": torch.ones(3)},
    "ending of a tree, no tensor": {"a:tree": 2, "b:tree:tree": 1},
    "mark of a count": {"step:int": torch.ones(2), "step:float": 4},
    "number": {":number=0": torch.ones(2), "step": 2.0},
    "true": {"step": True},
    "many digits": {"step": 2**60 + 1},
    "most digits of a float": {"step": 2**53 - 1},
    "negative": {"step": -(2**40)},
    "infinite": {"step": float("inf")},
    "half": {"step": 2.5},
}


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("values", sample_of(VALUES, *list(VALUES)[::2]))
def test_states_arrive_with_their_names_and_kinds(tmp_path: Path, values: dict[Any, Any], used: bool) -> None:  # noqa: FBT001
    model = nn.Linear(4, 3)

    def make() -> tuple[nn.Module, optim.Optimizer]:
        other = nn.Linear(4, 3)
        zeros = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 7 for k, v in values.items()}
        return other, Own(other.parameters(), zeros if used else None)

    loaded, wanted = reloaded(tmp_path, model, Own(model.parameters(), values), make)
    for number, states in wanted["state"].items():
        assert loaded["state"][number].keys() == states.keys()
        for key, value in states.items():
            assert exactly_alike(loaded["state"][number][key], value), key


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_a_master_in_the_states_of_torchs_own_optimizer_arrives(tmp_path: Path, low: bool) -> None:  # noqa: FBT001
    def make(*, stepped: bool = False) -> tuple[nn.Module, optim.Optimizer]:
        model = nn.Linear(4, 3, dtype=torch.bfloat16 if low else torch.float32)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if stepped:
            model(torch.ones(2, 4, dtype=model.weight.dtype)).sum().backward()
            optimizer.step()
            for parameter, states in optimizer.state.items():
                states["master_param"] = torch.rand(parameter.shape)
        return model, optimizer

    model, optimizer = make(stepped=True)
    other, fresh = make()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": fresh})
    for theirs, mine in zip(model.parameters(), other.parameters(), strict=True):
        assert exactly_alike(dict(optimizer.state[theirs]), dict(fresh.state[mine]))


@pytest.mark.parametrize(
    ("values", "name"),
    [({"a": [torch.ones(2)], "a:tree": torch.ones(3)}, "a:tree"), ({"step": 3, "step:int": torch.ones(2)}, "step:int")],
    ids=["tree", "count"],
)
def test_two_states_of_one_name_are_refused(tmp_path: Path, values: dict[Any, Any], name: str) -> None:
    model = nn.Linear(4, 3)
    optimizer = Own(model.parameters(), values)
    with pytest.raises(bcp.StateError, match=rf"two leaves .* 'state\.weight\.{name}'"):
        bcp.save(tmp_path / "ckpt", {"model": model, "optimizer": optimizer})
    assert not [*tmp_path.rglob("*.safetensors")]


def in_groups(model: nn.Module, lr: Any, *, empty: bool = True) -> optim.Optimizer:
    groups = [{"params": [], "lr": lr, "tag": "none"}] if empty else []
    return optim.AdamW([*groups, {"params": list(model.parameters())}], lr=0.1)


@pytest.mark.parametrize("packed", [False, True], ids=["optimizer", "state dict"])
@pytest.mark.parametrize("lr", [0.7, torch.tensor(0.7)], ids=["float", "tensor"])
def test_a_group_without_parameters_arrives(tmp_path: Path, packed: bool, lr: Any) -> None:  # noqa: FBT001
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer, fresh = in_groups(model, lr), in_groups(other, torch.zeros(()) if isinstance(lr, torch.Tensor) else 0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict() if packed else optimizer})
    target = fresh.state_dict() if packed else fresh
    bcp.load(tmp_path, {"model": other, "optimizer": target})
    if packed:
        fresh.load_state_dict(target)
    wanted = in_groups(nn.Linear(4, 3), 0.9)
    wanted.load_state_dict(optimizer.state_dict())
    assert exactly_alike(fresh.state_dict()["param_groups"], wanted.state_dict()["param_groups"])


def test_a_wrapper_has_its_groups_without_parameters_too(tmp_path: Path) -> None:
    class Wrapper(optim.Optimizer):
        def __init__(self, model: nn.Module, lr: float) -> None:
            super().__init__([{"params": list(model.parameters())}, {"params": [], "rho": lr}], {"rho": 0.5})
            self.base = in_groups(model, lr)

    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    bcp.save(tmp_path, {"model": model, "optimizer": Wrapper(model, 0.7)})
    target = Wrapper(other, 0.9)
    bcp.load(tmp_path, {"model": other, "optimizer": target})
    assert target.param_groups[1]["rho"] == target.base.param_groups[0]["lr"] == 0.7


def test_a_group_without_parameters_that_the_target_lacks_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    bcp.save(tmp_path, {"model": model, "optimizer": in_groups(model, 0.7)})
    with caplog.at_level(logging.WARNING, "bcp"):
        bcp.load(tmp_path, {"model": other, "optimizer": in_groups(other, 0.9, empty=False)})
    assert "groups.0.0.0.lr" in caplog.text


def test_a_key_of_a_group_that_is_no_string_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = optim.SGD([{"params": model.parameters(), 3: 0.5}], lr=0.1)
    with pytest.raises(bcp.StateError, match=r"the key 3 of type int"):
        bcp.save(tmp_path / "ckpt", {"model": model, "optimizer": optimizer})
    assert not [*tmp_path.rglob("*.safetensors")]


@pytest.mark.parametrize("states", [[torch.ones(2)], torch.ones(2), 5], ids=["list", "tensor", "number"])
def test_states_of_a_parameter_that_are_no_dict_are_refused_by_name(tmp_path: Path, states: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters())
    optimizer.state[model.weight] = states
    refused = pytest.raises(bcp.StateError, match="the state of 'weight' is no dict; keep a dict of names")
    with refused:
        bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.save(tmp_path, {"model": model, "optimizer": optim.SGD(model.parameters())})
    with refused:
        bcp.load(tmp_path, {"model": model, "optimizer": optimizer})
