"""Watches one process while it saves or loads: what it tells other ranks by collectives, and how much memory it takes.

::

    with watched() as seen:
        bcp.save(path, states)
    assert not seen.collectives
    assert seen.largest < full_nbytes
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from layouts import mesh_of
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Replicate, Shard

__all__ = ["Seen", "seen_of", "watched"]

METHODS = {
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "send", "recv", "recv_anysource"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base"),
    *("all_gather_single", "all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "barrier", "monitored_barrier"),
}
"""Of ``ProcessGroup``: every function of ``torch.distributed`` that communicates ends in one of them."""

ALLOCATING = {
    torch: "empty zeros ones full arange tensor empty_like zeros_like ones_like full_like empty_strided cat concat "
    "stack clone as_tensor from_numpy",
    torch.Tensor: "clone contiguous to cpu cuda float bfloat16 half double reshape flatten new_empty new_zeros "
    "new_ones new_full new_tensor resolve_conj repeat",
    np: "empty zeros ones full empty_like zeros_like concatenate array ascontiguousarray copy",
}
"""What makes tensors and arrays."""


@dataclass(slots=True)
class Seen:
    """What happened, on all threads of the process.

    Attributes:
        collectives: calls by what was called. ``"sequence of <group>"`` counts what a group's backend itself
            numbered, so that calls from C++ (DTensor's, functional collectives) are seen, too.
        largest: bytes of the biggest tensor or array that one of the functions of torch and numpy in ``ALLOCATING``
            made in memory of its own. What C++ allocates inside of other functions is not seen here, and what is made
            by a name imported before (``from torch import empty``) is not either.
        resident: by how many bytes the process's resident memory was at its most above where it began, as the kernel
            counts it: everything, allocator noise included. Good to some MiB.
    """

    collectives: Counter[str] = field(default_factory=Counter)
    largest: int = 0
    resident: int = 0


@contextmanager
def watched() -> Iterator[Seen]:
    """Watch all threads until the context ends; the counts are complete only then."""
    seen, lock = Seen(), threading.Lock()
    group = dist.ProcessGroup
    with ExitStack() as patches:
        for name in sorted(METHODS):
            if hasattr(group, name):
                patches.enter_context(patch.object(group, name, _counting(getattr(group, name), name, seen, lock)))
        for owner, names in ALLOCATING.items():
            for name in names.split():
                patches.enter_context(patch.object(owner, name, _measuring(getattr(owner, name), seen, lock)))
        numbers, before = _sequences(), _restart_peak()
        yield seen
        seen.resident = _status("VmHWM") - before
        for name, number in _sequences().items():
            if number != numbers.get(name, 0):
                seen.collectives[f"sequence of {name}"] += number - numbers.get(name, 0)


def _counting(method: Callable[..., Any], name: str, seen: Seen, lock: threading.Lock) -> Callable[..., Any]:
    """Wrap a communicating method."""

    @functools.wraps(method)
    def call(*args: Any, **how: Any) -> Any:
        with lock:
            seen.collectives[name] += 1
        return method(*args, **how)

    return call


def _measuring(function: Callable[..., Any], seen: Seen, lock: threading.Lock) -> Callable[..., Any]:
    """Wrap an allocating function. A result that looks into the first argument's memory allocated nothing."""

    @functools.wraps(function)
    def call(*args: Any, **how: Any) -> Any:
        made = function(*args, **how)
        nbytes = _own_nbytes(made, args[0] if args else None)
        if nbytes > seen.largest:
            with lock:
                seen.largest = max(seen.largest, nbytes)
        return made

    return call


def _own_nbytes(made: object, source: object) -> int:
    """Return the bytes of new memory behind a result: 0 for a view of ``source``, and for what has no memory."""
    if isinstance(made, np.ndarray):
        return 0 if made.base is not None else made.nbytes
    local = getattr(made, "_local_tensor", made)
    if not isinstance(local, torch.Tensor) or local.is_meta or local.layout is not torch.strided:
        return 0
    source = getattr(source, "_local_tensor", source)
    if isinstance(source, np.ndarray):
        return 0
    if isinstance(source, torch.Tensor) and source.layout is torch.strided and _starts(local) == _starts(source):
        return 0
    return local.untyped_storage().nbytes()


def _starts(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


def _sequences() -> dict[str, int]:
    """Return how many operations each process group of this process has begun."""
    groups = distributed_c10d._world.pg_map if dist.is_initialized() else {}
    return {group.group_name: group._get_sequence_number_for_group() for group in groups}


def _restart_peak() -> int:
    """Let the kernel's peak of resident memory begin anew; return the bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    """Return one size from the kernel's account of this process, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def seen_of(what: str) -> Seen:
    """Do one thing while watching, in a thread of its own; return what was seen."""
    mesh_of((dist.get_world_size(),))  # itself talks to the others
    with watched() as seen:
        thread = threading.Thread(target=DEEDS[what])
        thread.start()
        thread.join()
    return seen


def _redistribute() -> None:
    shard = DTensor.from_local(torch.ones(2), mesh_of((dist.get_world_size(),)), [Shard(0)], run_check=False)
    shard.redistribute(placements=[Replicate()]).to_local().sum().item()


DEEDS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: torch.ones(4) + 1,
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "gather_object": lambda: dist.all_gather_object([None] * dist.get_world_size(), 1),
    "redistribute": _redistribute,
    "allocate": lambda: torch.zeros(1 << 20),
    "allocate elsewhere": lambda: torch.ones(4).repeat(1 << 18),
    "look": lambda: torch.zeros(1).expand(1 << 22).reshape(-1, 1 << 22)[0].view(-1),
}
