from __future__ import annotations

from pathlib import Path

import pytest
import torch
import untied
from ranks import Ranks

import bcp

pytestmark = pytest.mark.dist
hows = pytest.mark.parametrize("how", ["plain", "fsdp2", "fsdp1", "columns"])


def saved(path: Path) -> dict[str, torch.Tensor]:
    """Save a model as a framework does that knows of no ties: every name has a tensor of its own."""
    torch.manual_seed(0)
    state = {name: value.detach().clone() for name, value in untied.Tied().state_dict().items()}
    assert {"tok.weight", "head.weight"} < state.keys()
    bcp.save(path, {"model": state})
    return state


@hows
def test_equal_values_are_loaded(ranks4: Ranks, tmp_path: Path, how: str) -> None:
    state = saved(tmp_path)
    for error, weight in ranks4.run(untied.load, tmp_path, how):
        assert not error
        assert torch.equal(weight, state["tok.weight"])


@hows
def test_values_that_differ_in_one_element_are_refused_on_every_rank(ranks4: Ranks, tmp_path: Path, how: str) -> None:
    state = saved(tmp_path)
    state["head.weight"][7, 2] += 1
    bcp.save(tmp_path, {"model": state}, overwrite=True)
    errors = [error for error, _ in ranks4.run(untied.load, tmp_path, how)]
    assert any(error.startswith("MismatchError") for error in errors)
    assert all("'head.weight' and model tensor 'tok.weight'" in error for error in errors), errors
