"""Coordinators: of one rank alone, of ranks in one process, and over a tree of gRPC streams."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bcp._sockets import Tls
from bcp.coordinators.local import SoloCoordinator, grpc_coordinators, memory_coordinators
from bcp.errors import InputError
from bcp.protocols import Coordinator
from bcp.runtime.imports import importing, lazy_names

if TYPE_CHECKING:
    from bcp.coordinators.tree.coordinator import GrpcCoordinator

__all__ = ["GrpcCoordinator", "SoloCoordinator", "Tls", "coordinator", "grpc_coordinators", "memory_coordinators"]

_of_group: WeakKeyDictionary[dist.ProcessGroup, Coordinator] = WeakKeyDictionary()


def coordinator(given: Coordinator | None = None) -> Coordinator:
    """Return the given coordinator, or the one of this job.

    A job with a default process group of more than one rank gets a :class:`GrpcCoordinator`, the same one as long as
    the group lives. Without such a group it is a :class:`SoloCoordinator`. Raises InputError if a launcher has
    started several ranks without a process group, or if the given object is no coordinator.
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
            with importing:
                from bcp.coordinators.tree.coordinator import GrpcCoordinator  # noqa: PLC0415 -- imports gRPC

            _of_group[group] = GrpcCoordinator.over(group)
        return _of_group[group]
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks not in ("", "1"):
        raise InputError(
            f"WORLD_SIZE={ranks}, but torch.distributed is not initialised: call init_process_group before bcp, "
            "or pass coordinator=SoloCoordinator() if every rank is to save or load by itself"
        )
    return SoloCoordinator()


if not TYPE_CHECKING:  # it imports gRPC, and sets it up for this process
    __getattr__, __dir__ = lazy_names(__name__, {"bcp.coordinators.tree.coordinator": ["GrpcCoordinator"]}, __all__)
