"""torch's ``ShardedTensor``: of FSDP1's sharded state dicts without a device mesh, and of torchrec's tables.

Only ``local_shards()`` and ``metadata()`` are called. Every torch function of such a tensor, ``.shape`` included, warns
that the class is deprecated, and most of them raise.

Tensors that say themselves which blocks they hold, by the methods that torch's own checkpoint planners ask.

``LocalShardsWrapper`` has both methods. Megatron-FSDP puts the first one on the local tensor of a DTensor, on the
tensor and not on its class, and does without the second.

Before Megatron-FSDP has done so, its parameters are DTensors whose placements do not say which rows are here, or plain
local tensors. These are known by attributes, and are refused.

veScale's ``RaggedShard``: a tensor that is cut, as flat memory, into parts of stated proportions (paper sec. 4.4).

Known by attributes alone, so that veScale need not be installed: a DTensor one of whose placements has ``dims`` and
``local_units``. Its values lie in one block, as they would without that placement. This rank has the flat interval
of the block that its units stand for: a :class:`~bcp.state.placement.Placement` of one interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import starmap
from operator import add
from typing import Any

import torch

from bcp.errors import StateError
from bcp.plan.box import Box
from bcp.runtime.imports import importing
from bcp.state.dtensor import is_dtensor, is_reordered, local_tensor, mesh_blocks
from bcp.state.placement import LocalInterval, Placement, ShardedLeaf

__all__ = [
    "ATTACH",
    "HOOKS",
    "MEGATRON_FSDP",
    "hooked_blocks",
    "hooked_placement",
    "is_hooked",
    "is_sharded_tensor",
    "local_shards",
    "ragged_placement",
    "shape_of",
    "sharded_leaf",
    "unstated",
]

HOOKS = ("__create_chunk_list__", "__get_tensor_shard__")
"""Which blocks there are; and where each of them is. Without the second, the tensor is its only block."""

MEGATRON_FSDP = frozenset(
    {"_mfsdp_parameter_group", "__fsdp_param__", "megatron_fsdp_dist_index", "_megatron_fsdp_model"}
)
"""Attributes that Megatron-FSDP sets on its parameters: the first one in version 2, the others in version 1."""

ATTACH = (
    "attach that to the parameters first, by Megatron-FSDP's preprocess_state_dict_for_uneven_dtensor(named) or, in "
    "version 2, attach_uneven_dtensor_metadata(model, named, {'state': {}}), where named = "
    "dict(model.named_parameters()); or pass the state dicts that its own checkpoint functions prepare"
)
"""The remedy for Megatron-FSDP's parameters."""


