"""Ranks that live in one process: for tests and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed import HashStore

from bcp.coordinators.store import StoreCoordinator
from bcp.coordinators.tree.topology import Tree
from bcp.protocols import Coordinator

if TYPE_CHECKING:
    from bcp.coordinators.tree.coordinator import GrpcCoordinator

__all__ = ["grpc_coordinators", "memory_coordinators"]


def memory_coordinators(world_size: int) -> list[Coordinator]:
    """Return a coordinator for each of so many ranks, which may be tasks, threads or loops of this process.

    They are the real ones, over a store in memory, and behave the same in everything.
    """
    store = HashStore()
    return [StoreCoordinator(store, rank, world_size) for rank in range(world_size)]


def grpc_coordinators(world_size: int, fanout: int = 16, hosts: Sequence[str] | None = None) -> list[GrpcCoordinator]:
    """Return a coordinator over gRPC for each of so many ranks of this process; needs grpcio.

    They connect over the loopback, and behave as in a job in everything. ``hosts`` names each rank's host, to shape
    the tree; None: all ranks are on one.
    """
    from bcp.coordinators.tree.coordinator import GrpcCoordinator  # noqa: PLC0415 -- may not be installed

    return GrpcCoordinator.in_memory(Tree.of(["host"] * world_size if hosts is None else hosts, fanout))
