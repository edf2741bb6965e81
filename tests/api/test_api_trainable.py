"""The trained part of a model as a state: the tensors of PEFT's own choice, saved, loaded and trained on."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

import bcp


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, a norm that is trained, and a norm that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.still = nn.BatchNorm1d(8).requires_grad_(requires_grad=False)
        self.norm.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.still(self.base(x)) + self.up(self.down(x)))
        return out


NAMES = ["down.weight", "norm.bias", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
NAMES += ["norm.weight", "up.weight"]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.rand(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_tensors_are_the_model_s_own() -> None:
    model = Adapted()
    found = bcp.trainable(model)
    assert sorted(found) == NAMES
    assert all(tensor.data_ptr() == model.state_dict()[name].data_ptr() for name, tensor in found.items())


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_names_are_those_of_the_model_inside(wrap: Any) -> None:
    assert sorted(bcp.trainable(wrap(Adapted()))) == NAMES


def test_a_job_goes_on_from_its_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Adapted().train()
    model.still.eval()
    fresh = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    trained(model, optimizer, 3)
    extra = {"rng": bcp.RngState()}
    bcp.save(tmp_path, {"model": bcp.trainable(model), "optimizer": optimizer, "extra_states": extra})
    rest = trained(model, optimizer, 3)

    again = torch.optim.AdamW([each for each in fresh.parameters() if each.requires_grad])
    bcp.load(tmp_path, {"model": bcp.trainable(fresh), "optimizer": again, "extra_states": extra})
    assert trained(fresh, again, 3) == rest
    assert all(torch.equal(one, fresh.state_dict()[name]) for name, one in model.state_dict().items())
    ckpt = bcp.Checkpoint(tmp_path)
    assert sorted(ckpt.names(kind="model")) == NAMES


def test_refused() -> None:
    with pytest.raises(bcp.StateError, match="no parameter of the model needs a gradient"):
        bcp.trainable(nn.Linear(2, 2).requires_grad_(requires_grad=False))
    partitioned = nn.Linear(2, 2)
    partitioned.weight.ds_id = 0  # type: ignore[attr-defined]  # as ZeRO-3 marks it
    with pytest.raises(bcp.StateError, match="pass the engine of DeepSpeed"):
        bcp.trainable(nn.Sequential(partitioned))


def refusal_of_fsdp1() -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 -- it warns

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
    try:
        bcp.trainable(model)
    except bcp.StateError as error:
        return str(error)
    return ""


def test_fsdp1_is_refused(ranks3: Ranks) -> None:
    assert all("flat parameters" in words for words in ranks3.run(refusal_of_fsdp1))
