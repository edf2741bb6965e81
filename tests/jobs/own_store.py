"""A store that rank 0 of a job serves on a port that it gets from the kernel.

torchrun's launcher looks for a free port itself, and gives it up again before rank 0 listens there: on a busy machine
another process may get it first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from ranks import HOST
from torch.distributed import TCPStore


def own_store(rank: int, folder: Path) -> TCPStore:
    """Return the job's store; its folder has to be new for each start of the job."""
    if rank == 0:
        store = TCPStore(HOST, 0, None, is_master=True, wait_for_workers=False)
        (folder / "server").write_text(str(os.getpid()))
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(folder / "port")
        return store
    wait_until((folder / "port").exists)
    return TCPStore(HOST, int((folder / "port").read_text()), None, is_master=False, wait_for_workers=False)


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once something is so that no event tells of."""
    while not condition():
        time.sleep(0.001)
