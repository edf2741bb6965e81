"""``{"optimizer": optimizer.state_dict()}``: named by the model beside it, or refused."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import sample
from torch import nn, optim

import bcp


def pair(*, stepped: bool, groups: bool = False) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(int(stepped))
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    named = dict(model.named_parameters())
    weights = [{"params": [p for name, p in named.items() if "weight" in name]}]
    biases = [{"params": [p for name, p in named.items() if "bias" in name], "weight_decay": 0.0}]
    optimizer = optim.AdamW([*weights, *biases] if groups else model.parameters(), lr=0.5 if stepped else 0.1)
    for _ in range(3 if stepped else 0):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def load(path: Path, model: nn.Module, optimizer: optim.Optimizer, through: str) -> None:
    """Load into an optimizer, or into its state dict, which the optimizer takes then."""
    if through == "optimizer":
        bcp.load(path, {"model": model, "optimizer": optimizer})
        return
    state = optimizer.state_dict()
    bcp.load(path, {"model": model, "optimizer": state})
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("given", [lambda model: model, nn.Module.state_dict], ids=["module", "state dict"])
@pytest.mark.parametrize("through", ["optimizer", "state dict"])
def test_a_state_dict_of_an_optimizer_loads(tmp_path: Path, groups: bool, given: Any, through: str) -> None:  # noqa: FBT001
    model, optimizer = pair(stepped=True, groups=groups)
    other, fresh = pair(stepped=False, groups=groups)
    bcp.save(tmp_path, {"model": given(model), "optimizer": optimizer.state_dict()})
    load(tmp_path, other, fresh, through)
    assert fresh.param_groups[0]["lr"] == 0.5
    for theirs, mine in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(theirs, mine)
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(value, fresh.state[mine][key])


def test_a_state_dict_without_a_model_is_refused(tmp_path: Path) -> None:
    _, optimizer = pair(stepped=True)
    with pytest.raises(bcp.StateError, match=r"there is no model beside it.*Pass the optimizer itself"):
        bcp.save(tmp_path / "ckpt", {"optimizer": optimizer.state_dict()})
    assert not [*tmp_path.rglob("*.safetensors")]


def test_numbers_that_the_model_does_not_tell_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = optim.AdamW([{"params": model[1].parameters()}, {"params": model[0].parameters()}])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(bcp.StateError, match=r"2 groups, and parameters of shape \[2, 2\] are in several"):
        bcp.save(tmp_path / "ckpt", {"model": model, "optimizer": optimizer.state_dict()})


def square(*, stepped: bool, named: bool) -> tuple[nn.Module, optim.Optimizer]:
    """Return a model whose sizes tell nothing, and an optimizer of its parameters in reverse."""
    torch.manual_seed(int(stepped))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = [*(model.named_parameters() if named else model.parameters())]
    optimizer = optim.Adam(parameters[::-1])
    if stepped:
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_names_that_torch_has_kept_are_used(tmp_path: Path) -> None:
    model, optimizer = square(stepped=True, named=True)
    other, fresh = square(stepped=False, named=True)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})
    bcp.load(tmp_path, {"model": other, "optimizer": fresh})
    for theirs, mine in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[theirs]["exp_avg"], fresh.state[mine]["exp_avg"])


def test_an_order_that_sizes_contradict_is_refused(tmp_path: Path) -> None:
    model, optimizer = square(stepped=True, named=False)
    with pytest.raises(bcp.StateError, match=r"its parameter 0 has shape \[4\], the model's \[4, 4\]"):
        bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize(
    ("inside", "place"),
    [
        (lambda state: [state], "at '0'"),
        (lambda state: {"G": state, "D": state}, "at 'G'"),
        (lambda state: {**state, "calls": 3}, r"with \['calls'\]"),
    ],
    ids=["list", "dict", "more keys"],
)
def test_a_state_dict_inside_of_a_container_is_refused(tmp_path: Path, inside: Any, place: str) -> None:
    model, optimizer = pair(stepped=True)
    with pytest.raises(bcp.StateError, match=f"has an optimizer's state_dict.. {place}"):
        bcp.save(tmp_path, {"model": model, "optimizer": inside(optimizer.state_dict())})


def head_first(model: nn.Sequential) -> list[Any]:
    return [*model[1].parameters(), *model[0].parameters()]


def head_first_in_groups(model: nn.Sequential) -> list[Any]:
    return [{"params": [model[1].weight, model[0].weight]}, {"params": [model[1].bias, model[0].bias], "lr": 0.25}]


def alike(make: Any, *, steps: int) -> tuple[nn.Module, optim.Optimizer]:
    """Return a model whose layers have one size, so that no size tells an order, and an optimizer of it."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = optim.Adam(make(model), lr=0.5 if steps else 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def assert_same(state: Any, other: Any) -> None:
    assert state["param_groups"] == other["param_groups"]
    assert state["state"].keys() == other["state"].keys()
    for number, values in state["state"].items():
        assert values.keys() == other["state"][number].keys()
        assert all(torch.equal(value, other["state"][number][key]) for key, value in values.items())