def is_hooked(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is no DTensor says itself which blocks it holds."""
    return hasattr(tensor, HOOKS[0]) and not is_dtensor(tensor)


def unstated(tensor: torch.Tensor) -> str:
    """Return the reason why the blocks of a Megatron-FSDP tensor are unknown, and the remedy; "" for all others.

    Its meshes may have a ``_shard_order``, in which ranks with the right local size hold other rows than the placements
    say. Replicas have no blocks to be stated.
    """
    marked = not MEGATRON_FSDP.isdisjoint(tensor.__dict__) or (is_dtensor(tensor) and is_reordered(tensor.device_mesh))
    if not marked or is_hooked(local_tensor(tensor)):
        return ""
    if is_dtensor(tensor) and all(type(placement).__name__ == "Replicate" for placement in tensor.placements):
        return ""
    return f"is sharded by Megatron-FSDP, and does not say which of its rows are here; {ATTACH}"


def hooked_blocks(tensor: Any, name: str, shape: tuple[int, ...]) -> list[tuple[Box, torch.Tensor]]:
    """Return the non-empty blocks of a tensor that says itself which they are, each with its view as it is.

    The tensor may be the local one of a DTensor; ``shape`` is that of the logical tensor. Raises StateError if a block
    lies outside of the logical tensor, a view has another size, or a method of the tensor raised.
    """
    try:
        stated = list(_stated(tensor, name))
    except StateError:
        raise
    except Exception as error:
        raise StateError(
            f"{name}: {type(tensor).__name__} raised {type(error).__name__}: {error} when asked for its blocks; repair "
            f"{' and '.join(HOOKS)}, or pass the plain tensors inside it"
        ) from error
    for box, view in stated:
        _check_block(tensor, box, view, name, shape)
    return [(box, view) for box, view in stated if box.numel]


def _check_block(tensor: Any, box: Box, view: Any, name: str, shape: tuple[int, ...]) -> None:
    """Raise StateError for a block that is not one of the logical tensor, or whose view is not of its size."""
    lengths = tuple(view.shape) if isinstance(view, torch.Tensor) else None
    if lengths != box.lengths and (box.numel or not hasattr(tensor, HOOKS[1])):
        gives = type(view).__name__ if lengths is None else lengths
        raise StateError(f"{name}: {type(tensor).__name__} states a block {box} but gives {gives}")
    if box.numel and (len(box.lengths) != len(shape) or Box.whole(shape).intersect(box) != box):
        raise StateError(f"{name}: {type(tensor).__name__} states a block {box} outside of the shape {shape}")


def hooked_placement(tensor: torch.Tensor, name: str) -> Placement | None:
    """Return where the local tensor of a DTensor lies that says so itself; None for any other tensor.

    Optimizer states that are made like such a parameter are DTensors too, but do not say it: they lie where it does.
    Raises StateError as :func:`hooked_blocks` does.
    """
    local = local_tensor(tensor)
    if not is_hooked(local) or hasattr(local, HOOKS[1]):
        return None
    spans = tuple(LocalInterval.whole(box) for box, _ in hooked_blocks(local, name, tuple(tensor.shape)))
    return Placement(tuple(tensor.shape), tuple(local.shape), spans)


def _stated(tensor: Any, name: str) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield every block that a tensor states, with its view."""
    parts = tensor.__create_chunk_list__()
    if not hasattr(tensor, HOOKS[1]):
        if len(parts) > 1 or (not parts and tensor.numel()):
            raise StateError(
                f"{name}: {type(tensor).__name__} of shape {tuple(tensor.shape)} states {len(parts)} blocks, and has "
                f"no {HOOKS[1]} that says where they are; it must be one block, or have that method"
            )
        yield from ((Box(tuple(part.offsets), tuple(part.sizes)), tensor) for part in parts)
        return
    with importing:
        from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: PLC0415 -- slow to import, rarely needed

    for index, part in enumerate(parts):
        view = tensor.__get_tensor_shard__(MetadataIndex(name, part.offsets, index))
        yield Box(tuple(part.offsets), tuple(part.sizes)), view


def ragged_placement(tensor: Any, name: str) -> Placement:
    """Return where the local tensor of a DTensor lies, if one of the DTensor's placements is ragged.

    ``dims`` are the dimensions whose rows are the unit of the cut: ``(0, ..., k-1)``, or ``()`` for a tensor that is
    whole wherever units are not 0. They say nothing about order: memory is cut in row-major order.

    The other placements always cut first. The factor of a strided ragged placement repeats that: it is the number of
    parts that ``Shard(0)`` on later mesh dimensions makes. Raises StateError if the placements cannot be read, or do
    not fit the tensor, the mesh or the local tensor.
    """
    mesh_dim, ragged = next((mesh_dim, p) for mesh_dim, p in enumerate(tensor.placements) if hasattr(p, "local_units"))
    label = f"{name}: {type(ragged).__name__}(dims={tuple(ragged.dims)}, local_units={tuple(ragged.local_units)})"
    _check(tensor, mesh_dim, ragged, label)
    local = local_tensor(tensor)
    others = [None if index == mesh_dim else placement for index, placement in enumerate(tensor.placements)]
    if (traced := mesh_blocks(tensor, others, name)) is None:
        return Placement(tuple(tensor.shape), tuple(local.shape), ())
    blocks = [box for box, _ in traced[1] if box.numel]
    if len(blocks) > 1:
        raise StateError(f"{label} cuts {len(blocks)} blocks at once, which is not supported; redistribute it")
    coordinate = tensor.device_mesh.get_coordinate()[mesh_dim]
    spans = tuple(LocalInterval(box, *_interval(ragged, coordinate, box.numel, label)) for box in blocks)
    placement = Placement(tuple(tensor.shape), tuple(local.shape), spans)
    if local.numel() != placement.numel or not local.is_contiguous():
        raise StateError(
            f"{label} gives this rank {placement.numel} elements of the {sum(box.numel for box in blocks)} that are "
            f"left of the shape {tuple(tensor.shape)}, but its local tensor has the shape {tuple(local.shape)} and "
            f"strides {local.stride()}; it must be contiguous and of that many elements"
        )
    return placement


def _check(tensor: Any, mesh_dim: int, ragged: Any, label: str) -> None:
    """Raise StateError for a ragged placement that does not say which elements are here."""
    parts, units = tuple(tensor.device_mesh.shape)[mesh_dim], tuple(ragged.local_units)
    factor, expected = getattr(ragged, "split_factor", None), _row_parts(tensor, mesh_dim)
    if factor not in (None, expected):
        raise StateError(
            f"{label} has split_factor={factor}, but Shard(0) of the later mesh dimensions makes {expected} parts: the "
            f"order of its elements is not known; make it with split_factor={expected}, or redistribute it to Shard"
        )
    if tuple(ragged.dims) != tuple(range(len(ragged.dims))) or len(ragged.dims) > tensor.dim():
        raise StateError(f"{label}: dims of a tensor of shape {tuple(tensor.shape)} must be its first ones, in order")
    if len(units) != parts or min(units, default=0) < 0 or not sum(units):
        raise StateError(
            f"{label}: needs {parts} units that are not negative, as many as mesh dimension {mesh_dim} has ranks"
        )


def _row_parts(tensor: Any, mesh_dim: int) -> int:
    """Return the number of parts that ``Shard(0)`` on later mesh dimensions makes of the rows."""
    behind = zip(tensor.placements[mesh_dim + 1 :], tuple(tensor.device_mesh.shape)[mesh_dim + 1 :], strict=False)
    return math.prod(parts for placement, parts in behind if getattr(placement, "dim", None) in (0, -tensor.dim()))


def _interval(ragged: Any, coordinate: int, numel: int, label: str) -> tuple[int, int]:
    """Return [start, stop) of the block's elements that are here."""
    units = tuple(ragged.local_units)
    if not ragged.dims:
        return (0, numel) if units[coordinate] else (0, 0)
    if numel % sum(units):
        raise StateError(f"{label}: {numel} elements cannot be cut into {sum(units)} equal units")
    unit, before = numel // sum(units), sum(units[:coordinate])
    return before * unit, (before + units[coordinate]) * unit


def is_sharded_tensor(value: Any) -> bool:
    """Whether a value is a ``torch.distributed._shard.sharded_tensor.ShardedTensor``."""
    return _is_kind(value.__class__)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the global shape of a ``ShardedTensor``, or the shape of any other tensor."""
    return tuple(tensor.metadata().size if is_sharded_tensor(tensor) else tensor.shape)


def local_shards(tensor: Any) -> list[torch.Tensor]:
    """Return the local tensors of a ``ShardedTensor``, those of nested ones included."""
    parts = [shard.tensor for shard in tensor.local_shards()]
    return [local for part in parts for local in (local_shards(part) if is_sharded_tensor(part) else [part])]


def sharded_leaf(tensor: Any, label: str) -> ShardedLeaf:
    """Return the local shards of a ``ShardedTensor`` as one leaf, in the order of their offsets.

    A local shard may itself be a ``ShardedTensor``: FSDP1 over tensor parallelism nests them. Raises StateError if it
    has remote shards, or its local shards contradict its metadata.
    """
    shape = shape_of(tensor)
    parts = list(_parts(tensor, shape, (0,) * len(shape), label))
    parts.sort(key=lambda part: part.placement.spans[0].box.offsets)
    if len(dtypes := {part.tensor.dtype for part in parts}) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise StateError(f"{label} is a ShardedTensor whose local shards have the dtypes {names}; give them one dtype")
    if not parts:
        nothing = torch.empty(0, dtype=tensor.metadata().tensor_properties.dtype, device="cpu")
        return ShardedLeaf(nothing, Placement(shape, (0,), ()))
    return ShardedLeaf.joined(parts)


def _parts(tensor: Any, shape: tuple[int, ...], corner: tuple[int, ...], label: str) -> Iterator[ShardedLeaf]:
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
            yield ShardedLeaf(shard.tensor, Placement(shape, sizes, (LocalInterval.whole(Box(offsets, sizes)),)))


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
