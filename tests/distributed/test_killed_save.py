from __future__ import annotations

import signal
from pathlib import Path

import killed_save
import pytest
import torch
from ranks import meeting_place, started
from samples import sample

import bcp

pytestmark = [pytest.mark.dist]
MODES = dict(zip(killed_save.POINTS, ["fresh", "overwrite"] * len(killed_save.POINTS), strict=False))


def load(path: Path) -> dict[str, object]:
    """Load whatever is there; returns the seed it was made of, after a look at every element."""
    state = killed_save.state(0)
    bcp.load(path, state)
    expected = killed_save.state(state["extra_states"]["seed"])
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in expected["model"].items())
    return state["extra_states"]["seed"]


def killed(path: Path, point: str, mode: str) -> int | None:
    """Run the job; when its victim has died, end the others, as torchrun does. Returns the victim's exit code."""
    server = meeting_place()
    ranks = started(killed_save.SIZE, killed_save.main, server.port, path, point, mode)
    victim = ranks[killed_save.POINTS[point].rank]
    victim.join(120)
    for process in ranks:
        process.kill()
        process.join()
    return victim.exitcode


FEW = (
    "after checksum",
    "in the second part",
    "before the metadata",
    "after the metadata",
)


@pytest.mark.parametrize("point", sample(killed_save.POINTS, *FEW))
def test_sigkill_harms_no_older_checkpoint(point: str, tmp_path: Path) -> None:
    mode = MODES[point]
    assert killed(tmp_path, point, mode) == -signal.SIGKILL
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
    left = [path for path in newer.rglob("*") if path.is_file() and path.parent.name != "telemetry"]
    assert len(left) == len(bcp_files(newer)), "files of the killed save are still there"


def bcp_files(path: Path) -> set[str]:
    """Return what one committed save of one rank consists of."""
    (receipt,) = (path / "receipts").iterdir()
    operation = receipt.stem.split("-")[1]
    files = path.rglob(f"*{operation}*")
    return {str(file) for file in files if file.parent.name != "telemetry"} | {"metadata.arrow"}
