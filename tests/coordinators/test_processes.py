"""Real processes: one is killed, one ends right after the last answer, one forks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

pytestmark = pytest.mark.dist

BEGINNING = """
import json, os, signal, sys, time
import anyio
import torch.distributed as dist
from bcp.coordinators import GrpcCoordinator, StoreCoordinator

kind, rank, port, victim = sys.argv[1], *map(int, sys.argv[2:])
store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", rank=rank, world_size=4, store=store)
ranks = GrpcCoordinator.over(fanout=1) if kind == "grpc" else StoreCoordinator.over()

async def join(gathered):
    return b"".join(gathered)
"""

KILLED = """
async def main():
    async with ranks.begin("first", 60.0) as agreement:
        together = await agreement.decide("commit", b"%d" % rank, join)
        received = await agreement.all_to_all([bytes([rank])] * 4, [1] * 4)
    exchanged = b"".join(received).hex()
    started = time.monotonic()
    try:
        async with ranks.begin("second", 1.0 if kind == "store" else 60.0) as agreement:
            await agreement.decide("all are here", b"", join)
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            await agreement.decide("commit", b"", join)
    except Exception as error:
        result = [type(error).__name__, getattr(error, "rank", None), str(error)]
    seconds = time.monotonic() - started
    print(json.dumps([together.decode(), exchanged, result, seconds]), flush=True)

anyio.run(main)
os._exit(0)  # gloo waits for the dead rank otherwise
"""

BETWEEN = """
async def main():
    async with ranks.begin("first", 60.0) as agreement:
        await agreement.decide("commit", b"", join)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    result = []
    for what in ("second", "third"):
        try:
            async with ranks.begin(what, 3600.0) as agreement:
                await agreement.decide("commit", b"", join)
        except Exception as error:
            result.append([type(error).__name__, getattr(error, "rank", None), str(error)])
    print(json.dumps(result), flush=True)

anyio.run(main)
os._exit(0)
"""

ENDED = """
async def main():
    async with ranks.begin("only", 60.0) as agreement:
        return await agreement.decide("commit", b"%d" % rank * 100_000, join)

print(json.dumps(len(anyio.run(main))), flush=True)
if victim == 1:
    os._exit(0)
"""


def run_four(tmp_path: Path, program: str, kind: str, victim: int = 0) -> list[tuple[int, str, str]]:
    """Run four ranks; return the exit code, output and log of each."""
    server = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    path = tmp_path / "rank.py"
    path.write_text(BEGINNING + program)
    ranks = [
        subprocess.Popen(  # noqa: S603 -- our own program
            [sys.executable, path, kind, str(rank), str(server.port), str(victim)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    ended = []
    for process in ranks:
        out, log = process.communicate(timeout=120)
        ended.append((process.returncode, out, log))
    return ended


@pytest.mark.parametrize(
    ("kind", "victim", "cause"),
    [
        ("store", 2, "no sign of life"),
        ("grpc", 2, "the connection to rank 2 (host "),
        ("grpc", 0, "the connection to rank 0 (host "),
    ],
)
def test_a_killed_rank(tmp_path: Path, kind: str, victim: int, cause: str) -> None:
    for rank, (code, out, log) in enumerate(run_four(tmp_path, KILLED, kind, victim)):
        if rank == victim:
            assert code == -9, log
            continue
        assert code == 0, log
        together, exchanged, (error, blamed, message), seconds = json.loads(out)
        assert (together, exchanged) == ("0123", "00010203")
        assert (error, blamed) == ("PeerError", victim), message
        assert cause in message
        assert seconds < (30 if kind == "store" else 10)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_died_between_operations_is_not_waited_for(tmp_path: Path, victim: int) -> None:
    for rank, (code, out, log) in enumerate(run_four(tmp_path, BETWEEN, "grpc", victim)):
        if rank == victim:
            assert code == -9, log
            continue
        assert code == 0, log
        second, third = json.loads(out)
        for error, blamed, message in (second, third):
            assert (error, blamed) == ("PeerError", victim), message
            assert f"the connection to rank {victim} (host " in message


@pytest.mark.parametrize("at_once", [0, 1])
def test_a_process_that_ends_after_the_last_answer_harms_nobody(tmp_path: Path, at_once: int) -> None:
    for code, out, log in run_four(tmp_path, ENDED, "grpc", at_once):
        assert (code, json.loads(out or "0"), log) == (0, 400_000, "")


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
            assert await agreement.decide("commit", b"%d" % each.rank, join) == b"012"
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
        timeout=60,
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
            await agreement.decide("commit", b"", None)
        raise SystemExit(3)

anyio.run(main)
""")
    ended = subprocess.run(  # noqa: S603 -- our own program
        [sys.executable, path], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", "")
