"""Leaves that are the same memory, and which of their names the memory goes by.

A spec is everything that a table says of a tensor but its name; many leaves share one.

A model has thousands of tensors, of a few dozen forms. To work a form out takes 20 us; to find it again takes 1 us, in
which torch says the shape, strides, dtype and device of a tensor. No tensor is kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn

from bcp.errors import StateError
from bcp.plan.columns import Ints
from bcp.state.dtensor import Meshes, layout_of, local_tensor, torchs
from bcp.state.hooks import HOOKS, MEGATRON_FSDP, is_hooked
from bcp.state.memory import FLATTENED, memory, parts_of, unsupported
from bcp.state.placement import Leaf, LocalInterval, LocalShard, ShardedLeaf, memory_of, numel_of

__all__ = [
    "LEFT_OUT",
    "PLAIN",
    "LeafInspection",
    "TensorSpec",
    "Ties",
    "firsts_of",
    "inspect_leaves",
    "is_flat",
    "ties_of",
]

PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""The types of tensors that are their own memory; subclasses have to be asked."""

_CHUNKS = HOOKS[0]

_MARKS = MEGATRON_FSDP | {FLATTENED}
"""Attributes of parameters that may have to be refused."""

_MOST = 16_384
"""So many forms are remembered."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """All of a leaf but its name, its values, and where they are in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # shape of the logical tensor
    stride: tuple[int, ...]  # stride of the logical tensor in elements; () if its parts do not tell
    device: str  # device type
    requires_grad: bool
    tracked: bool  # whether autograd tracks its memory here, which is another tensor in a DTensor
    spans: tuple[LocalInterval, ...]  # the shards on this rank; their ``at`` means nothing
    whole: bool  # whether there is one shard only, and its elements are those of the local tensor as it is
    plain: bool  # whether they are also bytes of the CPU's memory in row-major order


_forms: dict[object, TensorSpec] = {}
"""By what torch says of a leaf: all that its form depends on."""


@dataclass(frozen=True, slots=True)
class LeafInspection:
    """The specs and addresses of leaves."""

    leaves: Sequence[Leaf]
    memory: Sequence[torch.Tensor]  # the tensor whose elements are those of the leaf that are here
    forms: Sequence[TensorSpec]
    addresses: Ints  # int64[n], where its memory is: the same number for leaves that are the same memory
    parts: Mapping[int, Sequence[LocalShard]]  # by number of a leaf, its parts, where these had to be found anyway

    def views(self, number: int, label: str) -> list[torch.Tensor]:
        """Return the memory of each shard of a leaf whose form is not ``whole``."""
        return [part.view for part in self.parts.get(number) or parts_of(self.leaves[number], label)]


def is_flat(state: object) -> TypeGuard[Mapping[str, torch.Tensor]]:
    """Whether a state is a mapping of names to plain tensors and nothing else; walking through it takes longer."""
    return isinstance(state, Mapping) and set(map(type, state)) <= {str} and PLAIN.issuperset(map(type, state.values()))


def inspect_leaves(leaves: Sequence[Leaf], label: Callable[[int], str]) -> LeafInspection:
    """Inspect leaves; ``label`` returns the name of a leaf for messages, by its number.

    Raises StateError if a leaf has no plain memory on this rank, or states impossible shards.
    """
    meshes, parts, memory = Meshes(), dict[int, Sequence[LocalShard]](), list[torch.Tensor]()
    forms, placed = [], dict[object, TensorSpec]()
    for number, leaf in enumerate(leaves):
        kind = type(leaf)
        held: Any = leaf if kind in PLAIN else local_tensor(memory_of(leaf))
        known = placed if kind is ShardedLeaf else _forms
        try:
            facts = _spec_key(leaf, held, kind, meshes)
        except RuntimeError:  # what has no shape or no strides is refused, with the reason
            facts = None
        if (form := known.get(facts)) is None:
            form, parts[number] = _inspect_closely(leaf, held, label(number))
            _remember(known, facts, form)
        memory.append(held)
        forms.append(form)
    try:
        addresses = np.fromiter((held.data_ptr() for held in memory), np.int64, len(memory))
    except RuntimeError:  # a tensor that is not strided may look like one that is, but for its address
        asked = (_address(leaf, memory[number], label, number) for number, leaf in enumerate(leaves))
        addresses = np.fromiter(asked, np.int64, len(memory))
    for number in np.flatnonzero(addresses == 0).tolist():  # empty shards have none, and what torch.func wraps
        if reason := unsupported(leaves[number]):
            raise StateError(f"{label(number)} {reason}")
    return LeafInspection(leaves, memory, forms, addresses, parts)


