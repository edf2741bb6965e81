"""A store that rank 0 of a job serves at a port from the kernel.

torchrun looks for a free port itself, and gives it up seconds before rank 0 listens there. Another process may get the
port first on a busy machine.
"""

from __future__ import annotations

import time
from pathlib import Path

from torch.distributed import TCPStore

__all__ = ["own_store"]

HOST = "127.0.0.1"


def own_store(rank: int, folder: Path) -> TCPStore:
    """Return the job's store; its folder has to be new for each start of the job."""
    place = folder / "port"
    if rank == 0:
        store = TCPStore(HOST, 0, None, is_master=True, wait_for_workers=False)
        new = folder / "port.new"
        new.write_text(str(store.port))
        new.rename(place)
        return store
    while not place.exists():
        time.sleep(0.001)
    return TCPStore(HOST, int(place.read_text()), None, is_master=False, wait_for_workers=False)
