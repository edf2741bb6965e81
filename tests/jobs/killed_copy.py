"""One of three ranks that copy a checkpoint; one of them is killed while it writes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from ranks import HOST
from torch import distributed as dist

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import FaultyBackend

SIZE = 3


async def _die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def copy(rank: int, port: int, victim: int, folder: Path) -> None:
    """Save ``folder/a``, and copy it to ``folder/b``; write down the error."""
    store = dist.TCPStore(HOST, port, None, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", rank=rank, world_size=SIZE, store=store)
    bcp.save(folder / "a", {"model": {f"w{n}": torch.ones(1 << 16) for n in range(SIZE)}})
    target = FaultyBackend(LocalBackend(folder / "b"), "put", _die, nth=1 if rank == victim else 1000)
    try:
        bcp.tools.copy(folder / "a", target)
    except bcp.PeerError as error:
        (folder / str(rank)).write_text(json.dumps([error.rank, str(error)]))
    os._exit(0)  # gloo waits for the dead rank otherwise
