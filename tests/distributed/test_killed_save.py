from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import killed_save
import pytest
import torch

import bcp

pytestmark = [pytest.mark.dist, pytest.mark.slow]
MODES = dict(zip(killed_save.POINTS, ["fresh", "overwrite"] * len(killed_save.POINTS), strict=False))


def load(path: Path) -> dict[str, object]:
    """Load whatever is there; returns the seed it was made of, after a look at every element."""
    state = killed_save.state(0)
    bcp.load(path, state)
    expected = killed_save.state(state["extra_states"]["seed"])
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in expected["model"].items())
    return state["extra_states"]["seed"]


@pytest.mark.parametrize("point", killed_save.POINTS)
def test_sigkill_harms_no_older_checkpoint(point: str, tmp_path: Path) -> None:
    mode = MODES[point]
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(  # noqa: S603 -- our own job
        [*job, killed_save.__file__, str(tmp_path), point, mode],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode != 0
    assert "SIGKILL" in ended.stderr or "-9" in ended.stderr, ended.stderr
    assert load(tmp_path / "older") == 1
    newer = tmp_path / "newer"
    if killed_save.POINTS[point].committed:
        assert load(newer) == 3
    elif mode == "overwrite":
        assert load(newer) == 2
    else:
        with pytest.raises((bcp.UncommittedError, bcp.NotACheckpointError)):
            load(newer)
    bcp.save(newer, killed_save.state(4), overwrite=True)
    assert load(newer) == 4
    left = [path for path in newer.rglob("*") if path.is_file()]
    assert len(left) == len(bcp_files(newer)), "files of the killed save are still there"


def bcp_files(path: Path) -> set[str]:
    """Return what one committed save of one rank consists of."""
    (receipt,) = (path / "receipts").iterdir()
    operation = receipt.stem.split("-")[1]
    return {str(file) for file in path.rglob(f"*{operation}*")} | {"metadata.arrow"}
