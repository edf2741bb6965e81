"""torch's ``ShardedTensor``: of FSDP1's sharded state dicts without a device mesh, and of torchrec's tables.

Only ``local_shards()`` and ``metadata()`` are called. Every torch function of such a tensor, ``.shape`` included, warns
that the class is deprecated, and most of them raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import starmap
from operator import add
from typing import Any

import torch

from bcp.errors import StateError
from bcp.plan.box import Box
from bcp.planners.dtensor import is_dtensor
from bcp.planners.placement import Placement, Sharded, Span

__all__ = ["is_sharded_tensor", "local_shards", "shape_of", "sharded_leaf"]


def is_sharded_tensor(value: Any) -> bool:
    """Whether a value is a ``torch.distributed._shard.sharded_tensor.ShardedTensor``."""
    return _is_kind(value.__class__)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the global shape of a ``ShardedTensor``, or the shape of any other tensor."""
    return tuple(tensor.metadata().size if is_sharded_tensor(tensor) else tensor.shape)


def local_shards(tensor: Any) -> list[torch.Tensor]:
    """Return the local tensors of a ``ShardedTensor``, those of nested ones included."""
    parts = [shard.tensor for shard in tensor.local_shards()]
    return [each for part in parts for each in (local_shards(part) if is_sharded_tensor(part) else [part])]


def sharded_leaf(tensor: Any, label: str) -> Sharded:
    """Return the local shards of a ``ShardedTensor`` as one leaf, in the order of their offsets.

    A local shard may itself be a ``ShardedTensor``: FSDP1 over tensor parallelism nests them.

    Args:
        tensor: the ``ShardedTensor``.
        label: names it in messages.

    Raises:
        StateError: it has remote shards, or its local shards are not what its metadata says.

    """
    shape = shape_of(tensor)
    parts = list(_parts(tensor, shape, (0,) * len(shape), label))
    parts.sort(key=lambda part: part.placement.spans[0].box.offsets)
    if len(dtypes := {part.tensor.dtype for part in parts}) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise StateError(f"{label} is a ShardedTensor whose local shards have the dtypes {names}; give them one dtype")
    if not parts:
        nothing = torch.empty(0, dtype=tensor.metadata().tensor_properties.dtype, device="cpu")
        return Sharded(nothing, Placement(shape, (0,), ()))
    return Sharded.joined(parts)


def _parts(tensor: Any, shape: tuple[int, ...], corner: tuple[int, ...], label: str) -> Iterator[Sharded]:
    """Yield each local shard with elements; ``corner`` is where the tensor begins in the one of this shape."""
    if getattr(tensor, "_init_rrefs", False) or getattr(tensor, "_remote_shards", None):
        raise StateError(
            f"{label} is a ShardedTensor with remote shards (init_rrefs=True), which are only there over RPC; pass one "
            "that was made with init_rrefs=False, of which every rank has its local shards"
        )
    for shard in tensor.local_shards():
        sizes = tuple(shard.metadata.shard_sizes)
        offsets = tuple(starmap(add, zip(corner, shard.metadata.shard_offsets, strict=False)))
        _check_shard(shard, offsets, shape, label)
        if is_sharded_tensor(shard.tensor):
            yield from _parts(shard.tensor, shape, offsets, label)
        elif 0 not in sizes:
            yield Sharded(shard.tensor, Placement(shape, sizes, (Span.whole(Box(offsets, sizes)),)))


def _check_shard(shard: Any, offsets: tuple[int, ...], shape: tuple[int, ...], label: str) -> None:
    """Raise StateError for a local shard that is not the block that its metadata states."""
    sizes, local = tuple(shard.metadata.shard_sizes), shard.tensor
    stated = f"{label} is a ShardedTensor whose metadata states a local shard of sizes {list(sizes)} at {list(offsets)}"
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=False)]
    if len({len(sizes), len(shard.metadata.shard_offsets), len(shape)}) > 1 or any(
        offset < 0 or end > length for offset, end, length in zip(offsets, ends, shape, strict=True)
    ):
        raise StateError(f"{stated}, outside of its size {list(shape)}; repair its metadata")
    if is_dtensor(local):
        raise StateError(f"{stated}, and the shard is a DTensor; pass its to_local() as the shard, or DTensors alone")
    held = shape_of(local)
    if held != sizes:
        raise StateError(f"{stated}, but the shard has the shape {list(held)}; pass a shard of the stated sizes")


@cache
def _is_kind(kind: type) -> bool:
    """Whether a class is ``ShardedTensor``; by name, as its module takes long to import and is deprecated."""
    names = ((base.__module__, base.__name__) for base in kind.__mro__)
    return any(name == "ShardedTensorBase" and module.startswith("torch.distributed.") for module, name in names)
