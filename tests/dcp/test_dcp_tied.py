"""The optimizer state of a tied parameter is found, whichever of its names a library has chosen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import bcp
import bcp.dcp

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # DCP's, in one process


class Net(nn.Module):
    """A model whose first name of the tied weight is the last one in the alphabet: torch takes it, and bcp does not."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.mid = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.lm_head(self.mid(self.wte(tokens)))


def made(seed: int, *, steps: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    train(model, optimizer, steps)
    return model, optimizer


def train(model: Net, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()


def goes_on_as(model: Net, optimizer: torch.optim.Optimizer, first: tuple[Net, torch.optim.Optimizer]) -> bool:
    """Train a step with both; whether all weights are equal to the last bit."""
    twin = copy.deepcopy(first)
    train(*twin)
    train(model, optimizer)
    return all(torch.equal(one, two) for one, two in zip(model.parameters(), twin[0].parameters(), strict=True))


@pytest.mark.parametrize("steps", [0, 2], ids=["new", "stepped"])
@pytest.mark.parametrize("by", ["dcp", "bcp.dcp"])
def test_what_dcp_has_saved_loads_strictly(tmp_path: Path, by: str, steps: int) -> None:
    first = made(0, steps=1)
    model_state, optimizer_state = get_state_dict(*first, options=FLAT)
    writer = None if by == "dcp" else bcp.dcp.StorageWriter(tmp_path / "ckpt")
    state = {"model": model_state, "optim": optimizer_state}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", storage_writer=writer, no_dist=True)
    model, optimizer = made(1, steps=steps)
    result = bcp.load(tmp_path / "ckpt", {"model": model, "optimizer": optimizer})
    assert (result.missing, result.unexpected) == ((), ())
    assert goes_on_as(model, optimizer, first)


@pytest.mark.parametrize("by", ["export", "reader"])
def test_dcp_loads_what_bcp_has_saved(tmp_path: Path, by: str) -> None:
    first = made(0, steps=1)
    bcp.save(tmp_path / "ckpt", {"model": first[0], "optimizer": first[1]})
    reader = None
    if by == "export":
        bcp.tools.export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    else:
        reader = bcp.dcp.StorageReader(tmp_path / "ckpt")
    model, optimizer = made(1, steps=1)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=FLAT)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path / "dcp" if reader is None else None, storage_reader=reader, no_dist=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=FLAT,
    )
    assert goes_on_as(model, optimizer, first)


def test_a_name_with_states_is_before_one_with_hyper_parameters_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = Net()
    saved.lm_head.weight = nn.Parameter(saved.wte.weight.detach().clone(), requires_grad=False)
    adam = torch.optim.AdamW(saved.parameters())
    train(saved, adam)
    saved.lm_head.weight.data.copy_(saved.wte.weight.detach())
    bcp.save(tmp_path, {"model": saved, "optimizer": adam})
    model, optimizer = made(1, steps=1)
    assert bcp.load(tmp_path, {"model": model, "optimizer": optimizer}).missing == ()
    assert torch.equal(optimizer.state[model.wte.weight]["exp_avg"], adam.state[saved.wte.weight]["exp_avg"])


def test_differing_states_under_both_names_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = Net()
    saved.lm_head.weight = nn.Parameter(saved.wte.weight.detach().clone())
    adam = torch.optim.AdamW(saved.parameters())
    train(saved, adam)
    saved.lm_head.weight.data.copy_(saved.wte.weight.detach())
    bcp.save(tmp_path, {"model": saved, "optimizer": adam})
    model, optimizer = made(1, steps=1)
    with pytest.raises(bcp.MismatchError, match=r"'state.lm_head.weight.exp_avg' and .*'state.wte.weight.exp_avg'"):
        bcp.load(tmp_path, {"model": model, "optimizer": optimizer})


def test_states_are_found_by_a_name_that_the_state_dict_hides(tmp_path: Path) -> None:
    class Hiding(Net):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            state = super().state_dict(*args, **kwargs)
            del state["wte.weight"]
            return state

    first = made(0, steps=1)
    model_state, optimizer_state = get_state_dict(*first, options=FLAT)
    state = {"model": {name: model_state[name] for name in Hiding().state_dict()}, "optim": optimizer_state}
    dcp.save(state, storage_writer=bcp.dcp.StorageWriter(tmp_path), no_dist=True)
    torch.manual_seed(1)
    model = Hiding()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    bcp.load(tmp_path, {"model": model, "optimizer": optimizer}, strict=False)
    assert goes_on_as(model, optimizer, first)
