"""How ranks agree: alone, in one process, over a tree of gRPC streams, over the torch Store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bcp._log import log
from bcp.coordinators.local import SoloCoordinator, grpc_coordinators, memory_coordinators
from bcp.coordinators.sockets import Tls
from bcp.coordinators.store import StoreCoordinator
from bcp.errors import InputError
from bcp.protocols import Coordinator

if TYPE_CHECKING:
    from bcp.coordinators.tree.coordinator import GrpcCoordinator

__all__ = [
    "GrpcCoordinator",
    "SoloCoordinator",
    "StoreCoordinator",
    "Tls",
    "coordinator",
    "grpc_coordinators",
    "memory_coordinators",
]

_of_group: WeakKeyDictionary[dist.ProcessGroup, Coordinator] = WeakKeyDictionary()


def coordinator(given: Coordinator | None = None) -> Coordinator:
    """Return the coordinator that was given, or the one of this job.

    That is one for the default process group, the same one as long as the group lives, where there is a group of more
    than one rank: a tree of gRPC streams, or, where grpcio cannot be imported, one over the group's store. All ranks
    need to have grpcio, or none. Without such a group it is a :class:`SoloCoordinator`.

    Raises:
        InputError: a launcher has started several ranks and there is no process group, not yet or no longer; or the
            object that was given is no coordinator.

    """
    if given is not None:
        if not hasattr(given, "begin"):
            raise InputError(f"coordinator={given!r} has no begin(); pass a bcp.protocols.Coordinator, or None")
        return given
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return SoloCoordinator()
        group = distributed_c10d._get_default_group()  # noqa: SLF001 -- no public name for the group's object
        if group not in _of_group:
            _of_group[group] = _over(group)
        return _of_group[group]
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks not in ("", "1"):
        raise InputError(
            f"WORLD_SIZE={ranks}, but torch.distributed is not initialised: call init_process_group before bcp, "
            "or pass coordinator=SoloCoordinator() if every rank is to save or load by itself"
        )
    return SoloCoordinator()


def _over(group: dist.ProcessGroup) -> Coordinator:
    """Return a new coordinator for a group, the best that can be imported."""
    try:
        from bcp.coordinators.tree.coordinator import GrpcCoordinator  # noqa: PLC0415 -- see __getattr__
    except ImportError as error:
        log.warning(
            "the ranks agree over the torch store, which is slower: grpcio cannot be imported", error=str(error)
        )
        return StoreCoordinator.over(group)
    return GrpcCoordinator.over(group)


def __getattr__(name: str) -> Any:
    """Import gRPC, and set it up for this process, only where it is wanted."""
    if name == "GrpcCoordinator":
        from bcp.coordinators.tree.coordinator import GrpcCoordinator  # noqa: PLC0415 -- needs grpcio

        return GrpcCoordinator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