def _spec_key(leaf: Any, memory: torch.Tensor, kind: type, meshes: Meshes) -> object:
    """Return all that the form of a leaf depends on, to be compared; None where only a close look can tell.

    It also depends on the memory being strided: memory of other layouts has no address.
    """
    marked = kind is not ShardedLeaf and not _MARKS.isdisjoint(leaf.__dict__)
    if type(memory) not in PLAIN or hasattr(memory, _CHUNKS) or marked:
        return None
    order = memory.is_contiguous() or memory.stride()  # to ask for strides takes twice as long
    memory_key = memory.shape, order, memory.dtype, memory.device, memory.requires_grad, memory.is_neg()
    if leaf is memory:
        return memory_key
    if kind is ShardedLeaf:  # whose placement is there as long as the leaves are looked at, and no longer
        return (id(leaf.placement), memory_key) if memory is leaf.tensor and not leaf.more else None
    if kind is not torchs("DTensor") or (layout := layout_of(leaf, meshes)) is None:
        return None
    return layout, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, memory_key


def _address(leaf: Leaf, memory: torch.Tensor, label: Callable[[int], str], number: int) -> int:
    """Return the data pointer of a leaf, or a unique number for a tensor subclass that states its own shards."""
    try:
        return memory.data_ptr()
    except RuntimeError as error:
        if reason := unsupported(leaf):
            raise StateError(f"{label(number)} {reason}") from error
        return id(memory)


def _remember(known: dict[object, TensorSpec], facts: object, form: TensorSpec) -> None:
    """Remember a form, if it may come again; of too many, begin anew."""
    if len(known) >= _MOST:
        known.clear()
    if facts is not None:
        known[facts] = form


def _inspect_closely(leaf: Leaf, memory: torch.Tensor, label: str) -> tuple[TensorSpec, list[LocalShard]]:
    """Take a close look at a leaf: return its form, and its parts."""
    if reason := unsupported(leaf):
        raise StateError(f"{label} {reason}")
    parts, tensor = list(parts_of(leaf, label)), memory_of(leaf)
    if other := {part.view.dtype for part in parts} - {tensor.dtype}:
        raise StateError(f"{label} is {tensor.dtype}, but has memory of {other.pop()} here; give both one dtype")
    # complex ones may be conjugated lazily, which is not asked each time
    as_it_is = type(memory) in PLAIN and not (is_hooked(memory) or memory.is_neg() or memory.is_complex())
    alone = not (isinstance(leaf, ShardedLeaf) and leaf.more)
    whole = as_it_is and alone and [part.view.shape for part in parts] == [memory.shape]
    form = TensorSpec(
        dtype=tensor.dtype,
        shape=leaf.placement.shape if isinstance(leaf, ShardedLeaf) else tuple(tensor.shape),
        stride=_stride(leaf),
        device=tensor.device.type,
        requires_grad=tensor.requires_grad,
        tracked=memory.requires_grad,
        spans=tuple(LocalInterval(part.box, part.start, part.stop) for part in parts),
        whole=whole,
        plain=whole and memory.is_cpu and memory.is_contiguous(),
    )
    return form, parts


def _stride(leaf: Leaf) -> tuple[int, ...]:
    """Return the strides of the logical tensor in elements; () where its parts do not tell."""
    if isinstance(leaf, ShardedLeaf):
        return _row_major(leaf.placement.shape)
    if type(leaf) in PLAIN and leaf.is_contiguous():  # where torch may say anything of dimensions of length 1
        return _row_major(leaf.shape)
    return () if is_hooked(leaf) else tuple(leaf.stride())


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(length, 1) for length in shape[dim + 1 :]) for dim in range(len(shape)))


LEFT_OUT = -1

Ties = list[list[int]]
"""Numbers of leaves of one kind that are the same memory seen in the same way, two at least in each list."""


def ties_of(names: Sequence[tuple[str, str]], looks: LeafInspection) -> Ties:
    """Find the leaves of one kind that are the same elements in the same order; ``names``: (kind, FQN) of each leaf."""
    addresses = looks.addresses[: len(names)]
    # 0.3 ms for 20,000; 5.8 in a set, whose hashes are the numbers themselves, and these all end in zeros
    distinct, count = np.unique(addresses, return_counts=True)
    if len(distinct) == len(addresses):
        return []
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for number in np.flatnonzero(np.isin(addresses, distinct[count > 1])).tolist():
        leaf = looks.leaves[number]
        same = memory(leaf) if numel_of(leaf) else id(leaf) if isinstance(leaf, ShardedLeaf) else number
        groups[names[number][0], same].append(number)
    return [group for group in groups.values() if len(group) > 1]


def firsts_of(
    ties: Ties, names: Sequence[tuple[str, str]], saved: Collection[tuple[str, str]] | None = None
) -> dict[int, int]:
    """Return, for each leaf that goes by the memory of another, the number of that one: the first in sorted order.

    If ``saved`` is given, names that are not in it are :data:`LEFT_OUT` if it has another one of the same memory.
    """
    firsts: dict[int, int] = {}
    for group in ties:
        known = [number for number in group if saved is not None and names[number] in saved]
        first, *others = sorted(known or group, key=names.__getitem__)
        firsts |= dict.fromkeys(others, first)
        firsts |= dict.fromkeys(set(group) - {first, *others}, LEFT_OUT)
    return firsts
