"""Prove that the ranks' shards tile every tensor exactly: at every save, before a byte is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NoReturn

import numpy as np

from bcp.errors import CoverageError
from bcp.plan.columns import Ints, weigh
from bcp.plan.shards import TensorTable
from bcp.plan.write.merge import DistinctShards, MergedTensors

__all__ = ["check_cover"]

SHOWN_RANKS = 8
ADVICE = (
    "Shards must be identical (replicas) or disjoint, and together make up the tensor: check that every rank saves "
    "with the same parallel layout, and that no rank left the tensor out"
)


def check_cover(merged: MergedTensors, shards: DistinctShards, names: Sequence[int] | None = None) -> None:
    """Check that boxes tile their tensors and flat intervals tile their boxes, in O(entries).

    A tensor without elements, or one that is tied to another, needs no shard; one that another leads shares its.

    Args:
        merged: the tensors of all ranks.
        shards: of all ranks.
        names: numbers of the ranks for messages; None: as they count.

    Raises:
        CoverageError: a tensor has a gap, an overlap, or a shard that sticks out. Names the tensor, a concrete block
            of elements that is missing or held in two different shards, and the ranks.
    """
    shards = replace(shards, names=names)
    _check_bounds(merged.tensors, shards)
    _check_boxes(merged, shards)
    _check_intervals(merged.tensors, shards)


def _check_bounds(tensors: TensorTable, shards: DistinctShards) -> None:
    """Raise for a box that leaves its tensor, or an interval that leaves its box."""
    shape = tensors.shape[shards.box_tensor]
    inside = (shards.offset >= 0) & (shards.length >= 0) & (shards.offset + shards.length <= shape)
    fits = np.logical_and.reduce(inside, axis=1)[shards.box] & (shards.start >= 0)
    fits &= (shards.start < shards.stop) & (shards.stop <= _numel(shards)[shards.box])
    if not fits.all():
        shard = int(fits.argmin())
        _raise(
            tensors,
            int(shards.tensor[shard]),
            f"the shard {_shard(tensors, shards, shard)} of {_ranks(shards, [shard])} sticks out of it",
        )


def _check_boxes(merged: MergedTensors, shards: DistinctShards) -> None:
    """Raise unless each leader's boxes tile its global shape."""
    tensors = merged.tensors
    volume, whole = weigh(shards.offset, shards.offset + shards.length), weigh(0 * tensors.shape, tensors.shape)
    covered = np.zeros(len(tensors), dtype=np.uint64)
    np.add.at(covered, shards.box_tensor, volume)
    leads = merged.leader == np.arange(len(tensors))
    wrong = (covered != whole) & leads & ~tensors.tied & (tensors.numel > 0)
    if wrong.any():
        _explain_boxes(tensors, shards, int(wrong.argmax()))


def _check_intervals(tensors: TensorTable, shards: DistinctShards) -> None:
    """Raise unless the flat intervals of each box follow each other from its first element to its last."""
    first = np.ones(len(shards), dtype=bool)
    first[1:] = shards.box[1:] != shards.box[:-1]
    last = np.roll(first, -1)
    expected = np.where(first, 0, np.roll(shards.stop, 1))
    end = _numel(shards)[shards.box]
    wrong = (shards.start != expected) | (last & (shards.stop != end))
    if not wrong.any():
        return
    shard = int(wrong.argmax())
    tensor, low, high = int(shards.tensor[shard]), int(expected[shard]), int(shards.start[shard])
    if high < low:
        where = _flat(tensors, shards, shard, high, min(low, int(shards.stop[shard])))
        _raise(
            tensors, tensor, f"elements {where} lie in two different shards, of {_ranks(shards, [shard - 1, shard])}"
        )
    if high == low:
        low, high = int(shards.stop[shard]), int(end[shard])
    where = _flat(tensors, shards, shard, low, high)
    _raise(
        tensors, tensor, f"no rank holds elements {where}; the shard beside them is held by {_ranks(shards, [shard])}"
    )