PAIRS: dict[str, tuple[Any, Any]] = {  # those that torch does not refuse
    "both in the model's order": (nn.Module.parameters, nn.Module.parameters),
    "both head first": (head_first, head_first),
    "saved head first": (head_first, nn.Module.parameters),
    "loaded head first": (nn.Module.parameters, head_first),
    "both head first in groups": (head_first_in_groups, head_first_in_groups),
}


@pytest.mark.parametrize("given", [lambda model: model, nn.Module.state_dict], ids=["module", "state dict"])
@pytest.mark.parametrize(
    ("through", "steps"),
    sample(itertools.product(["optimizer", "state dict"], [0, 1]), ("optimizer", 1), ("state dict", 0)),
    ids=["optimizer-fresh", "optimizer-stepped", "state dict-fresh", "state dict-stepped"],
)
@pytest.mark.parametrize(("there", "here"), PAIRS.values(), ids=PAIRS)
def test_numbers_mean_what_they_mean_for_torch(
    tmp_path: Path, there: Any, here: Any, steps: int, through: str, given: Any
) -> None:
    model, optimizer = alike(there, steps=3)
    other, target = alike(here, steps=steps)
    wanted = optim.Adam(here(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    wanted.load_state_dict(optimizer.state_dict())
    bcp.save(tmp_path, {"model": given(model), "optimizer": optimizer.state_dict()})
    load(tmp_path, other, target, through)
    assert_same(target.state_dict(), wanted.state_dict())


def test_other_groups_in_another_order_are_refused(tmp_path: Path) -> None:
    model, optimizer = alike(head_first, steps=1)
    other, fresh = alike(head_first_in_groups, steps=0)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})
    before = other[0].weight.detach().clone()
    with pytest.raises(bcp.StateError, match=r"0 was taken for '0.weight' \[4, 4\].*: 0 is '1.weight' \[4, 4\].*order"):
        bcp.load(tmp_path, {"model": other, "optimizer": fresh})
    assert torch.equal(other[0].weight, before)
    assert not fresh.state


def test_a_part_of_a_model_gets_its_states_by_names_which_a_warning_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = alike(nn.Module.parameters, steps=2)
    other, fresh = alike(lambda model: model[1].parameters(), steps=0)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})
    with caplog.at_level(logging.WARNING, "bcp"):
        bcp.load(tmp_path, {"model": other, "optimizer": fresh}, strict=False)
    assert "another number of parameters" in caplog.text
    for theirs, mine in zip(model[1].parameters(), other[1].parameters(), strict=True):
        assert torch.equal(optimizer.state[theirs]["exp_avg"], fresh.state[mine]["exp_avg"])


def test_masters_without_sure_names_are_not_taken_for_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
    optimizer = optim.SGD(head_first(model))
    for parameter in model.parameters():
        optimizer.state[parameter]["master_param"] = parameter.detach().float()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(bcp.DtypeMismatchError, match="weight is bfloat16 in the checkpoint"):
        bcp.load(tmp_path, {"model": other})
    bcp.load(tmp_path, {"model": other}, options=bcp.LoadOptions(cast=True))
    assert all(map(torch.equal, other.state_dict().values(), model.float().state_dict().values()))


def test_a_master_that_was_saved_by_an_order_is_not_read_from_a_weight_of_another_parameter(tmp_path: Path) -> None:
    model, optimizer = alike(head_first, steps=1)
    other, target = alike(head_first, steps=1)
    for parameter in target.state:
        target.state[parameter]["master_param"] = parameter.detach().clone()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})
    with pytest.raises(bcp.StateError, match="cannot be told which states are whose"):
        bcp.load(tmp_path, {"model": other, "optimizer": target})


