"""Tools on ranks that are processes: the ranks of a process group share the work, and rank 0 prints."""

from __future__ import annotations

import io
import json
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import killed_copy
import pytest
import torch
from ranks import Ranks, ended, meeting_place, started
from torch import distributed as dist

import bcp
from bcp.__main__ import main

pytestmark = pytest.mark.dist


def commanded(*words: str) -> tuple[int, str, str]:
    """Run a command on this rank, as torchrun would; return its status and what it prints."""
    out, errors = io.StringIO(), io.StringIO()
    environ = patch.dict(os.environ, WORLD_SIZE=str(dist.get_world_size()))
    with environ, redirect_stdout(out), redirect_stderr(errors):
        status = main(words)
    return status, out.getvalue(), errors.getvalue()


def course(path: Path) -> list[tuple[int, str, str]]:
    """Save, copy, verify and compare a checkpoint on all ranks; then once more, with damage."""
    one, two = str(path / "one"), str(path / "two")
    bcp.save(one, {"model": {f"w{n}": torch.full((1 << 16,), float(n)) for n in range(8)}})
    done = [commanded("cp", one, two), commanded("verify", one, two, "--json"), commanded("diff", one, two)]
    if dist.get_rank() == 0:
        file = max((path / "two" / "model").iterdir())
        file.write_bytes(file.read_bytes()[:-4] + b"DAMA")
    dist.barrier()
    return [*done, commanded("verify", two, "--json"), commanded("cp", two, f"{path}/three"), commanded("cp", one, two)]


def test_commands_share_their_work_and_rank_0_prints(ranks4: Ranks, tmp_path: Path) -> None:
    by_rank = ranks4.run(course, tmp_path)
    assert [[status for status, _, _ in done] for done in by_rank] == [[0, 0, 0, 1, 1, 1]] * 4
    assert all((out, errors) == ("", "") for done in by_rank[1:] for _, out, errors in done)
    (_, copied, _), (_, verified, _), (_, compared, _), (_, damaged, _), _, (_, _, refused) = by_rank[0]
    assert "two: 9 files, 2.1 MB in" in copied
    assert [(each["sound"], each["files"]) for each in json.loads(verified)] == [(True, 4)] * 2
    assert compared.startswith("equal: 8 tensors")
    (found,) = json.loads(damaged)
    assert (found["sound"], len(found["damage"])) == (False, 1)
    assert "pass overwrite=True" in refused
    assert not [path for path in (tmp_path / "three").rglob("*") if path.is_file()]


def test_a_killed_rank_ends_a_copy_and_its_files_go(tmp_path: Path) -> None:
    server, victim = meeting_place(), 1
    codes = ended(started(killed_copy.SIZE, killed_copy.copy, server.port, victim, tmp_path), 120)
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(killed_copy.SIZE)]
    for rank in {0, 1, 2} - {victim}:
        blamed, words = json.loads((tmp_path / str(rank)).read_text())
        assert blamed == victim, words
    assert not [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