def _explain_boxes(tensors: TensorTable, shards: DistinctShards, tensor: int) -> NoReturn:
    """Find a block of the tensor that no box covers, or that several do, and raise."""
    boxes = np.flatnonzero(shards.box_tensor == tensor)
    shape = tensors[tensor].shape
    low = shards.offset[boxes, : len(shape)]
    block, covering = _fault(np.array(shape, dtype=np.int64), low, low + shards.length[boxes, : len(shape)])
    if len(covering) == 0:
        held = np.flatnonzero(shards.tensor == tensor)
        others = f"other parts are held by {_ranks(shards, held)}" if len(held) else "no rank holds any of it"
        _raise(tensors, tensor, f"no rank holds the block {_block(block)}; {others}")
    # Two are enough to show, and more may be every rank's.
    pair = [np.flatnonzero(shards.box == boxes[row])[0] for row in covering[:2]]
    named = " and ".join(f"{_shard(tensors, shards, shard)} of {_ranks(shards, [shard])}" for shard in pair)
    _raise(tensors, tensor, f"the block {_block(block)} lies in {len(covering)} different shards, as in {named}")


def _fault(shape: Ints, low: Ints, high: Ints) -> tuple[list[tuple[int, int]], Ints]:
    """Find a block that not exactly one box covers; the boxes are known not to tile the shape.

    Cuts the first dimension at the boxes' ends and goes down into the first slab that is not tiled.

    Returns:
        The block as (low, high) per dimension, and the rows of the boxes that cover it: none, or at least two.
    """
    rows = np.arange(len(low))
    if len(shape) == 0:
        return [], rows
    ends = np.unique(np.concatenate([[0], shape[:1], low[:, 0], high[:, 0]])).tolist()
    for a, b in pairwise(ends):
        inside = rows[(low[:, 0] <= a) & (high[:, 0] >= b)]
        weight = weigh(low[inside, 1:], high[inside, 1:]).sum(dtype=np.uint64)
        if weight != weigh(0 * shape[None, 1:], shape[None, 1:])[0]:
            block, covering = _fault(shape[1:], low[inside, 1:], high[inside, 1:])
            return [(a, b), *block], inside[covering]
    raise AssertionError("the boxes tile the shape")


def _numel(shards: DistinctShards) -> Ints:
    return np.asarray(shards.length.prod(axis=1), dtype=np.int64)


def _ranks(shards: DistinctShards, rows: Iterable[int] | Ints) -> str:
    """Name the ranks that hold any of these shards."""
    ranks = np.unique(np.concatenate([shards.holders(int(shard)) for shard in rows])).tolist()
    ranks = ranks if shards.names is None else [shards.names[rank] for rank in ranks]
    more = f", ... ({len(ranks)} ranks)" if len(ranks) > SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:SHOWN_RANKS]))}{more}"


def _shard(tensors: TensorTable, shards: DistinctShards, shard: int) -> str:
    """Describe a shard: its box, and its flat interval unless that is the whole box."""
    text, numel = _box(tensors, shards, shard), math.prod(shards.length[shards.box[shard]].tolist())
    start, stop = int(shards.start[shard]), int(shards.stop[shard])
    return text if (start, stop) == (0, numel) else f"{text}{{{start}:{stop}}}"


def _flat(tensors: TensorTable, shards: DistinctShards, shard: int, start: int, stop: int) -> str:
    """Describe a flat interval of a shard's box."""
    return f"{start} to {stop} (flat, row-major) of the block {_box(tensors, shards, shard)}"


def _box(tensors: TensorTable, shards: DistinctShards, shard: int) -> str:
    """Describe a shard's box in its tensor's own number of dimensions."""
    box, ndim = int(shards.box[shard]), int(tensors.ndim[shards.tensor[shard]])
    low, length = shards.offset[box, :ndim].tolist(), shards.length[box, :ndim].tolist()
    return _block((first, first + n) for first, n in zip(low, length, strict=True))


def _block(block: Iterable[tuple[int, int]]) -> str:
    return f"[{', '.join(f'{low}:{high}' for low, high in block)}]"


def _raise(tensors: TensorTable, tensor: int, reason: str) -> NoReturn:
    """Raise for one tensor."""
    meta = tensors[tensor]
    raise CoverageError(f"{meta.kind} tensor {meta.fqn!r} of shape {meta.shape}: {reason}. {ADVICE}")
