"""One of three ranks that copy or export a checkpoint; one of them is killed while it writes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from ranks import HOST
from torch import distributed as dist

import bcp
from bcp.backends import LocalBackend
from bcp.extend import Backend
from bcp.testing.storage_fakes import FaultyBackend

SIZE = 3


async def _die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def copy(rank: int, port: int, victim: int, folder: Path) -> None:
    """Save ``folder/a``, and copy it to ``folder/b``; write down the error. The victim has finished a file."""
    _run(rank, port, folder, bcp.tools.copy, _dying(rank, victim, folder, "put"))


def copy_one(rank: int, port: int, victim: int, folder: Path) -> None:
    """Do the same; the victim dies just before its file has its name."""
    _run(rank, port, folder, bcp.tools.copy, _dying(rank, victim, folder, "commit"))


def export(rank: int, port: int, victim: int, folder: Path) -> None:
    """Do the same with an export of three files."""
    target = _dying(rank, victim, folder, "commit")
    _run(rank, port, folder, partial(bcp.tools.export_hf, shard_bytes=1 << 18), target)


def _dying(rank: int, victim: int, folder: Path, operation: str) -> Backend:
    return FaultyBackend(LocalBackend(folder / "b"), operation, _die, nth=1 if rank == victim else 1000)


def _run(rank: int, port: int, folder: Path, tool: Callable[[Path, Backend], object], target: Backend) -> None:
    store = dist.TCPStore(HOST, port, None, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", rank=rank, world_size=SIZE, store=store)
    bcp.save(folder / "a", {"model": {f"w{n}": torch.ones(1 << 16) for n in range(SIZE)}})
    try:
        tool(folder / "a", target)
    except bcp.PeerError as error:
        (folder / str(rank)).write_text(json.dumps([error.rank, str(error)]))
    os._exit(0)  # gloo waits for the dead rank otherwise
