"""One rank of a job whose store falls silent: its server is killed or stopped before or after the first save."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake": no connections
from torch import distributed as dist
from waiting import wait_until

import bcp
from benchmarks.soak.store import own_store

TIMEOUTS = (1.5, 30.0)  # seconds of silence; the longer one where a machine is too busy for the other
JOINING_SECONDS = 60.0


def main(rank: int, size: int, folder: Path, moment: str, call: str, number: int, timeout: float) -> None:
    """Save once or twice after rank 0 has sent itself the signal; write down what came of each save."""
    if rank == 0:
        (folder / "server").write_text(str(os.getpid()))
    store = own_store(rank, folder)
    dist.init_process_group(
        "fake", rank=rank, world_size=size, store=dist.PrefixStore("a", dist.PrefixStore("b", store))
    )
    if moment == "second":
        bcp.save(folder / "first", states())
    store.set(f"ready/{rank}", str(os.getpid()))
    if rank == 0:
        store.wait([f"ready/{other}" for other in range(size)])
        os.kill(os.getpid(), number)
        os._exit(1)
    server = int((folder / "server").read_text())
    wait_until(lambda: state_of(server) in "TZX")
    outcomes = [outcome(call, folder / "second", timeout) for _ in range(2)]
    threads = sum(thread.name == "bcp-store" for thread in threading.enumerate())
    (folder / str(rank)).write_text(json.dumps([outcomes, threads]))


def states() -> dict[str, Any]:
    return {"model": {"w": torch.arange(8.0)}}


def outcome(call: str, path: Path, timeout: float) -> list[Any]:
    """Return the type, rank and text of the error of a save."""
    options = bcp.SaveOptions(timeout=timeout)
    try:
        if call == "save":
            bcp.save(path, states(), options=options)
        else:
            anyio.run(lambda: bcp.asave(path, states(), options=options))
    except Exception as error:  # noqa: BLE001 -- the test looks at whatever it is
        return [type(error).__name__, getattr(error, "rank", None), str(error)]
    return ["saved", None, ""]


def state_of(process: int) -> str:
    """Return the letter for the state of a process: T for a stopped one, Z or X for one that was killed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


TORCHRUN = """
import json, os, signal, sys
from pathlib import Path
from torch import distributed as dist
from waiting import wait_until
from silent_store import JOINING_SECONDS, outcome, state_of

dist.init_process_group("gloo")
agent, folder = os.getppid(), Path(sys.argv[1])
dist.barrier()
os.kill(agent, signal.SIGSTOP)
try:
    wait_until(lambda: state_of(agent) == "T")
    said = outcome(sys.argv[2], folder / "ckpt", float(sys.argv[3]))
    dist.barrier()
finally:
    os.kill(agent, signal.SIGCONT)
later = outcome(sys.argv[2], folder / "ckpt", JOINING_SECONDS)
(folder / os.environ["RANK"]).write_text(json.dumps([said, later]))
dist.barrier()
dist.destroy_process_group()
"""
"""A rank of torchrun's: the store is its agent's, which is stopped before the first save and goes on after it."""
