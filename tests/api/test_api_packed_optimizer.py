"""``{"optimizer": optimizer.state_dict()}``: named by the model beside it, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("given", [lambda model: model, nn.Module.state_dict], ids=["module", "state dict"])
@pytest.mark.parametrize("through", ["optimizer", "state dict"])
def test_a_state_dict_of_an_optimizer_loads(tmp_path: Path, groups: bool, given: Any, through: str) -> None:  # noqa: FBT001
    model, optimizer = pair(stepped=True, groups=groups)
    other, fresh = pair(stepped=False, groups=groups)
    bcp.save(tmp_path, {"model": given(model), "optimizer": optimizer.state_dict()})
    if through == "optimizer":
        bcp.load(tmp_path, {"model": other, "optimizer": fresh})
    else:
        state = fresh.state_dict()
        if groups:  # no size tells which parameter has which number
            with pytest.raises(bcp.StateError, match="no state tells the shape"):
                bcp.load(tmp_path, {"model": other, "optimizer": state})
            return
        bcp.load(tmp_path, {"model": other, "optimizer": state})
        fresh.load_state_dict(state)
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
