"""Four real processes over one TCPStore."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

pytestmark = pytest.mark.dist

PROGRAM = """
import json, os, signal, sys, time
import anyio
import torch.distributed as dist
from bcp.coordinators import coordinator

rank, port, victim = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", rank=rank, world_size=4, store=store)

async def join(gathered):
    return b"".join(gathered)

async def main():
    ranks = coordinator()
    async with ranks.begin("first", 60.0) as agreement:
        together = await agreement.decide("commit", b"%d" % rank, join)
        received = await agreement.all_to_all([bytes([rank])] * 4, [1] * 4)
    exchanged = b"".join(received).hex()
    started = time.monotonic()
    try:
        async with ranks.begin("second", 1.0) as agreement:
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


def test_a_killed_rank(tmp_path: Path) -> None:
    victim = 2
    server = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM)
    ranks = [
        subprocess.Popen(  # noqa: S603 -- our own program
            [sys.executable, program, str(rank), str(server.port), str(victim)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    for rank, process in enumerate(ranks):
        out, log = process.communicate(timeout=120)
        if rank == victim:
            assert process.returncode == -9, log
            continue
        assert process.returncode == 0, log
        together, exchanged, (kind, blamed, message), seconds = json.loads(out)
        assert (together, exchanged) == ("0123", "00010203")
        assert (kind, blamed) == ("PeerError", victim), message
        assert "no sign of life" in message
        assert "decide 'commit'" in message
        assert seconds < 30
