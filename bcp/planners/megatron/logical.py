"""The logical tensor, and the part of it, of each local tensor in Megatron's sharded state dicts.

Logical names are the keys that Megatron gives with numbered layers. Axes that Megatron puts in front of a tensor for
layers or experts are made part of the name. Every expert is a tensor of its own, as in memory. So the names do not
depend on how many experts a rank holds, and agree with those of frameworks without such an axis. A load finds tensors
that were saved with more or fewer such axes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bcp.errors import StateError
from bcp.plan.box import Box
from bcp.plan.numbered import numbered
from bcp.state.names import walk
from bcp.state.placement import LocalInterval, Placement

__all__ = [
    "LogicalShard",
    "flat_placement",
    "fresh_placement",
    "logical_shards",
    "named",
    "regrouped",
    "whole_placement",
]


@dataclass(frozen=True, slots=True)
class LogicalShard:
    """The shard of one logical tensor that a local tensor, or a part of it, holds."""

    fqn: str  # name of the logical tensor
    shape: tuple[int, ...]  # shape of the logical tensor
    spans: tuple[LocalInterval, ...]  # places of its elements in the local tensor
    main: bool  # whether this pipeline and tensor parallel rank is the first that has these elements
    flexible: bool  # whether lengths may differ from the checkpoint's, as that of the padded vocabulary

    def fitted(self, shape: tuple[int, ...]) -> LogicalShard:
        """Return the part of a flexible shard that a logical tensor of other lengths has, too."""
        if not self.flexible or shape == self.shape or len(shape) != len(self.shape):
            return self
        spans = (part for span in self.spans for part in _shortened(span, shape))
        return dataclasses.replace(self, shape=shape, spans=tuple(spans))


def logical_shards(leaf: Any) -> list[LogicalShard]:
    """Return the shards of a ``ShardedTensor`` or a ``ShardedTensorFactory``.

    Raises StateError if a factory's children are not made of runs of its tensor, or do not make up all of it. Raises
    StateError for a flattened range.
    """
    if getattr(leaf, "flattened_range", None) is not None:
        raise StateError(
            f"{leaf.key!r} has a flattened_range, an old format of Megatron's distributed optimizer; pass the "
            "optimizer itself as states['optimizer']"
        )
    if hasattr(leaf, "build"):
        return _built(leaf)
    spans = (LocalInterval.whole(_box(leaf)),)
    return [LogicalShard(named(leaf), _shape(leaf), spans, _is_main(leaf), bool(leaf.allow_shape_mismatch))]


def whole_placement(shard: LogicalShard, local: torch.Tensor) -> Placement:
    """Say where a shard lies in the local tensor itself, or in one of its shape."""
    return Placement(shard.shape, tuple(local.shape), shard.spans)


def fresh_placement(shard: LogicalShard, local: torch.Tensor, low: int, high: int) -> Placement:
    """Say where a shard lies in the local tensor, of which only the elements [low, high) count."""
    return Placement(shard.shape, tuple(local.shape), _cut_all(shard, low, high, 0))


def flat_placement(shard: LogicalShard, low: int, high: int, *, stated: bool = True) -> Placement:
    """Say where a shard lies in a 1-D tensor that has the elements [low, high) of the local tensor.

    Unless ``stated``, no element of the shard counts, because another rank has the same elements.
    """
    return Placement(shard.shape, (high - low,), _cut_all(shard, low, high if stated else low, low))


def named(leaf: Any) -> str:
    """Return the logical name: the key, with the indices on prepended axes where Megatron writes them itself."""
    return numbered(leaf.key, leaf.global_offset[: leaf.prepend_axis_num])


def regrouped(leaf: Any, shape_of: Callable[[str], tuple[int, ...] | None]) -> list[LogicalShard] | None:
    """Return the shards of a ``ShardedTensor`` under the names of a checkpoint with other prepended axes.

    An axis may be prepended on one side, and a dimension of the tensor on the other. ``shape_of`` returns the shape of
    a saved tensor, or None. Returns None if the checkpoint has the tensor under its own name, or under none.
    """
    if shape_of(named(leaf)) is not None:
        return None
    shape, offsets = tuple(leaf.global_shape), tuple(leaf.global_offset)
    lengths = (*itertools.repeat(1, leaf.prepend_axis_num), *leaf.local_shape)
    for axes in range(len(shape) + 1):
        if math.prod(lengths) and shape_of(numbered(leaf.key, offsets[:axes])) == shape[axes:]:
            box = Box(offsets[axes:], lengths[axes:])
            ranges = (range(low, low + length) for low, length in zip(offsets[:axes], lengths[:axes], strict=True))
            return [
                LogicalShard(
                    numbered(leaf.key, indices),
                    shape[axes:],
                    (LocalInterval.whole(box, number * box.numel),),
                    _is_main(leaf),
                    bool(leaf.allow_shape_mismatch),
                )
                for number, indices in enumerate(itertools.product(*ranges))
            ]
    return None


def _built(factory: Any) -> list[LogicalShard]:
    """Return the shards of a factory, those of one name together."""
    tensor, parts_by_name = factory.data, defaultdict(list)
    children = [child for _, child in walk(factory.build(), f"the parts of {factory.key!r}")]
    traced = None if all(_is_run(child.data, tensor) for child in children) else _trace(factory)
    for number, child in enumerate(children):
        if traced is None:
            spans = [LocalInterval.whole(_box(child), child.data.storage_offset() - tensor.storage_offset())]
        else:
            spans = list(_runs(traced[number], _box(child), factory.key))
        parts_by_name[named(child)].append((child, spans))
    if (
        sum(span.stop - span.start for parts in parts_by_name.values() for _, spans in parts for span in spans)
        != tensor.numel()
    ):
        raise StateError(f"the ShardedTensorFactory {factory.key!r} makes more or less of its tensor than there is")
    return [_joined(fqn, parts) for fqn, parts in parts_by_name.items()]


def _joined(fqn: str, parts: Sequence[tuple[Any, list[LocalInterval]]]) -> LogicalShard:
    """Make one shard of the children of one name."""
    first, flexible = parts[0][0], any(child.allow_shape_mismatch for child, _ in parts)
    spans = tuple(span for _, spans in parts for span in spans)
    return LogicalShard(fqn, _shape(first), spans, _is_main(first), flexible)


def _is_run(child: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a child is a view of consecutive elements of the factory's tensor."""
    same = child.untyped_storage()._cdata == tensor.untyped_storage()._cdata  # noqa: SLF001 -- as bcp/state/memory.py
    return same and child.dtype == tensor.dtype and child.is_contiguous() and tensor.is_contiguous()


