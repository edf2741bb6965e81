"""Random tensors are put together of blocks of random others: what lands in memory is what torch makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import boxes, meta, slices

from bcp._load.overlaps import relocated
from bcp.plan.box import Box
from bcp.plan.layout import Layout
from bcp.plan.read.renamed import renamed
from bcp.plan.read.renames import Moved
from bcp.plan.shards import ShardRow, ShardTable, TensorTable
from bcp.protocols import LocalShards
from bcp.stages.memcpy import block_of

SIZE = 7  # of every dimension of saved tensors: no block of a target is longer


@dataclass
class Mapping:
    """Saved tensors, and where their blocks go."""

    saved: dict[str, torch.Tensor]
    moved: dict[str, list[Moved]]
    shapes: dict[str, tuple[int, ...]]

    def blocks(self, fqn: str, shape: tuple[int, ...]) -> Sequence[Moved]:
        assert tuple(self.saved[fqn].shape) == shape
        return self.moved[fqn]

    def expected(self) -> dict[str, torch.Tensor]:
        """Put the targets together by cutting, transposing and assigning; no view, no arithmetic of boxes."""
        out = {fqn: torch.full(shape, -1, dtype=torch.int64) for fqn, shape in self.shapes.items()}
        for fqn, moved in self.moved.items():
            for each in moved:
                block = self.saved[fqn][slices(each.saved)]
                block = block.transpose(-1, -2) if each.transposed else block
                shape = each.target.lengths
                out[each.fqn][slices(Box(each.at, shape))] = block.reshape(shape)
        return out


@st.composite
def mappings(draw: st.DrawFn) -> Mapping:
    """Tile targets with blocks, and find each a place in a saved tensor."""
    ndims = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    saved = {f"s{n}": torch.arange(SIZE**ndim).view((SIZE,) * ndim) + 10_000 * n for n, ndim in enumerate(ndims)}
    shape = st.lists(st.integers(1, SIZE), max_size=3).map(tuple)
    shapes = {f"t{n}": each for n, each in enumerate(draw(st.lists(shape, min_size=1, max_size=3)))}
    moved: dict[str, list[Moved]] = {fqn: [] for fqn in saved}
    for fqn, each in shapes.items():
        for box in boxes(draw, Box.whole(each), 8):
            ones = next((at for at, n in enumerate(box.lengths) if n != 1), len(each))  # these may be left out
            source = draw(st.sampled_from([s for s, t in saved.items() if t.dim() >= len(each) - ones] or [""]))
            if not source:
                source = f"s{len(saved)}"
                saved[source], moved[source] = torch.arange(SIZE**3).view((SIZE,) * 3), []
            ndim = saved[source].dim()
            lengths = ((1,) * ndim + box.lengths)[len(box.lengths) :] if ndim else ()
            transposed = min(ndim, len(each)) > 1 and draw(st.booleans())
            lengths = (*lengths[:-2], lengths[-1], lengths[-2]) if transposed else lengths
            corner = tuple(draw(st.integers(0, SIZE - n)) for n in lengths)
            moved[source].append(Moved(Box(corner, lengths), fqn, each, box.offsets, transposed))
    return Mapping(saved, moved, shapes)


def layout_of(mapping: Mapping) -> Layout:
    metas = [meta(fqn, tuple(tensor.shape), "int64") for fqn, tensor in sorted(mapping.saved.items())]
    none = np.zeros(0, dtype=np.int64)
    return Layout(**{**dict.fromkeys(Layout.__slots__, none), "tensors": TensorTable.build(metas), "objects": []})


def shards(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]]) -> LocalShards:
    """Draw shards of some targets: boxes and flat intervals of boxes, in memory of any strides; some are empty."""
    rows, memories = [], []
    for fqn, shape in shapes.items():
        for box in boxes(draw, Box.whole(shape), 4) if draw(st.booleans()) else [Box.whole(shape)]:
            start = draw(st.integers(0, box.numel))
            stop = draw(st.integers(start, box.numel))
            start, stop = (start, stop) if draw(st.booleans()) else (0, box.numel)
            rows.append(ShardRow(meta(fqn, shape, "int64"), box, start, stop))
            lengths = box.lengths if stop - start == box.numel else (stop - start,)
            wide = torch.full((*reversed(lengths), 2), -1, dtype=torch.int64)[..., 0]
            memories.append(wide.permute(tuple(reversed(range(len(lengths))))))
    return LocalShards(ShardTable.build(rows), memories)


def check(mapping: Mapping, local: LocalShards) -> None:
    """Relocate, put every element where it goes, count, and compare."""
    names = renamed(layout_of(mapping), mapping, ["model"])
    moved, saved = relocated(local, names.saved.find(local.table.tensors), names)
    own = sorted(mapping.saved)
    memory = {tensor.untyped_storage().data_ptr() for tensor in local.tensors if tensor.numel()}
    written = 0
    for row, target in enumerate(moved.tensors):
        box, origin = moved.table.box(row), own[saved[moved.table.tensor[row]]]
        assert target.untyped_storage().data_ptr() in memory or not target.numel()
        source = mapping.saved[origin][slices(box)]
        flat = source.reshape(-1)[moved.table.start[row] : moved.table.stop[row]]
        target.copy_(source if len(flat) == source.numel() else flat)
        written += target.numel()
    assert written == sum(tensor.numel() for tensor in local.tensors)
    expected = mapping.expected()
    for row, tensor in enumerate(local.tensors):
        whole = expected[local.table.meta(row).fqn][slices(local.table.box(row))]
        flat = whole.reshape(-1)[local.table.start[row] : local.table.stop[row]]
        assert torch.equal(tensor.reshape(-1), flat)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_blocks_land_where_the_mapping_says(data: st.DataObject) -> None:
    mapping = data.draw(mappings())
    check(mapping, shards(data.draw, mapping.shapes))


def test_what_is_renamed_as_a_whole_is_not_touched() -> None:
    mapping = Mapping({"s": torch.arange(6)}, {"s": [Moved.whole("t", (6,))]}, {"t": (6,)})
    names = renamed(layout_of(mapping), mapping, ["model"])
    local = LocalShards(ShardTable.build([ShardRow(meta("t", (6,), "int64"), Box.whole((6,)))]), [torch.zeros(6)])
    moved, saved = relocated(local, names.saved.find(local.table.tensors), names)
    assert moved is local
    assert saved.tolist() == [0]


def test_padding_stays_as_it_is() -> None:
    part = Moved(Box((0, 0), (2, 3)), "t", (4, 3), (0, 0), padded=True)
    mapping = Mapping({"s": torch.arange(6).view(2, 3)}, {"s": [part]}, {"t": (4, 3)})
    names = renamed(layout_of(mapping), mapping, ["model"])
    target = torch.full((4, 3), -1)
    table = ShardTable.build([ShardRow(meta("t", (4, 3), "int64"), Box.whole((4, 3)))])
    moved, _ = relocated(LocalShards(table, [target]), names.saved.find(table.tensors), names)
    assert [tuple(tensor.shape) for tensor in moved.tensors] == [(2, 3)]
    moved.tensors[0].copy_(mapping.saved["s"])
    assert torch.equal(target, torch.tensor([[0, 1, 2], [3, 4, 5], [-1, -1, -1], [-1, -1, -1]]))


@pytest.mark.parametrize("moved", [replace(Moved.whole("t", (2, 3)), transposed=False)])
def test_a_part_of_a_block_lies_where_the_block_does(moved: Moved) -> None:
    part = Box((1, 1), (1, 2))
    assert moved.back(part) == part
    turned = Moved(Box((4, 5), (3, 2)), "t", (9, 9), (1, 2), transposed=True)
    assert turned.target == Box((1, 2), (2, 3))
    assert turned.back(Box((2, 3), (1, 2))) == Box((5, 6), (2, 1))
    assert math.prod(block_of(torch.zeros(9, 9), turned.target).shape) == 6
