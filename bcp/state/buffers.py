"""Marks of buffers: their replicas may differ between ranks, as those of BatchNorm do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bcp.plan.shards import BUFFER, MAY_DIFFER, ONE_WRITER

__all__ = ["broadcast_buffers", "buffer_marks"]

_TENSOR, _PARAMETER = torch.Tensor, nn.Parameter


def broadcast_buffers(module: nn.Module, kinds: Collection[type]) -> frozenset[int]:
    """Return the ``id`` of each buffer that DistributedDataParallel overwrites with that of its rank 0.

    ``kinds`` are the types of all modules inside. The broadcast comes before the next forward pass. Until then the
    values of the other ranks differ, and are to be lost anyway. A communication hook for buffers may do anything else.
    """
    found = set[int]()
    for part in module.modules() if any(issubclass(kind, DistributedDataParallel) for kind in kinds) else ():
        if not isinstance(part, DistributedDataParallel) or hasattr(part, "buffer_hook"):
            continue
        if getattr(part, "forward_sync_buffers", getattr(part, "broadcast_buffers", True)):
            ignored = part.parameters_to_ignore
            found |= {id(buffer) for name, buffer in part.module.named_buffers() if name not in ignored}
    return frozenset(found)


def buffer_marks(broadcast: Collection[int], named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, int]]:
    """Yield (FQN, marks) of the buffers among a module's leaves; ``broadcast`` are :func:`broadcast_buffers`."""
    for fqn, value in named:
        kind = type(value)
        # the two kinds need not be asked: torch answers for a plain tensor in Python, in 2 us
        if kind is _PARAMETER or not (kind is _TENSOR or _is_buffer(value)):
            continue
        yield fqn, ONE_WRITER | MAY_DIFFER if id(value) in broadcast else BUFFER


def _is_buffer(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
