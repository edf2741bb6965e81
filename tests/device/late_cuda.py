"""The names of ``torch.cuda`` that tests call and bcp does not: graphs, memory pools and limits of device memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from late_machine import Graph, Machine, machine
from late_memory import ARENA, memory
from late_streams import Stream, device_index


class CudaGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.captured: Graph | None = None

    def replay(self) -> None:
        assert self.captured is not None
        self.captured.replay()


@contextmanager
def graph(
    into: CudaGraph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Capture on a side stream, after all work that is queued; stands for ``torch.cuda.graph``."""
    del pool
    machine().synchronize(machine().device)
    with stream or Stream(), machine().capture(capture_error_mode) as into.captured:
        yield


class MemPool:
    """Stands for ``torch.cuda.MemPool``; it counts bytes and gives none back."""

    def __init__(self) -> None:
        self.nbytes = 0

    def snapshot(self) -> list[dict[str, int]]:
        return [{"total_size": self.nbytes}] if self.nbytes else []


@contextmanager
def use_mem_pool(pool: MemPool, device: object = None) -> Iterator[None]:
    """Count what the calling thread allocates."""
    del device
    machine().local.pool = pool
    try:
        yield
    finally:
        machine().local.pool = None


def set_per_process_memory_fraction(fraction: float, device: object = None) -> None:
    memory().limits[device_index(device)] = int(fraction * ARENA)


def of_cuda(this: Machine) -> dict[str, Any]:
    """Return the values by name."""
    return {
        "CUDAGraph": CudaGraph,
        "graph": graph,
        "MemPool": MemPool,
        "use_mem_pool": use_mem_pool,
        "set_per_process_memory_fraction": set_per_process_memory_fraction,
        "memory_reserved": lambda device=None: memory().ends[device_index(device)],
        "mem_get_info": lambda device=None: (ARENA - memory().ends[device_index(device)], ARENA),
        "get_device_name": lambda device=None: f"late {this.kind}:{device_index(device)}",
    }
