"""Notices writes to the state while its snapshot is being taken, which would tear the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bcp.errors import StateChangedError
from bcp.protocols import LocalShards

__all__ = ["being_loaded", "check_not_loading", "check_unchanged", "versions"]

_UNTRACKED = -1
"""Version of a tensor that torch does not count writes of: one made under ``torch.inference_mode()``."""


_loads: dict[int, Sequence[torch.Tensor]] = {}
"""What the loads of this process are filling, by ``id``; changes atomically under the interpreter."""

os.register_at_fork(after_in_child=_loads.clear)


@contextmanager
def being_loaded(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let no snapshot of these tensors begin: a load counts its writes before they begin, not when they have ended."""
    mine = list(tensors)
    _loads[id(mine)] = mine
    try:
        yield
    finally:
        _loads.pop(id(mine), None)  # a forked child has forgotten it


def check_not_loading(shards: LocalShards, rank: int) -> None:
    """Look whether a load of this process is filling the memory of one of the shards.

    Raises:
        StateChangedError: one does; names the first shard.

    """
    filled = {tensor.untyped_storage().data_ptr() for tensors in list(_loads.values()) for tensor in tensors} - {0}
    for row, tensor in enumerate(shards.tensors if filled else ()):
        if tensor.untyped_storage().data_ptr() in filled:
            meta = shards.table.meta(row)
            raise StateChangedError(
                f"{meta.kind} tensor {meta.fqn!r} is being loaded on rank {rank} while it is to be saved; save when "
                "the load has returned"
            )


def versions(shards: LocalShards) -> list[int]:
    """Return how often each shard's memory was written to so far, as autograd counts it.

    Every in-place operation counts, those under ``no_grad`` and of fused optimizers too; a write through ``.data``,
    numpy or a raw pointer does not.
    """
    try:
        return [tensor._version for tensor in shards.tensors]  # noqa: SLF001 -- torch's only name for it
    except RuntimeError:  # of one that is not counted
        return [_version(tensor) for tensor in shards.tensors]


def check_unchanged(shards: LocalShards, before: list[int], rank: int) -> None:
    """Compare with an earlier :func:`versions`.

    Raises:
        StateChangedError: a tensor was written to since; names the first one.

    """
    if versions(shards) == before:  # as a rule
        return
    for row, (tensor, version) in enumerate(zip(shards.tensors, before, strict=True)):
        if (now := _version(tensor)) != version:
            meta = shards.table.meta(row)
            raise StateChangedError(
                f"{meta.kind} tensor {meta.fqn!r} was written to {now - version} times on rank {rank} while its "
                "snapshot was being taken; wait for the snapshot (async_checkpoint=True returns after it) "
                "before the next optimizer step"
            )


def _version(tensor: torch.Tensor) -> int:
    """Return the version counter that the tensor shares with all views of its memory."""
    return _UNTRACKED if tensor.is_inference() else tensor._version  # noqa: SLF001 -- torch's only name for it
