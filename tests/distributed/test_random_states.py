"""Random states after a change of the number of ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layouts import coordinator_of
from ranks import Ranks
from torch import distributed as dist

import bcp


def _draw() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]  # noqa: NPY002, S311 -- the global ones


def two_save_and_four_load(path: Path) -> tuple[list[float], list[float], list[float]]:
    """Return the numbers that this rank draws after the save, after a load, and after another one."""
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 -- the global one
    torch.manual_seed(rank)
    _draw()
    extra: dict[str, Any] = {"rng": bcp.RngState(), "step": rank}
    if rank < 2:
        bcp.save(path, {"extra_states": extra}, coordinator=coordinator_of(2))
    dist.barrier()
    after_save = _draw()
    bcp.load(path, {"extra_states": extra}, coordinator=coordinator_of(4))
    first = _draw()
    bcp.load(path, {"extra_states": extra}, coordinator=coordinator_of(4))
    assert extra["step"] == rank % 2
    return after_save, first, _draw()


def test_ranks_that_were_saved_go_on_and_the_others_draw_numbers_of_their_own(ranks4: Ranks, tmp_path: Path) -> None:
    found = ranks4.run(two_save_and_four_load, tmp_path)
    for rank, (after_save, first, again) in enumerate(found):
        assert again == first
        assert (first == after_save) == (rank < 2)
    assert len({number for _, first, _ in found for number in first}) == 12
