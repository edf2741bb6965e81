"""Targets that are made of blocks of saved tensors, stated as parts of these; live memory is viewed, never copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from bcp.plan.box import Box, flat_boxes
from bcp.plan.columns import Ints, concat, padded
from bcp.plan.load.moved import Moved
from bcp.plan.load.renamed import Renamed
from bcp.plan.load.saved import extended
from bcp.plan.shards import ShardRow, ShardTable
from bcp.protocols import LocalShards
from bcp.stages.flat import block_of

__all__ = ["relocated"]


def relocated(shards: LocalShards, source: Ints, names: Renamed) -> tuple[LocalShards, Ints]:
    """Cut shards of tensors that are put together of blocks where the blocks meet.

    Args:
        shards: what this rank wants.
        source: int64[n], row in ``names.saved.tensors`` of each of their tensors; -1 where there is none.
        names: the checkpoint, as the target calls it.

    Returns:
        The shards; behind the tensors that were there stands one for each pair of a tensor that is put together and
        a tensor of the checkpoint, by the name of the first and in the shape of the second. And for all of these,
        int64[m], the row in the checkpoint's layout, or -1.

    """
    table, layout = shards.table, names.layout
    made = source >= len(layout.tensors)
    if not made.any():
        return shards, source
    rows, views = [], []
    kept = np.flatnonzero(~made[table.tensor])
    pairs: dict[tuple[int, int], int] = {}
    for row in np.flatnonzero(made[table.tensor]).tolist():
        tensor = int(table.tensor[row])
        cut, origins = names.joined[int(source[tensor]) - len(layout.tensors)]
        for target, memory in _blocks(table, row, shards.tensors[row]):
            for block, shared in cut.meetings(target):
                moved, origin = cut.moved[block], origins[cut.source[block]]
                pair = pairs.setdefault((tensor, origin), len(pairs))
                rows.append((pair, moved.back(shared)))
                views.append(_as_saved(block_of(memory, shared.within(target)), moved))
    metas = [
        replace(table.tensors[tensor], shape=layout.tensors[origin].shape, stride=(), tied_to="")
        for tensor, origin in pairs
    ]
    cuts = ShardTable.build([ShardRow(metas[pair], box) for pair, box in rows])
    width = max(table.offset.shape[1], cuts.offset.shape[1])
    behind = len(table.tensors) + np.array([pair for pair, _ in rows], np.int64)
    moved_table = replace(
        table,
        tensors=extended(table.tensors, metas),
        tensor=concat([table.tensor[kept], behind]),
        offset=padded([table.offset[kept], cuts.offset], width, 0),
        length=padded([table.length[kept], cuts.length], width, 1),
        start=concat([table.start[kept], cuts.start]),
        stop=concat([table.stop[kept], cuts.stop]),
    )
    memories = [*(shards.tensors[row] for row in kept.tolist()), *views]
    origins_of = np.array([origin for _, origin in pairs], np.int64)
    cut_up = replace(shards, table=moved_table, tensors=memories, address=None)
    return cut_up, concat([np.where(made, -1, source), origins_of])


def _blocks(table: ShardTable, row: int, tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of the logical tensor that make up a shard, each with its memory in the box's shape."""
    box, start, stop = table.box(row), int(table.start[row]), int(table.stop[row])
    if start == 0 and stop == box.numel:
        yield box, tensor
        return
    for flat, inner in flat_boxes(box.lengths, start, stop):
        memory = tensor[flat - start : flat - start + inner.numel].view(inner.lengths)
        offsets = tuple(a + b for a, b in zip(box.offsets, inner.offsets, strict=True))
        yield Box(offsets, inner.lengths), memory


def _as_saved(view: torch.Tensor, moved: Moved) -> torch.Tensor:
    """View a part of a block as it lies in the saved tensor."""
    while view.dim() > len(moved.saved.lengths):
        view = view[0]
    while view.dim() < len(moved.saved.lengths):
        view = view[None]
    return view.transpose(-1, -2) if moved.transposed else view