def _trace(factory: Any) -> list[torch.Tensor]:
    """Return, for every child, which elements of the factory's tensor it is made of."""
    tensor = factory.data
    indices = torch.arange(tensor.numel(), device="cpu").view(tensor.shape)
    children = dataclasses.replace(factory, data=indices).build()
    return [child.data.reshape(-1) for _, child in walk(children, f"the parts of {factory.key!r}")]


def _runs(indices: torch.Tensor, box: Box, key: str) -> Iterator[LocalInterval]:
    """Yield the runs of consecutive elements; at most one a row, as otherwise nothing is won over a copy."""
    starts = [0, *((indices[1:] != indices[:-1] + 1).nonzero().flatten() + 1).tolist(), len(indices)]
    if len(starts) - 1 > math.prod(box.lengths[:-1]):
        raise StateError(
            f"the ShardedTensorFactory {key!r} rearranges the elements of its tensor (it transposes or interleaves "
            "them), so that its parts are no blocks in memory; use a module that keeps them as they are stored, such "
            "as SequentialMLP or TEGroupedMLP instead of GroupedMLP"
        )
    for start, stop in itertools.pairwise(starts):
        yield LocalInterval(box, start, stop, int(indices[start]))


def _cut_all(shard: LogicalShard, low: int, high: int, origin: int) -> tuple[LocalInterval, ...]:
    """Return the part of a shard in [low, high) of the local tensor, and its other blocks without elements.

    ``origin`` is the element of the local tensor from which places in memory are counted.
    """
    held = []
    for span in shard.spans:
        start, stop = max(low, span.offset), min(high, span.offset + span.stop - span.start)
        if start < stop:
            first = span.start + start - span.offset
            held.append(LocalInterval(span.box, first, first + stop - start, start - origin))
    boxes = {span.box for span in held}
    others = dict.fromkeys(span.box for span in shard.spans if span.box not in boxes)
    return (*held, *(LocalInterval(box, 0, 0) for box in others))


def _shortened(span: LocalInterval, shape: tuple[int, ...]) -> Iterator[LocalInterval]:
    """Yield the parts of an interval inside of a logical tensor of this shape, one for each run of local memory."""
    offsets, lengths = span.box.offsets, span.box.lengths
    kept = tuple(min(length, size - offset) for length, size, offset in zip(lengths, shape, offsets, strict=True))
    cut = [axis for axis, (length, rest) in enumerate(zip(lengths, kept, strict=True)) if rest < length]
    if not cut:
        yield span
    if not cut or min(kept) <= 0:
        return
    box, last = Box(offsets, kept), cut[-1]
    inner = math.prod(lengths[last + 1 :])
    step, run = lengths[last] * inner, kept[last] * inner
    for number, index in enumerate(itertools.product(*map(range, kept[:last]))):
        first = _row(index, lengths[:last]) * step
        start, stop = max(span.start, first), min(span.stop, first + run)
        if start < stop:
            moved = number * run - first
            yield LocalInterval(box, start + moved, stop + moved, span.offset + start - span.start)


def _row(index: tuple[int, ...], lengths: tuple[int, ...]) -> int:
    """Return the place of an index in row-major order."""
    row = 0
    for at, length in zip(index, lengths, strict=True):
        row = row * length + at
    return row


def _box(leaf: Any) -> Box:
    return Box(tuple(leaf.global_offset[leaf.prepend_axis_num :]), tuple(leaf.local_shape))


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.global_shape[leaf.prepend_axis_num :])


def _is_main(leaf: Any) -> bool:
    """Whether this rank comes first among the pipeline and tensor parallel ranks that have the same."""
    replica = leaf.replica_id
    return not any(replica[:2]) if isinstance(replica, tuple) else True
