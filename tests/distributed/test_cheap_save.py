from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cheap_save
import killed_save
import pytest

import bcp

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_planning_and_commit_of_a_save_like_the_last_one_cost_less_than_200_bytes_an_edge(tmp_path: Path) -> None:
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    ended = subprocess.run(  # noqa: S603 -- our own job
        [*job, cheap_save.__file__, str(tmp_path)], capture_output=True, text=True, check=False, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    assert "rank" not in ended.stderr, ended.stderr  # whatever bcp or gRPC would have to say names one
    for rank in range(8):
        first, second = json.loads((tmp_path / f"spent-{rank}").read_text())
        assert sorted(second) == ([str(each) for each in range(1, 8)] if rank == 0 else ["0"])
        assert all(60 < nbytes < 200 for nbytes in second.values()), second
        assert all(first[each] > second[each] for each in second)
    state = killed_save.state(0)
    bcp.load(tmp_path / "ckpt1", state)
    assert state["extra_states"]["seed"] == 1
