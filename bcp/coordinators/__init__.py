"""How ranks agree: alone, in one process, over the torch Store."""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from bcp.coordinators.memory import memory_coordinators
from bcp.coordinators.solo import SoloCoordinator
from bcp.coordinators.store import StoreCoordinator
from bcp.errors import InputError
from bcp.protocols import Coordinator

__all__ = ["SoloCoordinator", "StoreCoordinator", "coordinator", "memory_coordinators"]

_of_group: WeakKeyDictionary[dist.ProcessGroup, StoreCoordinator] = WeakKeyDictionary()


def coordinator(given: Coordinator | None = None) -> Coordinator:
    """Return the coordinator that was given, or the one of this job.

    That is one over the default process group's store, the same one as long as the group lives, where there is a
    group of more than one rank; and otherwise a :class:`SoloCoordinator`.

    Raises:
        InputError: a launcher has started several ranks, and they have no process group yet.

    """
    if given is not None:
        return given
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return SoloCoordinator()
        group = distributed_c10d._get_default_group()  # noqa: SLF001 -- no public name for the group's object
        if group not in _of_group:
            _of_group[group] = StoreCoordinator.over(group)
        return _of_group[group]
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks not in ("", "1"):
        raise InputError(
            f"WORLD_SIZE={ranks}, but torch.distributed is not initialised: call init_process_group before bcp, "
            "or pass coordinator=SoloCoordinator() if every rank is to save or load by itself"
        )
    return SoloCoordinator()
