"""Any part of any saved tensor, whatever the parallelism of the job that saved it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
import torch

from bcp.errors import InputError
from bcp.plan.box import Box, cut
from bcp.plan.layout import Layout
from bcp.plan.read.renamed import CheckpointNames
from bcp.plan.shards import ShardRow, ShardTable
from bcp.planners import planner
from bcp.protocols import LocalShards
from bcp.read.contents import TensorInfo, Tensors
from bcp.read.source import Source
from bcp.read.tensors import fill
from bcp.runtime.imports import imported
from bcp.stages.memcpy import torch_dtype

__all__ = [
    "Block",
    "Index",
    "Piece",
    "batches",
    "box_of",
    "fill_boxes",
    "read_box",
    "read_boxes",
    "read_sharded",
    "stream",
]

Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]
"""What stands in the brackets of an array: integers, slices of step 1, and one ellipsis."""


class Piece(NamedTuple):
    """A block of a tensor, as :meth:`bcp.Checkpoint.stream` yields it.

    Attributes:
        info: the tensor.
        box: the block of the global tensor.
        data: its elements, in the shape of the box, in host memory.
    """

    info: TensorInfo
    box: Box
    data: torch.Tensor


# -- one tensor --------------------------------------------------------------------------------


def box_of(info: TensorInfo, index: Index) -> tuple[Box, tuple[int, ...]]:
    """Return the block that an index chooses, and its shape without the dimensions of integers.

    Raises InputError, which names tensor and dimension, for an index out of range, a step, or too many dimensions.
    """
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    ellipses = [at for at, part in enumerate(parts) if part is ...]
    if len(ellipses) > 1:
        raise InputError(f"{info!r}: the index {index!r} has {len(ellipses)} ellipses; write one")
    at = ellipses[0] if ellipses else len(parts)
    given = len(parts) - len(ellipses)
    if given > len(info.shape):
        raise InputError(f"{info!r} has {len(info.shape)} dimensions, and the index {index!r} has {given}")
    parts[at : at + len(ellipses)] = [slice(None)] * (len(info.shape) - given)
    ranges = [_range(info, dim, part) for dim, part in enumerate(parts)]
    box = Box(tuple(first for first, _ in ranges), tuple(count for _, count in ranges))
    return box, tuple(count for (_, count), part in zip(ranges, parts, strict=True) if isinstance(part, slice))


def _range(info: TensorInfo, dim: int, part: object) -> tuple[int, int]:
    """Return the first index, and the number of indices, that a part of an index chooses in a dimension."""
    size = info.shape[dim]
    if isinstance(part, slice):
        if part.step not in (None, 1):
            raise InputError(
                f"{info!r}: dimension {dim} has step {part.step}; read the range, and take every n-th of it"
            )
        first, stop, _ = part.indices(size)
        return first, max(stop - first, 0)
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        raise InputError(f"{info!r}: the index of dimension {dim} is {part!r}; use integers, slices and one ellipsis")
    at = part.__index__()
    if not -size <= at < size:
        raise InputError(f"{info!r}: index {at} of dimension {dim} is outside of its {size} indices")
    return at % size, 1


async def read_box(
    source: Source, row: int, index: Index, dtype: torch.dtype | None, device: torch.device | str | None
) -> torch.Tensor:
    """Read a block of the tensor in a row of the layout into new memory; see :meth:`bcp.Checkpoint.read`."""
    info = Tensors(source.metadata.layout).info(row)
    _check_dtype(dtype)
    box, shape = box_of(info, index)
    if not box.numel:
        return torch.empty(shape, dtype=dtype or torch_dtype(info.dtype), device=device)
    (tensor,) = await read_boxes(source, [(row, box)], dtype, device)
    return tensor.view(shape)


def _check_dtype(dtype: object) -> None:
    """Raise InputError for a dtype that is none of torch's."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype={dtype!r} is a {type(dtype).__name__}; pass a dtype of torch, as torch.bfloat16")


async def read_sharded(
    source: Source, row: int, mesh: Any, placements: Sequence[Any], dtype: torch.dtype | None
) -> torch.Tensor:
    """Read this rank's part of the tensor in a row of the layout; see :meth:`bcp.Checkpoint.read`."""
    _check_dtype(dtype)
    layout = source.metadata.layout
    meta, made = layout.tensors[row], imported("torch.distributed.tensor").empty  # imports sympy
    tensor: torch.Tensor = made(
        meta.shape, dtype=dtype or torch_dtype(meta.dtype), device_mesh=mesh, placements=placements
    )
    states = {"model": {meta.fqn: tensor}}
    targets = planner(None, states).load_targets(states, CheckpointNames.of(layout))
    await fill(source, targets.shards, np.full(len(targets.shards.table.tensors), row))
    return tensor


