"""Which blocks of the global tensor a DTensor holds here, traced from its placements without communication.

torch's own ``compute_local_shape_and_global_offset`` describes every local tensor as one block, which is wrong for
some layouts (an uneven FSDP2-after-TP parameter, a lone ``_StridedShard``); here the runs of indices are traced
dimension by dimension, and a local tensor is a *list* of blocks (paper sec. 3.2, 4.4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import placement_types as _placement_types

from bcp.errors import StateError
from bcp.plan.box import Box

__all__ = ["Run", "chunk", "dtensor_blocks", "hooked_blocks", "local_tensor", "runs_of"]

_StridedShard: Any = getattr(_placement_types, "_StridedShard", ())
"""() where torch no longer has it: nothing is an instance of it then."""

Run = tuple[int, int]
"""(first global index, how many); a local dimension is a list of runs, back to back."""

Split = tuple[int, int]
"""(tensor dimension, split factor) that one mesh dimension splits; the factor is 1 but for ``_StridedShard``."""

Cut = tuple[int, int, int]
"""(parts, which of them is ours, split factor): how one mesh dimension cuts one tensor dimension."""


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the memory behind a DTensor itself: no copy, no view, no collective."""
    local: torch.Tensor = tensor._local_tensor  # noqa: SLF001 -- to_local() records autograd or returns a view
    return local


def dtensor_blocks(tensor: DTensor, name: str) -> list[tuple[Box, torch.Tensor]]:
    """Return the non-empty blocks that this rank holds, each with its view of the local tensor.

    Replicas give equal blocks on several ranks. A rank outside of the mesh holds nothing.

    Raises:
        StateError: a placement is a pending reduction or unknown, or placements and local shape disagree.

    """
    for placement in tensor.placements:
        _refuse_valueless(placement, name)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    local = local_tensor(tensor)
    expected, blocks = _traced(
        tuple(tensor.shape), _splits(tensor), tuple(tensor.device_mesh.shape), tuple(coordinate), _stated_orders(tensor)
    )
    if tuple(local.shape) != expected:
        raise StateError(
            f"{name}: placements {tensor.placements} of global shape {tuple(tensor.shape)} give this rank "
            f"{expected}, but its local tensor is {tuple(local.shape)}; build it with distribute_tensor, or pass "
            "shape and stride to DTensor.from_local"
        )
    return [(box, _view(local, start, box.lengths)) for box, start in blocks] if local.numel() else []


def hooked_blocks(tensor: Any, name: str) -> list[tuple[Box, torch.Tensor]]:
    """Return the blocks of a tensor that has torch's hooks ``__create_chunk_list__`` and ``__get_tensor_shard__``.

    Raises:
        StateError: a block's view is not of the size that the block list states.

    """
    from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: PLC0415 -- slow to import, rarely needed

    blocks = []
    for index, part in enumerate(tensor.__create_chunk_list__()):
        box = Box(tuple(part.offsets), tuple(part.sizes))
        view = tensor.__get_tensor_shard__(MetadataIndex(name, part.offsets, index))
        if tuple(view.shape) != box.lengths:
            raise StateError(f"{name}: {type(tensor).__name__} states a block {box} but gives {tuple(view.shape)}")
        if box.numel:
            blocks.append((box, view.detach()))
    return blocks


def runs_of(length: int, cuts: Sequence[Cut]) -> list[Run]:
    """Return the indices of one dimension that are left after the cuts, which are in mesh order.

    FSDP2 cuts after TP although its mesh dimension comes first, and says so by a split factor: how many shards
    there were already. Where those shards stand to its right the true order is right to left, which stays exact
    for uneven sizes. Otherwise a split factor means: group first, then take a part of each group.
    """
    runs = [(0, length)]
    if _rightmost_first(cuts):
        for parts, mine, _ in reversed(cuts):
            runs = chunk(runs, parts, mine)
        return runs
    for parts, mine, factor in cuts:
        groups = (chunk(runs, factor, group) for group in range(factor))
        runs = _merged(run for group in groups for run in chunk(group, parts, mine))
    return runs


