"""One rank of one library in a process of its own: does what it is told over a pipe, and says how long it took."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.speed import disk
from benchmarks.speed.cases import Case
from benchmarks.speed.libraries import Library, open_library
from benchmarks.speed.state import State, equal_tensors, gpt
from benchmarks.speed.train import Trainer

__all__ = ["Place", "be_worker"]

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Which worker this is.

    Attributes:
        library: the one that it opens.
        case: what it holds.
        nbytes: about how many bytes all ranks together hold.
        filled: with random numbers, else with zeros.
        rank: which of the case's ranks it is.
        port: where the ranks' store is.
    """

    library: str
    case: Case
    nbytes: int
    filled: bool
    rank: int = 0
    port: int = 0


def be_worker(pipe: Connection, place: Place) -> None:
    """Serve commands until the pipe closes: ``(command, arguments)`` in, ``(ok, values or traceback)`` out."""
    warnings.simplefilter("ignore")  # what libraries warn of is not what is measured
    logging.disable(logging.WARNING)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # nor is what the processes they start have to say
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    try:
        worker = _Worker(place)
        pipe.send((True, worker.ways()))
        while (command := pipe.recv()) is not None:
            gc.collect()
            pipe.send((True, getattr(worker, command[0])(*command[1:])))
        worker.close()
    except EOFError:  # the parent is gone
        pass
    except BaseException:  # noqa: BLE001 -- the parent tells
        pipe.send((False, traceback.format_exc()))


class _Worker:
    """The state, the library that saves and loads it, and a training loop; its methods are the commands."""

    def __init__(self, place: Place) -> None:
        self._rank, self._ranks = place.rank, place.case.ranks
        if self._ranks > 1:
            _join(place)
        self._state = _state(place)
        if place.filled:
            self._state.fill(place.rank)
        self._library: Library = open_library(place.library, self._state)
        self._trainer = Trainer(self._state.update)
        if self._ranks == 1:
            self._trainer.alone(0.2)  # the first steps import and allocate

    def ways(self) -> Values:
        """Return the names of all ways, and the size of the state."""
        library = self._library
        named = {"saves": library.saves, "backgrounds": library.backgrounds, "loads": library.loads}
        return {"nbytes": self._state.nbytes} | {kind: list(ways) for kind, ways in named.items()}

    def save(self, way: str, path: Path) -> Values:
        """Save; durable."""
        work = self._library.saves[way]
        self._together()
        begin = time.perf_counter()
        facts = work(path) or {}
        returned = time.perf_counter() - begin
        self._sync(path)
        seconds = time.perf_counter() - begin
        return {"state": self._state.nbytes, "returned": returned, "seconds": seconds, **facts}

    def background(self, way: str, path: Path) -> Values:
        """Save in the background; alone, while training goes on."""
        work = self._library.backgrounds[way]
        if self._ranks == 1:
            trained = asdict(self._trainer.during(lambda: work(path), path))
            return {"state": self._state.nbytes, "seconds": trained.pop("durable"), **trained}
        self._together()
        begin = time.perf_counter()
        background = work(path)
        blocking = time.perf_counter() - begin
        background.wait()
        self._sync(path)
        return {"state": self._state.nbytes, "blocking": blocking, "seconds": time.perf_counter() - begin}

    def load(self, way: str, path: Path) -> Values:
        """Load into the state."""
        work = self._library.loads[way]
        self._together()
        begin = time.perf_counter()
        facts = work(path) or {}
        return {"state": self._state.nbytes, "seconds": time.perf_counter() - begin, **facts}

    def digest(self) -> Values:
        """Return a checksum of the state."""
        return {"digest": self._state.digest()}

    def clear(self) -> Values:
        """Put zeros into the state."""
        self._state.clear()
        return {}

    def close(self) -> None:
        """Let go of the library and of the other ranks."""
        self._library.close()
        if self._ranks > 1:
            dist.destroy_process_group()

    def _sync(self, path: Path) -> None:
        """Make durable what all ranks have written, and wait for it."""
        self._together()
        if self._rank == 0:
            disk.make_durable(path)
        self._together()

    def _together(self) -> None:
        if self._ranks > 1:
            dist.barrier()


def _state(place: Place) -> State:
    """Make the state of a case, all zeros."""
    if place.case.tensors:
        return equal_tensors(place.case.tensors, place.nbytes)
    return gpt(place.nbytes, _fully_shard if place.case.ranks > 1 else id)


def _join(place: Place) -> None:
    """Become a rank of a gloo group, on one thread."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", place.port, is_master=False, wait_for_workers=False)
    wait = timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.case.ranks, timeout=wait)


def _fully_shard(module: nn.Module) -> None:
    """Cut a GPT over all ranks, block by block."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
