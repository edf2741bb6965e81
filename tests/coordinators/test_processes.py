"""Real processes: one is killed, one ends right after the last answer, one forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed_agreement
import pytest
from forked import Forked, run_forked
from logs import without_torchs_warnings
from ranks import ended, meeting_place, started
from samples import sample

pytestmark = pytest.mark.dist

ENDED = """
import json, os, sys
import anyio
import torch.distributed as dist
from bcp.coordinators import GrpcCoordinator

rank, port, at_once = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", rank=rank, world_size=4, store=store)
ranks = GrpcCoordinator.over(fanout=1)

async def join(gathered):
    return b"".join(gathered)

async def main():
    async with ranks.begin("only", 60.0) as agreement:
        return await agreement.gather_broadcast("commit", b"%d" % rank * 100_000, join)

print(json.dumps(len(anyio.run(main))), flush=True)
if at_once:
    os._exit(0)
"""


def run_killed(tmp_path: Path, job: Callable[..., None], victim: int) -> dict[int, Any]:
    """Run four ranks, of which one is killed; return what each of the others wrote down."""
    server = meeting_place()
    codes = ended(started(killed_agreement.SIZE, job, server.port, victim, tmp_path), 120)
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(killed_agreement.SIZE)]
    others = set(range(killed_agreement.SIZE)) - {victim}
    return {rank: json.loads((tmp_path / str(rank)).read_text()) for rank in others}


@pytest.mark.parametrize(
    ("victim", "cause"),
    [
        (2, "the connection to rank 2 (host "),
        (0, "the connection to rank 0 (host "),
    ],
)
def test_a_killed_rank(tmp_path: Path, victim: int, cause: str) -> None:
    for said in run_killed(tmp_path, killed_agreement.within, victim).values():
        together, exchanged, (error, blamed, message) = said
        assert (together, exchanged) == ("0123", "00010203")
        assert (error, blamed) == ("PeerError", victim), message
        assert cause in message


@pytest.mark.parametrize("victim", sample([0, 1, 3], 1))
def test_a_rank_that_died_between_operations_is_not_waited_for(tmp_path: Path, victim: int) -> None:
    for second, third in run_killed(tmp_path, killed_agreement.between, victim).values():
        for error, blamed, message in (second, third):
            assert (error, blamed) == ("PeerError", victim), message
            assert f"the connection to rank {victim} (host " in message


@pytest.mark.parametrize("at_once", [0, 1])
def test_a_process_that_ends_after_the_last_answer_harms_nobody(tmp_path: Path, at_once: int) -> None:
    server, path = meeting_place(), tmp_path / "rank.py"
    path.write_text(ENDED)
    ranks = [
        Forked(
            [sys.executable, path, str(rank), str(server.port), str(at_once)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    for process in ranks:
        out, log = process.communicate(timeout=240)
        assert (process.returncode, json.loads(out or "0"), without_torchs_warnings(log)) == (0, 400_000, "")


FORKED = """
import os, sys
import anyio
from torch.utils.data import DataLoader
from bcp.coordinators import grpc_coordinators
from bcp.errors import InputError

ranks = grpc_coordinators(3, fanout=1)

async def join(gathered):
    return b"".join(gathered)

async def main():
    async def one(each):
        async with each.begin("only", 60.0) as agreement:
            assert await agreement.gather_broadcast("commit", b"%d" % each.rank, join) == b"012"
    async with anyio.create_task_group() as group:
        for each in ranks:
            group.start_soon(one, each)

anyio.run(main)
for _ in range(2):
    assert [int(item) for item in DataLoader(range(4), batch_size=None, num_workers=2)] == [0, 1, 2, 3]
for leave in os._exit, sys.exit:
    child = os.fork()
    if child == 0:
        try:
            ranks[0].begin("in a fork", 1.0)
        except InputError as error:
            assert "this is its fork" in str(error)
            ranks[0].close()
            leave(7)
        leave(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
anyio.run(main)
"""


def test_forks_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "forks.py"
    path.write_text(FORKED)
    ended = subprocess.run(  # noqa: S603 -- our own program
        [sys.executable, "-W", "ignore::DeprecationWarning", path],
        capture_output=True,
        text=True,
        check=False,
        env={
            name: text for name, text in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"
        },  # as this process set it
        timeout=240,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_process_ends_in_the_middle_of_an_operation(tmp_path: Path) -> None:
    path = tmp_path / "ends.py"
    path.write_text("""
import anyio
from bcp.coordinators import grpc_coordinators

ranks = grpc_coordinators(2)

async def main():
    async with ranks[0].begin("never", 60.0) as agreement:
        with anyio.move_on_after(0.05):
            await agreement.gather_broadcast("commit", b"", None)
        raise SystemExit(3)

anyio.run(main)
""")
    ended = run_forked([sys.executable, path], timeout=240)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", "")