async def read_boxes(
    source: Source,
    boxes: Sequence[tuple[int, Box]],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> list[torch.Tensor]:
    """Read blocks of the tensors in rows of the layout into new memory; no block is empty."""
    metas = source.metadata.layout.tensors
    tensors = [
        torch.empty(box.lengths, dtype=dtype or torch_dtype(metas[row].dtype), device=device) for row, box in boxes
    ]
    await fill_boxes(source, boxes, tensors)
    return tensors


async def fill_boxes(source: Source, boxes: Sequence[tuple[int, Box]], tensors: Sequence[torch.Tensor]) -> None:
    """Fill tensors with blocks of the tensors in rows of the layout."""
    metas = source.metadata.layout.tensors
    table = ShardTable.build([ShardRow(metas[row], box) for row, box in boxes])
    saved = np.array(list(dict.fromkeys(row for row, _ in boxes)))  # in the order of the table
    await fill(source, LocalShards(table, tensors), saved)


# -- all tensors -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a tensor as a step of a tour through all files.

    Attributes:
        file: row of its file in the layout.
        start: its first byte in the data section of the file.
        row: row of the tensor in the layout.
        box: the block of the global tensor.
        nbytes: bytes of its elements.
    """

    file: int
    start: int
    row: int
    box: Box
    nbytes: int


async def stream(source: Source, rows: Sequence[int], budget_bytes: int) -> AsyncIterator[Piece]:
    """Yield the data of tensors block by block, in the order of the files; see :meth:`bcp.Checkpoint.stream`.

    The next blocks are read while the caller looks at the last ones; both together fit into the budget.
    """
    known = Tensors(source.metadata.layout)
    tour = list(batches(source.metadata.layout, rows, budget_bytes // 2))

    async def read(batch: Sequence[Block]) -> list[Piece]:
        tensors = await read_boxes(source, [(block.row, block.box) for block in batch])
        return [Piece(known.info(block.row), block.box, data) for block, data in zip(batch, tensors, strict=True)]

    reading = [asyncio.ensure_future(read(batch)) for batch in tour[:1]]
    try:
        for _, after in pairwise([*tour, None]):
            pieces = await reading.pop()
            reading += [] if after is None else [asyncio.ensure_future(read(after))]
            while pieces:
                yield pieces.pop(0)
    finally:
        for task in reading:  # the caller has left early
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


def batches(layout: Layout, rows: Sequence[int], most: int) -> Iterator[list[Block]]:
    """Cut tensors into blocks of so many bytes at most, and yield neighbours together, in the order of the files."""
    return _joined(_blocks(layout, rows, most), most)


def _blocks(layout: Layout, rows: Sequence[int], most: int) -> list[Block]:
    """Return the boxes of these tensors, cut into blocks of so many bytes at most, in the order of the files.

    A tensor that is tied to another one has no data of its own, and no block.
    """
    tensors, segments = layout.tensors, layout.segments
    first = np.searchsorted(layout.box_tensor, np.arange(len(tensors) + 1))
    blocks = []
    for row in rows:
        leader, size = int(layout.leader[row]), int(tensors.itemsize[row])
        ndim = 0 if tensors.tied_to[row] else int(tensors.ndim[row])
        for box in range(int(first[leader]), 0 if tensors.tied_to[row] else int(first[leader + 1])):
            segment = int(segments.begin[segments.pattern[box]])
            file = int(segments.file[box] + segments.step[segment])
            start = int(layout.file_planes[file, layout.plane[row]] + segments.at[segment] * size)
            whole = Box(tuple(layout.offset[box, :ndim].tolist()), tuple(layout.length[box, :ndim].tolist()))
            position = 0
            for part in cut(whole, max(most // size, 1)):
                blocks.append(Block(file, start + position * size, row, part, part.numel * size))
                position += part.numel
    return sorted(blocks, key=lambda block: (block.file, block.start))


def _joined(blocks: Sequence[Block], most: int) -> Iterator[list[Block]]:
    """Join neighbours as long as they have so many bytes at most."""
    batch: list[Block] = []
    nbytes = 0
    for block in blocks:
        if batch and nbytes + block.nbytes > most:
            yield batch
            batch, nbytes = [], 0
        batch.append(block)
        nbytes += block.nbytes
    if batch:
        yield batch
