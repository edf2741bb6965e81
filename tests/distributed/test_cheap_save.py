from __future__ import annotations

from contextlib import closing
from pathlib import Path

import cheap_save
import killed_save
import pytest
from ranks import Ranks

import bcp

pytestmark = [pytest.mark.dist]
SIZE = 8


def test_planning_and_commit_of_a_save_like_the_last_one_cost_less_than_200_bytes_an_edge(tmp_path: Path) -> None:
    with closing(Ranks(SIZE)) as ranks:
        spent = ranks.run(cheap_save.save_twice, tmp_path)
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(SIZE)]
    assert said == [""] * SIZE
    for rank, (first, second) in enumerate(spent):
        assert sorted(second) == (list(range(1, SIZE)) if rank == 0 else [0])
        assert all(60 < nbytes < 200 for nbytes in second.values()), second
        assert all(first[each] > second[each] for each in second)
    state = killed_save.state(0)
    bcp.load(tmp_path / "ckpt1", state)
    assert state["extra_states"]["seed"] == 1
