"""Warnings of a run on several ranks: rank 0 tells what all ranks know, and each rank tells of its own failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from logs import captured_logs
from ranks import Ranks
from torch import distributed as dist

import bcp


def warnings_of_a_run(path: Path, guilty: int) -> list[str]:
    """Resume from a checkpoint without random states; fail a save on one rank. Return the warnings of this rank."""

    async def fail(part: Any) -> Any:
        if dist.get_rank() == guilty:
            raise ValueError("boom")
        return part

    states = {"model": {f"w{dist.get_rank()}": torch.ones(8)}}
    bcp.save(path / "step-1", states)
    options = bcp.SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("mine", fail)))
    with captured_logs() as lines:
        run = bcp.Run(path, states, save=1, tolerate=2, save_options=options)
        run.resume()
        failing = run.maybe_save(2)
        assert failing is not None
        with pytest.raises(bcp.BcpError):
            failing.wait()
        run.maybe_save(3)
        with pytest.raises(bcp.BcpError):
            run.close()
    return [line["event"] for line in lines if line["log_level"] == "warning"]


@pytest.mark.dist
@pytest.mark.parametrize("guilty", [0, 2])
def test_a_warning_that_all_ranks_could_give_comes_from_rank_0(ranks4: Ranks, tmp_path: Path, guilty: int) -> None:
    told = ranks4.run(warnings_of_a_run, tmp_path, guilty)
    for words, ranks in {
        "the checkpoint has no random states": {0},
        "the save of step 2 failed, 1 of 2 tolerated in a row": {0, guilty},
    }.items():
        assert [sum(words in line for line in lines) for lines in told] == [rank in ranks for rank in range(4)]