def chunk(runs: Sequence[Run], parts: int, mine: int) -> list[Run]:
    """Cut runs, back to back, as ``torch.chunk`` does: parts of the rounded-up size, the last ones may be empty."""
    size = -(-sum(count for _, count in runs) // parts)
    low, high = size * mine, size * (mine + 1)
    out, position = [], 0
    for first, count in runs:
        start, stop = max(low, position), min(high, position + count)
        if start < stop:
            out.append((first + start - position, stop - start))
        position += count
    return out


@lru_cache(maxsize=4096)
def _traced(
    shape: tuple[int, ...],
    splits: tuple[Split | None, ...],
    parts: tuple[int, ...],
    coordinate: tuple[int, ...],
    orders: tuple[tuple[int, tuple[int, ...]], ...],
) -> tuple[tuple[int, ...], tuple[tuple[Box, tuple[int, ...]], ...]]:
    """Return the local shape, and the blocks with the local index where each starts.

    A model has thousands of tensors and a few layouts: remembering them takes a third off the planning.

    Args:
        shape: of the global tensor.
        splits: what each mesh dimension splits, None where it replicates.
        parts: how many parts each mesh dimension has.
        coordinate: which of them are ours.
        orders: (tensor dimension, mesh dimensions in the order in which they cut it), where the tensor states it.

    """
    runs = []
    for dim, length in enumerate(shape):
        mesh_dims = _order(orders, dim, [at for at, split in enumerate(splits) if split and split[0] == dim])
        factors = {at: split[1] for at, split in enumerate(splits) if split}
        runs.append(runs_of(length, [(parts[at], coordinate[at], factors[at]) for at in mesh_dims]))
    return tuple(sum(count for _, count in dim) for dim in runs), tuple(_boxes(runs))


def _splits(tensor: DTensor) -> tuple[Split | None, ...]:
    """Say what each mesh dimension splits."""
    return tuple(_split(placement, tensor.dim()) for placement in tensor.placements)


def _split(placement: Any, ndim: int) -> Split | None:
    """Return (tensor dimension, split factor) of a placement, None for one that splits nothing."""
    if isinstance(placement, Replicate) or not ndim:
        return None
    return placement.dim % ndim, int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def _refuse_valueless(placement: Any, name: str) -> None:
    """Raise :class:`~bcp.errors.StateError` for a placement that does not say which values are here."""
    if hasattr(placement, "local_units"):  # first: any other question to veScale's RaggedShard may crash
        raise StateError(f"{name} is a ragged shard, which this planner cannot read; use the planner of its framework")
    if not isinstance(placement, (Replicate, Shard, _StridedShard)):
        raise StateError(
            f"{name} has the placement {placement!r}: its values are not there before a reduction; "
            "redistribute it to Shard or Replicate first"
        )


def _stated_orders(tensor: DTensor) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return (tensor dimension, mesh dimensions in the order in which they cut it); torch >= 2.10 may state them."""
    entries = getattr(tensor._spec, "shard_order", None) or ()  # noqa: SLF001 -- not public yet
    return tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in entries)


def _order(orders: Sequence[tuple[int, Sequence[int]]], dim: int, mesh_dims: list[int]) -> Sequence[int]:
    """Return the mesh dimensions in the order in which they cut: as stated, otherwise mesh order."""
    stated = [mesh for tensor_dim, mesh in orders if tensor_dim == dim]
    return stated[0] if stated and sorted(stated[0]) == mesh_dims else mesh_dims


def _rightmost_first(cuts: Sequence[Cut]) -> bool:
    """Whether every split factor counts exactly the shards to its right: FSDP2 after TP."""
    factors = [factor for _, _, factor in cuts]
    right = [math.prod(parts for parts, _, _ in cuts[index + 1 :]) for index in range(len(cuts))]
    return max(factors, default=1) > 1 and all(f in (1, n) for f, n in zip(factors, right, strict=True))


def _merged(runs: Iterator[Run]) -> list[Run]:
    """Join runs that touch."""
    out: list[Run] = []
    for first, count in runs:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + count)
        else:
            out.append((first, count))
    return out


def _boxes(runs: Sequence[Sequence[Run]]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield every combination of runs as a box, with the local index where it starts."""
    placed = []
    for dim in runs:
        starts = [sum(count for _, count in dim[:index]) for index in range(len(dim))]
        placed.append([(first, count, start) for (first, count), start in zip(dim, starts, strict=True)])
    for corner in product(*placed):
        yield Box(tuple(c[0] for c in corner), tuple(c[1] for c in corner)), tuple(c[2] for c in corner)


def _view(local: torch.Tensor, start: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return that block of the local tensor, as a view."""
    view = local.detach()
    if tuple(view.shape) == tuple(lengths):
        return view
    for dim, (first, count) in enumerate(zip(start, lengths, strict=True)):
        view = view.narrow(dim, first, count)
    return view
