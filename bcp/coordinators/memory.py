"""Ranks that live in one process: for tests."""

from __future__ import annotations

from torch.distributed import HashStore

from bcp.coordinators.store import StoreCoordinator
from bcp.protocols import Coordinator

__all__ = ["memory_coordinators"]


def memory_coordinators(world_size: int) -> list[Coordinator]:
    """Return a coordinator for each of so many ranks, which may be tasks, threads or loops of this process.

    They are the real ones, over a store in memory, and behave the same in everything.
    """
    store = HashStore()
    return [StoreCoordinator(store, rank, world_size) for rank in range(world_size)]
