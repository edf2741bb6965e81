"""Checkpoints made by hand: a layout, the bytes of its files, and what a brute force knows of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from bcp.plan.box import Box
from bcp.plan.columns import Ints, matrix
from bcp.plan.layout import Layout, check_layout, find, resolve
from bcp.plan.read.copies import copies
from bcp.plan.read.reads import wants
from bcp.plan.shards import KINDS, Segments, ShardRow, ShardTable, TensorMeta, TensorTable

DTYPES = {"uint8": 1, "int16": 2, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class SavedBox:
    """A box of a leader, and its segments as (elements, rank that writes them)."""

    tensor: TensorMeta
    box: Box
    segments: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Saved:
    """A layout, the data sections of its files, and what was saved: arrays, and (file, byte) of every element."""

    layout: Layout
    files: list[npt.NDArray[np.uint8]]
    arrays: list[npt.NDArray[np.int64]]
    places: list[tuple[Ints, Ints]]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + n) for low, n in zip(box.offsets, box.lengths, strict=True))


def meta(fqn: str, shape: tuple[int, ...], dtype: str = "int32", kind: str = "model", tied_to: str = "") -> TensorMeta:
    stride = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
    return TensorMeta(kind, fqn, dtype, DTYPES[dtype], shape, stride, tied_to=tied_to)


def save(
    tensors: Sequence[TensorMeta],
    saved_boxes: Sequence[SavedBox],
    world_size: int,
    block_bytes: int,
    leaders: Sequence[int] | None = None,
) -> Saved:
    """Write tensors of random numbers; tensors are sorted, boxes are in their order. ``leaders``: row by row."""
    leader = list(range(len(tensors))) if leaders is None else list(leaders)
    rows = [(b, n, rank) for b, each in enumerate(saved_boxes) for n, rank in each.segments]
    keys = sorted({(KINDS.index(saved_boxes[b].tensor.kind), rank) for b, _, rank in rows})
    file = [keys.index((KINDS.index(saved_boxes[b].tensor.kind), rank)) for b, _, rank in rows]
    owner = [tensors.index(each.tensor) for each in saved_boxes]
    plane, sizes = _planes(tensors, leader)
    at, planes, ends = _put(rows, file, owner, (leader, plane, sizes), len(keys))
    width = max((len(tensor.shape) for tensor in tensors), default=0)
    lengths = np.array([n for _, n, _ in rows], dtype=np.int64)
    layout = Layout(
        world_size=world_size,
        block_bytes=block_bytes,
        tensors=TensorTable.build(tensors),
        leader=np.array(leader, dtype=np.int64),
        plane=np.array(plane, dtype=np.int64),
        box_tensor=np.array(owner, dtype=np.int64),
        offset=matrix([each.box.offsets for each in saved_boxes], width, 0),
        length=matrix([each.box.lengths for each in saved_boxes], width, 1),
        segments=Segments.of(
            np.bincount([b for b, *_ in rows], minlength=len(saved_boxes)), lengths, np.array(file, dtype=np.int64), at
        ).folded(),
        file_kind=np.array([kind for kind, _ in keys], dtype=np.int64),
        file_rank=np.array([rank for _, rank in keys], dtype=np.int64),
        file_nbytes=np.array(ends, dtype=np.int64),
        file_planes=planes,
        objects=[],
        object_rank=np.empty(0, dtype=np.int64),
        extra_kind=np.empty(0, dtype=np.int64),
        extra_rank=np.empty(0, dtype=np.int64),
    )
    check_layout(layout)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256 if t.itemsize == 1 else 30_000, t.shape) for t in tensors]
    places = [(np.full(t.shape, -1), np.full(t.shape, -1)) for t in tensors]
    files = [np.zeros(end, dtype=np.uint8) for end in ends]
    for tensor, meta_ in enumerate(tensors):
        for row in (row for row, (b, *_) in enumerate(rows) if owner[b] == leader[tensor]):
            box = saved_boxes[rows[row][0]].box
            start = sum(n for b, n, _ in rows[:row] if b == rows[row][0])
            flat = np.zeros(box.numel, dtype=np.bool_)
            flat[start : start + rows[row][1]] = True
            inside = np.zeros(meta_.shape, dtype=np.bool_)
            inside[slices(box)] = flat.reshape(box.lengths)
            first = planes[file[row], plane[tensor]] + at[row] * meta_.itemsize
            places[tensor][0][inside] = file[row]
            places[tensor][1][inside] = first + np.arange(rows[row][1]) * meta_.itemsize
            data = arrays[tensor][inside].astype(meta_.dtype).view(np.uint8)
            files[file[row]][first : first + len(data)] = data
    return Saved(layout, files, arrays, places)


def _planes(tensors: Sequence[TensorMeta], leader: Sequence[int]) -> tuple[list[int], list[int]]:
    """Give families of the same item sizes the same planes, one a member; also return the item size of each plane."""
    families: dict[int, list[int]] = {}
    for row, first in enumerate(leader):
        families.setdefault(first, []).append(row)
    keys: list[tuple[int, ...]] = []
    plane = [0] * len(tensors)
    for members in families.values():
        sizes = [tensors[row].itemsize for row in members]
        for number, row in enumerate(members):
            key = (number, *sizes)
            if key not in keys:
                keys.append(key)
            plane[row] = keys.index(key)
    return plane, [key[1:][key[0]] for key in keys]


def _put(
    rows: Sequence[tuple[int, int, int]],
    file: Sequence[int],
    owner: Sequence[int],
    families: tuple[Sequence[int], Sequence[int], Sequence[int]],
    count: int,
) -> tuple[Ints, Ints, list[int]]:
    """Put segments into their planes, at the same element in all of them; then the planes behind each other."""
    leader, plane, sizes = families
    members = [sorted(plane[t] for t, first in enumerate(leader) if first == owner[b]) for b, *_ in rows]
    filled = np.zeros((count, len(sizes)), dtype=np.int64)
    at = np.zeros(len(rows), dtype=np.int64)
    for row, (_, n, _) in enumerate(rows):
        at[row] = filled[file[row], members[row][0]]
        filled[file[row], members[row]] += n
    planes, ends = np.zeros_like(filled), [0] * count
    for f in range(count):
        for p in sorted(np.flatnonzero(filled[f]).tolist(), key=lambda p: -sizes[p]):
            planes[f, p] = ends[f]
            ends[f] += int(filled[f, p]) * sizes[p]
    return at, planes, ends


class Memory:
    """The tensors of one loading rank, and how often each element was written."""

    def __init__(self, saved: Saved, table: ShardTable) -> None:
        self.saved, self.table, self.wants = saved, table, wants(saved.layout, table)
        full = [table.stop[row] - table.start[row] == table.box(row).numel for row in range(len(table))]
        shapes = [table.box(r).lengths if full[r] else (table.stop[r] - table.start[r],) for r in range(len(table))]
        self.values = [np.full(shape, -1) for shape in shapes]
        self.counts = [np.zeros(shape, dtype=np.int64) for shape in shapes]

    def place(self, file: int, lo: int, hi: int) -> None:
        found = copies(self.saved.layout, self.table, self.wants, np.array([[file, lo, hi]]))
        for copy in range(len(found)):
            row, start, first = int(found.row[copy]), int(found.start[copy]), int(found.first[copy])
            meta_ = self.saved.layout.tensors[self.tensor(row)]
            block = found.block(copy)
            count = int(np.prod(block.source_lengths, dtype=np.int64))
            assert lo <= start
            assert start + count * meta_.itemsize <= hi
            run = self.saved.files[file].tobytes()
            source = np.frombuffer(run, meta_.dtype, count, start).reshape(block.source_lengths)[slices(block.source)]
            stop = first + int(np.prod(block.target_lengths, dtype=np.int64))
            values, counts = (
                each[row].reshape(-1)[first:stop].reshape(block.target_lengths) for each in (self.values, self.counts)
            )
            values[slices(block.target)] = source
            counts[slices(block.target)] += 1

    def check(self) -> None:
        for row, (found, count) in enumerate(zip(self.values, self.counts, strict=True)):
            np.testing.assert_array_equal(count, 1)
            np.testing.assert_array_equal(found, self.expected(row, self.saved.arrays[self.tensor(row)]))

    def expected(self, row: int, of: Ints) -> Ints:
        block = of[slices(self.table.box(row))]
        flat = block.reshape(-1)[self.table.start[row] : self.table.stop[row]]
        return block if len(flat) == block.size else flat

    def tensor(self, row: int) -> int:
        stored = find(self.saved.layout, self.table.meta(row).kind, self.table.meta(row).fqn)
        assert stored is not None
        return resolve(self.saved.layout, stored)


# -- random checkpoints -------------------------------------------------------------------------


def cuts(draw: st.DrawFn, n: int, most: int) -> list[tuple[int, int]]:
    """Cut [0, n) into at most ``most`` non-empty intervals."""
    inner = draw(st.sets(st.integers(1, n - 1), max_size=most - 1)) if n > 1 else set()
    return list(itertools.pairwise([0, *sorted(inner), n])) if n else []


def boxes(draw: st.DrawFn, box: Box, most: int) -> list[Box]:
    """Cut a box into several by a random tree of cuts: tilings that need not be grids."""
    wide = [dim for dim, n in enumerate(box.lengths) if n > 1]
    if most < 2 or not wide or not draw(st.booleans()):
        return [box] if box.numel else []
    dim = draw(st.sampled_from(wide))
    at = draw(st.integers(1, box.lengths[dim] - 1))
    low, high = list(box.lengths), list(box.lengths)
    low[dim], high[dim] = at, box.lengths[dim] - at
    corner = list(box.offsets)
    corner[dim] += at
    halves = Box(box.offsets, tuple(low)), Box(tuple(corner), tuple(high))
    return [each for half in halves for each in boxes(draw, half, most // 2)]


@st.composite
def checkpoints(draw: st.DrawFn) -> Saved:
    """Save families of random tensors under random tilings, every box cut into segments of random writers."""
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=4))
    tensors: list[TensorMeta] = []
    families: list[tuple[str, int]] = []
    for number, shape in enumerate(shapes):
        kind = draw(st.sampled_from(KINDS[:2]))
        for state in range(draw(st.integers(1, 3)) if np.prod(shape) else 1):
            dtype = draw(st.sampled_from(sorted(DTYPES)))
            tensors.append(meta(f"t{draw(st.integers(0, 3))}.{number}.{state}", shape, dtype, kind))
            families.append((kind, number))
    order = sorted(range(len(tensors)), key=lambda row: (KINDS.index(tensors[row].kind), tensors[row].fqn))
    tensors, families = [tensors[row] for row in order], [families[row] for row in order]
    leaders = [families.index(family) for family in families]
    saved_boxes = []
    for row, tensor in enumerate(tensors):
        if leaders[row] == row:
            for box in sorted(boxes(draw, Box.whole(tensor.shape), 8), key=lambda box: box.offsets):
                segments = [(b - a, draw(st.integers(0, 2))) for a, b in cuts(draw, box.numel, 4)]
                saved_boxes.append(SavedBox(tensor, box, segments))
    return save(tensors, saved_boxes, 3, draw(st.sampled_from([16, 32, 64])), leaders)


@st.composite
def targets(draw: st.DrawFn, saved: Saved) -> ShardTable:
    """Draw arbitrary shards of saved tensors, of all states of some: whole boxes, and flat intervals of boxes."""
    rows = []
    layout = saved.layout
    for index in draw(st.lists(st.integers(0, len(layout.tensors) - 1), max_size=4)):
        tensor = layout.tensors[index]
        low = [draw(st.integers(0, max(0, n - 1))) for n in tensor.shape]
        lengths = [draw(st.integers(min(1, n), n - a)) for n, a in zip(tensor.shape, low, strict=True)]
        box = Box(tuple(low), tuple(lengths))
        start = draw(st.integers(0, box.numel)) if draw(st.booleans()) else 0
        stop = draw(st.integers(start, box.numel)) if start else None
        family = np.flatnonzero(layout.leader == layout.leader[index]).tolist() if draw(st.booleans()) else [index]
        rows += [ShardRow(layout.tensors[member], box, start, stop) for member in family]
    return ShardTable.build(rows)
