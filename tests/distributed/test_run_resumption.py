"""Resumptions of several ranks in which one of them meets an error of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import distributed as dist

import bcp


class Stubborn:
    """Cannot be loaded on one rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise KeyError("no such schedule")


def save_and_resume(path: Path) -> tuple[str, str]:
    """Save a step, and return the type and the text of the error of the resumption."""
    states = {"model": {"weight": torch.ones(8)}, "extra_states": {"stubborn": Stubborn()}}
    with bcp.Run(str(path), states, save=1) as run:
        run.resume()
        run.maybe_save(1)
    with bcp.Run(str(path), states, save=1, load_options=bcp.LoadOptions(timeout=60.0)) as run:
        try:
            run.resume()
        except Exception as error:  # noqa: BLE001 -- the error is the result
            return type(error).__name__, str(error)
    raise AssertionError("the run was resumed")


@pytest.mark.dist
def test_all_ranks_are_told_of_an_error_in_a_state_of_one(ranks4: Ranks, tmp_path: Path) -> None:
    found = ranks4.run(save_and_resume, tmp_path)
    assert found.pop(1) == ("KeyError", "'no such schedule'")
    for kind, text in found:
        assert kind == "PeerError"
        assert "KeyError: 'no such schedule'" in text


def go_back(path: Path) -> float:
    """Save two steps, pin the second, and save it again from the first one on. Return the value of the newest."""
    weight = torch.ones(8)
    states = {"model": {"weight": weight}}
    for resume in ({}, {"step": 1}):
        with bcp.Run(str(path), states, save=1) as run:
            for step in range(run.resume(**resume) + 1, 3):  # type: ignore[arg-type]  # one of two keywords
                weight.add_(1)
                run.maybe_save(step)
        bcp.Run(str(path), {}).pin(2)
        dist.barrier()
    newest = bcp.latest(path)
    assert newest is not None
    bcp.load(newest, states)
    return weight[0].item()


@pytest.mark.dist
def test_all_ranks_save_beside_a_pinned_checkpoint(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(go_back, tmp_path) == [3.0] * 4
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000002", "step-00000001", "step-00000002"]
