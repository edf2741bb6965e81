"""Checkpoints of a tied head in models whose head is untied, and the other way round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import bcp


class Gpt(nn.Module):
    """An embedding and a head, which may be one parameter."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(32, 8), nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 32, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def made(*, tied: bool, steps: int = 0) -> tuple[Gpt, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Gpt(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    for _ in range(steps):
        optimizer.zero_grad()
        model.lm_head(model.h(model.wte(torch.arange(5)))).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("rename", [None, {"h.weight": "h.weight"}])
def test_both_names_get_the_moments_of_the_tied_one(tmp_path: Path, steps: int, rename: dict[str, str] | None) -> None:
    model, optimizer = made(tied=True, steps=3)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    untied, fresh = made(tied=False, steps=steps)
    fresh.param_groups[0]["lr"] = 1.0
    report = bcp.load(tmp_path, {"model": untied, "optimizer": fresh}, options=bcp.LoadOptions(rename=rename))
    assert not report.missing
    assert not report.unexpected
    wanted = optimizer.state[model.wte.weight]
    for weight in (untied.wte.weight, untied.lm_head.weight):
        assert torch.equal(weight, model.wte.weight)
        assert fresh.state[weight].keys() == wanted.keys()
        assert all(torch.equal(fresh.state[weight][key], wanted[key]) for key in wanted)
    assert fresh.param_groups[0]["lr"] == 0.125
    assert untied.wte.weight.data_ptr() != untied.lm_head.weight.data_ptr()


def test_a_group_with_only_the_head_gets_its_hyper_parameters(tmp_path: Path) -> None:
    model, optimizer = made(tied=True, steps=1)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    untied, _ = made(tied=False)
    groups = [{"params": [weight], "lr": 1.0} for weight in untied.parameters()]
    fresh = torch.optim.AdamW(groups)
    bcp.load(tmp_path, {"model": untied, "optimizer": fresh})
    assert [group["lr"] for group in fresh.param_groups] == [0.125] * len(groups)


def test_tied_heads_load_into_each_other(tmp_path: Path) -> None:
    model, optimizer = made(tied=True, steps=2)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    tied, fresh = made(tied=True)
    report = bcp.load(tmp_path, {"model": tied, "optimizer": fresh})
    assert not report.unexpected
    assert len(fresh.state) == len(optimizer.state)
    for key, value in optimizer.state[model.wte.weight].items():
        assert torch.equal(fresh.state[tied.wte.weight][key], value)


def untied_with_equal_weights() -> tuple[Gpt, torch.optim.AdamW]:
    model, optimizer = made(tied=False, steps=2)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.wte.weight)
    return model, optimizer


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("differing", ["weights", "moments"])
def test_two_values_for_one_tensor_are_refused(tmp_path: Path, differing: str, strict: bool) -> None:  # noqa: FBT001 -- a parameter
    model, optimizer = made(tied=False, steps=2) if differing == "weights" else untied_with_equal_weights()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    tied, fresh = made(tied=True)
    with pytest.raises(bcp.MismatchError, match=r"share memory have different values.*lm_head.weight"):
        bcp.load(tmp_path, {"model": tied, "optimizer": fresh}, strict=strict)
    assert not fresh.state


def test_two_equal_values_for_one_tensor_are_loaded(tmp_path: Path) -> None:
    model, optimizer = untied_with_equal_weights()
    for key, value in optimizer.state[model.wte.weight].items():
        optimizer.state[model.lm_head.weight][key].copy_(value)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    tied, fresh = made(tied=True)
    bcp.load(tmp_path, {"model": tied, "optimizer": fresh})
    assert torch.equal(fresh.state[tied.wte.weight]["exp_avg"], optimizer.state[model.wte.weight]["exp_avg"])
