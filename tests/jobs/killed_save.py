"""A job of two ranks, one of which is killed in the middle of a save."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import HOST
from torch import distributed as dist

import bcp
from bcp.backends import resolve
from bcp.testing.storage_fakes import FaultyBackend

SIZE = 2


@dataclass(frozen=True)
class Point:
    """Where a rank is killed: in a backend's operation, or behind a stage."""

    rank: int
    operation: str = ""
    key: str = ""
    nth: int = 1
    stage: str = ""
    committed: bool = False


POINTS = {
    "while rank 0 opens": Point(0, "version", "metadata"),
    "in the first part of d2h": Point(1, stage="d2h"),
    "in the last part of d2h": Point(0, stage="d2h", nth=3),
    "after serialize": Point(1, stage="serialize", nth=2),
    "after checksum": Point(0, stage="checksum", nth=2),
    "opening a data file": Point(1, "open_write", "model"),
    "in the second part": Point(0, "write_part", "model", nth=2),
    "before a data file appears": Point(1, "commit", "model"),
    "between two data files": Point(0, "commit", "model"),
    "before its receipt": Point(1, "put", "receipts"),
    "before the metadata": Point(0, "put_if", "metadata"),
    "after the metadata": Point(0, "get", "receipts", committed=True),
}


def state(seed: int) -> dict[str, Any]:
    """Return about 12 MB that are equal on all ranks: several parts each of 1 MiB, divided between them."""
    generator = torch.Generator().manual_seed(seed)
    model = {f"w{n}": torch.rand(600_000 + 7 * n, generator=generator) for n in range(5)}
    return {"model": model, "extra_states": {"seed": seed}}


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killer(point: Point) -> Callable[[Any], Any]:
    """Return an edit that puts a deadly stage behind the point's stage."""
    left = point.nth

    async def run(item: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            kill()
        return item

    return lambda graph: graph.after(point.stage, bcp.extend.Stage("killer", run))


async def akill(_: str) -> None:
    kill()


def main(rank: int, port: int, directory: Path, name: str, mode: str) -> None:
    """Save ``directory/older``, and ``directory/newer`` until one rank is killed at the point of that name."""
    point, store = POINTS[name], dist.TCPStore(HOST, port, None, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    bcp.save(directory / "older", state(1))
    if mode == "overwrite":
        bcp.save(directory / "newer", state(2))
    victim = rank == point.rank
    edit = killer(point) if victim and point.stage else same
    options = bcp.SaveOptions(part_bytes=1 << 20, overwrite=True, edit=edit)
    fault = akill if victim and point.operation else anothing
    backend = FaultyBackend(resolve(directory / "newer"), point.operation or "put", fault, nth=point.nth, key=point.key)
    bcp.save(backend, state(3), options=options)


def same(graph: Any) -> Any:
    return graph


async def anothing(_: str) -> None:
    pass