def test_other_groups_in_the_order_of_the_model_are_loaded_by_name(tmp_path: Path) -> None:
    model, optimizer = alike(nn.Module.parameters, steps=2)
    other, fresh = alike(
        lambda model: [{"params": [layer.weight for layer in model]}, {"params": [layer.bias for layer in model]}],
        steps=0,
    )
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})
    bcp.load(tmp_path, {"model": other, "optimizer": fresh})
    for theirs, mine in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[theirs]["exp_avg"], fresh.state[mine]["exp_avg"])


class Masked(nn.Module):
    """Has buffers of the sizes of its parameters, and parameters behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4))
        self.first.register_buffer("seen", torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.scale * self.mask


@pytest.mark.parametrize("named", [False, True], ids=["numbers", "param_names"])
def test_buffers_in_a_state_dict_are_no_parameters(tmp_path: Path, named: bool) -> None:  # noqa: FBT001
    model, other = Masked(), Masked()
    optimizer, fresh = (
        optim.Adam(list(some.named_parameters())[::-1] if named else some.parameters()) for some in (model, other)
    )
    model(torch.randn(2, 4)).square().sum().backward()
    optimizer.step()
    bcp.save(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    bcp.load(tmp_path, {"model": other, "optimizer": fresh})
    wanted = optim.Adam(fresh.param_groups[0]["params"])
    wanted.load_state_dict(optimizer.state_dict())
    assert_same(fresh.state_dict(), wanted.state_dict())


def test_tensors_that_may_be_buffers_are_refused_with_their_number(tmp_path: Path) -> None:
    weight, mask = nn.Parameter(torch.ones(4)), torch.ones(4)
    optimizer = optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    states = {"model": {"w": weight.detach(), "mask": mask}, "optimizer": optimizer.state_dict()}
    words = r"it has 1 parameters, and the model's state dict has 2 tensors .*\(w \[4\], mask \[4\]\); pass the module"
    with pytest.raises(bcp.StateError, match=words):
        bcp.save(tmp_path / "ckpt", states)
    assert not [*tmp_path.rglob("*.safetensors")]


def test_buffers_of_other_sizes_stand_in_no_ones_way(tmp_path: Path) -> None:
    model, optimizer = pair(stepped=True, groups=True)
    model.register_buffer("table", torch.ones(7))
    other, fresh = pair(stepped=False, groups=True)
    other.register_buffer("table", torch.ones(7))
    bcp.save(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    bcp.load(tmp_path, {"model": other, "optimizer": fresh})
    for theirs, mine in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[theirs]["exp_avg"], fresh.state[mine]["exp_avg"])


def test_numbers_of_renamed_and_joined_parameters_do_not_stand_in_the_way(tmp_path: Path) -> None:
    model, optimizer = alike(head_first, steps=1)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})
    other = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    fresh = optim.Adam([*other["b"].parameters(), *other["a"].parameters()])
    rename = bcp.LoadOptions(rename=lambda fqn: fqn.replace("0", "a").replace("1", "b"))
    bcp.load(tmp_path, {"model": other, "optimizer": fresh}, options=rename)
    wanted = optim.Adam(fresh.param_groups[0]["params"])
    wanted.load_state_dict(optimizer.state_dict())
    assert_same(fresh.state_dict(), wanted.state_dict())

    class Joined:
        def blocks(self, fqn: str, shape: tuple[int, ...]) -> list[bcp.Moved]:
            number, _, leaf = fqn.partition(".")
            corner = (4 * int(number), *(0 for _ in shape[1:]))
            return [bcp.Moved(saved=bcp.Box.whole(shape), fqn=leaf, shape=(8, *shape[1:]), at=corner)]

    joined = nn.Linear(4, 8)
    fresh = optim.Adam(joined.parameters())
    bcp.load(tmp_path, {"model": joined, "optimizer": fresh}, options=bcp.LoadOptions(rename=Joined()))
    assert torch.equal(joined.weight, torch.cat([layer.weight for layer in model]))
    assert len(fresh.state) == 2


def test_groups_of_other_sizes_are_refused_as_torch_does(tmp_path: Path) -> None:
    model, optimizer = alike(nn.Module.parameters, steps=1)
    other, target = alike(head_first_in_groups, steps=0)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer.state_dict()})
    with pytest.raises(ValueError, match="different number of parameter groups"):
        target.load_state_dict(optimizer.state_dict())
    with pytest.raises(bcp.StateError, match="the order and the groups of the saved one"):
        bcp.load(tmp_path, {"model": other, "optimizer": target})
    with pytest.raises(bcp.StateError, match="it cannot be told which parameter is meant"):
        bcp.load(tmp_path, {"model": other, "optimizer": target.state_dict()})
