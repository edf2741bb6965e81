from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path

import killed_rank
import killed_save
import pytest
import torch
from ranks import ended, meeting_place, started
from samples import sample
from torch.distributed import TCPStore

import bcp

pytestmark = [pytest.mark.dist]
ROOT, INNER, LEAF = 0, 1, 4


@pytest.fixture(scope="module")
def server() -> TCPStore:
    return meeting_place()


def run_job(server: TCPStore, job: str, path: Path, victim: int | None = None, moment: str = "") -> list[int | None]:
    """Run all ranks; return their exit codes."""
    return ended(started(killed_rank.SIZE, killed_rank.main, server.port, job, path, victim, moment), 200)


@pytest.mark.parametrize(
    "victim", sample([ROOT, LEAF], ROOT)
)  # an inner one may die with the answer that its leaves wait for
def test_a_rank_that_is_killed_between_commit_and_recording_fails_no_save(
    server: TCPStore, tmp_path: Path, victim: int
) -> None:
    codes = run_job(server, "recorded", tmp_path, victim, "recording")
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(killed_rank.SIZE)]
    for rank in set(range(killed_rank.SIZE)) - {victim}:
        kind, _, message = json.loads((tmp_path / f"recorded-{rank}").read_text())
        assert kind == "saved", message
    loaded = killed_save.state(0)
    bcp.load(tmp_path / "ckpt", loaded, options=bcp.LoadOptions(record=False))
    expected = killed_save.state(killed_rank.SIZE)["model"]
    assert all(torch.equal(loaded["model"][tensor], expected[tensor]) for tensor in expected)
    assert not (tmp_path / "ckpt" / "telemetry").exists()


VICTIMS = (ROOT, INNER, LEAF)
CASES = sample(itertools.product(VICTIMS, killed_rank.MOMENTS), *zip(VICTIMS, killed_rank.MOMENTS, strict=True))


@pytest.mark.parametrize(("victim", "moment"), CASES)
def test_everyone_names_the_killed_rank_and_a_restarted_job_saves(
    server: TCPStore, tmp_path: Path, victim: int, moment: str
) -> None:
    name = f"{victim}-{moment}"
    codes = run_job(server, name, tmp_path, victim, moment)
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(killed_rank.SIZE)]
    for rank in set(range(killed_rank.SIZE)) - {victim}:
        kind, blamed, message = json.loads((tmp_path / f"{name}-{rank}").read_text())
        assert (kind, blamed) == ("PeerError", victim), message
        assert f"the connection to rank {victim} (host " in message
    with pytest.raises((bcp.UncommittedError, bcp.NotACheckpointError)):
        bcp.load(tmp_path / "ckpt", killed_save.state(0))

    assert run_job(server, f"{name}-again", tmp_path) == [0] * killed_rank.SIZE
    loaded = killed_save.state(0)
    bcp.load(tmp_path / "ckpt", loaded)
    expected = killed_save.state(killed_rank.SIZE)["model"]
    assert all(torch.equal(loaded["model"][tensor], expected[tensor]) for tensor in expected)
