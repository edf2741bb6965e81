"""The one record that every sharding framework's state comes down to (paper sec. 3.2, 4.4, Fig. 7, Fig. 11).

FSDP1, Megatron's distributed optimizer, DeepSpeed and veScale's ragged shards keep a rank's part of a tensor alike: as
flat intervals of boxes, in one local tensor. A planner states which; nobody gathers, decomposes or copies anything.

The place of this rank in the parallel topology: names of dimensions and this rank's coordinates.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from bcp.errors import StateError
from bcp.plan.box import Box
from bcp.protocols import States
from bcp.state.dtensor import is_dtensor

__all__ = ["Leaf", "LocalInterval", "LocalShard", "Placement", "ShardedLeaf", "coordinates", "memory_of", "numel_of"]

LOOKED_AT = 64
"""Tensors that are asked for their mesh: all of a model have the same ones, as a rule."""

MEGATRON = "megatron.core.parallel_state"
_MEGATRON = {
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "tp": "tensor_model_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
}


def coordinates(states: States) -> dict[str, int]:
    """Return this rank's coordinates, as in ``{"pp": 0, "dp": 3, "tp": 1}``; empty if nothing tells them.

    They are Megatron's if its groups are initialized; else those in the largest device mesh of the states' DTensors.
    """
    return _of_megatron() or _of_mesh(states)


def _of_megatron() -> dict[str, int]:
    """Return the coordinates in Megatron's groups; without context and expert parallelism if there is none."""
    groups: Any = sys.modules.get(MEGATRON)
    if groups is None or not groups.model_parallel_is_initialized():
        return {}
    sizes = {name: getattr(groups, f"get_{words}_world_size")() for name, words in _MEGATRON.items()}
    return {
        name: int(getattr(groups, f"get_{words}_rank")())
        for name, words in _MEGATRON.items()
        if sizes[name] > 1 or name in ("pp", "dp", "tp")
    }


def _of_mesh(states: States) -> dict[str, int]:
    """Return the coordinates in the device mesh with the most dimensions, and of these in the largest one."""
    tensors = (leaf for leaf in islice(_leaves(states), LOOKED_AT) if is_dtensor(leaf))
    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in tensors}.values()
    mesh = max(meshes, key=lambda device_mesh: (device_mesh.ndim, device_mesh.size()), default=None)
    place = None if mesh is None else mesh.get_coordinate()
    if mesh is None or place is None:
        return {}
    names = mesh.mesh_dim_names or tuple(f"dim_{number}" for number in range(mesh.ndim))
    return dict(zip(names, map(int, place), strict=True))


def _leaves(value: object) -> Iterator[object]:
    """Yield the leaves of modules, mappings and lists, one after the other."""
    if isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from _leaves(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from _leaves(child)
    else:
        yield value


@dataclass(frozen=True, slots=True)
class LocalInterval:
    """A flat interval of a block of a logical tensor, and where it lies in local memory."""

    box: Box  # a block of the logical tensor
    start: int  # first flat position inside the box that is here
    # one past the last. ``start == stop``: nothing is here. A rank states that too, so that all ranks of a sharding
    # group state the same boxes and are planned for as one.
    stop: int
    offset: int = 0  # where the interval begins in the local tensor, in elements of the flattened tensor

    @classmethod
    def whole(cls, box: Box, offset: int = 0) -> LocalInterval:
        """Return the span that is all of a box."""
        return cls(box, 0, box.numel, offset)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its box."""
        return self.start == 0 and self.stop == self.box.numel


@dataclass(frozen=True, slots=True)
class Placement:
    """Which intervals of which blocks of a logical tensor lie where in a local tensor."""

    shape: tuple[int, ...]  # shape of the logical tensor: unsharded, without padding
    local: tuple[int, ...]  # shape of the local tensor
    spans: tuple[LocalInterval, ...]  # its elements of the logical tensor; others (as padding) are never touched

    @property
    def numel(self) -> int:
        """How many elements of the logical tensor are here."""
        return sum(span.stop - span.start for span in self.spans)


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One shard: a flat interval of a box, and the live memory where it is."""

    box: Box  # a block of the logical tensor
    start: int  # first flat position inside the box
    stop: int  # one past the last
    view: torch.Tensor  # has the box's shape if the interval is all of the box, else 1-D: ``stop - start`` elements


@dataclass(frozen=True, slots=True)
class ShardedLeaf:
    """A leaf of which a framework keeps parts in a local tensor, or in several."""

    tensor: torch.Tensor  # the live local memory
    placement: Placement  # its place in the logical tensor
    more: tuple[ShardedLeaf, ...] = ()  # other local tensors of the same logical tensor; these have no ``more``

    @classmethod
    def joined(cls, leaves: Sequence[ShardedLeaf]) -> ShardedLeaf:
        """Return one leaf of the leaves of one logical tensor, of which there is at least one."""
        first, *others = leaves
        return cls(first.tensor, first.placement, tuple(others))

    def parts(self, label: str) -> Iterator[LocalShard]:
        """Yield a part for each span. Raises StateError if memory contradicts the placement, or is not contiguous."""
        for leaf in (self, *self.more):
            yield from leaf._own_parts(label)  # noqa: SLF001 -- of the same class

    def _own_parts(self, label: str) -> Iterator[LocalShard]:
        """Yield the parts in ``tensor``."""
        local, placement = self.tensor.detach(), self.placement
        if tuple(local.shape) != placement.local:
            raise StateError(
                f"{label}: its placement is of a local tensor of shape {list(placement.local)}, but that is "
                f"{list(local.shape)}; was it replaced since? Save outside of forward and backward"
            )
        spans = placement.spans
        if len(spans) == 1 and spans[0].is_whole and spans[0].box.lengths == placement.local:
            yield LocalShard(spans[0].box, 0, spans[0].stop, local)
            return
        if not local.is_contiguous():
            raise StateError(f"{label}: {len(spans)} parts of it lie in memory that is not contiguous; make it so")
        flat = local.view(-1)
        for span in spans:
            view = flat.narrow(0, span.offset if span.stop > span.start else 0, span.stop - span.start)
            yield LocalShard(span.box, span.start, span.stop, view.view(span.box.lengths) if span.is_whole else view)


Leaf = torch.Tensor | ShardedLeaf
"""A tensor leaf: a tensor that is whole or says itself (DTensor) which part of it is here, or one that was placed."""


def numel_of(leaf: Leaf) -> int:
    """Return how many elements a leaf has: of a placed one here, of any other tensor in all."""
    if not isinstance(leaf, ShardedLeaf):
        return math.prod(leaf.shape)
    return sum(sharded_leaf.placement.numel for sharded_leaf in (leaf, *leaf.more))


def memory_of(leaf: Leaf) -> torch.Tensor:
    """Return the tensor behind a leaf, of several the first."""
    return leaf.tensor if isinstance(leaf, ShardedLeaf) else leaf
