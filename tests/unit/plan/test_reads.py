"""What a rank wants of a checkpoint, executed with numpy on byte buffers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import Memory, Saved, SavedBox, checkpoints, meta, save, targets

from bcp.errors import CorruptError
from bcp.plan.box import Box
from bcp.plan.layout import Layout, check_layout, find, find_all, resolve, resolve_all
from bcp.plan.read.reads import BoxIndex, ReadRequest, _indices, box_index, wants
from bcp.plan.shards import Segments, ShardRow, ShardTable, TensorTable


def element_boundaries(saved: Saved, file: int) -> list[int]:
    tensors = zip(saved.places, saved.layout.tensors.itemsize.tolist(), strict=True)
    found = {0, len(saved.files[file])}
    for (files, starts), itemsize in tensors:
        here = starts[files == file]
        found |= set(here.tolist()) | set((here + itemsize).tolist())
    return sorted(found)


# -- properties ---------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_runs_that_tile_the_files_write_every_element_once(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    memory = Memory(saved, data.draw(targets(saved)))
    for file in range(len(saved.files)):
        bounds = element_boundaries(saved, file)
        inner = data.draw(st.sets(st.sampled_from(bounds), max_size=5))
        for lo, hi in itertools.pairwise(sorted({0, bounds[-1], *inner})):
            memory.place(file, lo, hi)
    memory.check()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_wants_are_exact_hulls(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    memory = Memory(saved, data.draw(targets(saved)))
    layout, found = saved.layout, memory.wants
    needed: dict[tuple[int, int], tuple[int, int]] = {}
    for row in range(len(memory.table)):
        tensor = memory.tensor(row)
        itemsize = int(layout.tensors.itemsize[tensor])
        files, starts = (memory.expected(row, of).reshape(-1) for of in saved.places[tensor])
        mine = np.flatnonzero(layout.box_tensor == layout.leader[tensor])
        for box, segment in zip(*(column.tolist() for column in layout.segments.of_boxes(mine)), strict=True):
            file = layout.segments.file[box] + layout.segments.step[segment]
            first = layout.file_planes[file, layout.plane[tensor]] + layout.segments.at[segment] * itemsize
            last = first + layout.segments.length[segment] * itemsize
            inside = starts[(files == file) & (starts >= first) & (starts < last)]
            if inside.size:
                needed[row, box, segment] = int(inside.min()), int(inside.max() + itemsize)
    keys = zip(found.row.tolist(), found.box.tolist(), found.segment.tolist(), strict=True)
    assert dict(zip(keys, zip(found.start, found.stop, strict=True), strict=True)) == needed
    assert len(found) == len(needed)
    assert found.tensor.tolist() == [memory.tensor(row) for row in found.row.tolist()]
    order = list(zip(found.file.tolist(), found.start.tolist(), strict=True))
    assert order == sorted(order)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_ranges_are_the_union_of_the_wants(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    found = wants(saved.layout, data.draw(targets(saved)))
    ranges = found.ranges()
    union = [np.zeros(len(file) + 1, dtype=np.bool_) for file in saved.files]
    for file, start, stop in zip(found.file, found.start, found.stop, strict=True):
        union[file][start:stop] = True
    again = [np.zeros(len(file) + 1, dtype=np.bool_) for file in saved.files]
    for index, (file, start, stop) in enumerate(ranges.tolist()):
        assert not again[file][max(0, start - 1) : stop + 1].any(), index  # neither overlapping nor adjacent
        again[file][start:stop] = True
    assert all((a == b).all() for a, b in zip(union, again, strict=True))
    assert ranges.tolist() == sorted(ranges.tolist())


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_candidates_are_all_boxes_that_a_box_meets_and_few_others(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    layout, index = saved.layout, BoxIndex.of(saved.layout)
    tensor = data.draw(st.sampled_from(np.unique(layout.box_tensor).tolist() or [None]))
    if tensor is None or not len(layout.tensors[tensor].shape):
        return
    low = data.draw(st.integers(0, layout.tensors[tensor].shape[0] - 1))
    high = data.draw(st.integers(low + 1, layout.tensors[tensor].shape[0]))
    first, stop = (int(ends[0]) for ends in index.candidates(*(np.array([n]) for n in (tensor, low, high))))
    mine = layout.box_tensor == tensor
    meets = np.flatnonzero(mine & (layout.offset[:, 0] < high) & (layout.offset[:, 0] + layout.length[:, 0] > low))
    assert first == meets[0]
    assert stop == meets[-1] + 1
    assert mine[first:stop].all()


# -- examples -----------------------------------------------------------------------------------


def many_rows(tensors: int, ranks: int) -> Layout:
    """Return the layout of tensors of two columns, each cut into as many rows as there are ranks; no bytes are made."""
    metas = [meta(f"t{number:03d}", (ranks, 2)) for number in range(tensors)]
    small = meta("small", (1, 2))
    count, none = tensors * ranks, np.zeros(tensors, dtype=np.int64)
    return replace(
        save([small], [SavedBox(small, Box.whole((1, 2)), [(2, 0)])], 1, 16).layout,
        tensors=TensorTable.build(metas),
        leader=np.arange(tensors),
        plane=none,
        box_tensor=np.repeat(np.arange(tensors), ranks),
        offset=np.stack((np.tile(np.arange(ranks), tensors), np.zeros(count, dtype=np.int64)), axis=1),
        length=np.tile([1, 2], (count, 1)),
        segments=Segments.of(
            np.ones(count, dtype=np.int64), np.full(count, 2), np.zeros(count, dtype=np.int64), 2 * np.arange(count)
        ),
        file_nbytes=np.array([8 * count]),
    )


def test_one_row_of_many_tensors_is_found_without_looking_at_the_others() -> None:
    tensors, ranks = 100, 1000
    layout = many_rows(tensors, ranks)
    check_layout(layout)
    rows = [ShardRow(layout.tensors[tensor], Box((417, 0), (1, 2))) for tensor in range(tensors)]
    found = wants(layout, ShardTable.build(rows))
    assert found.box.tolist() == [number * ranks + 417 for number in range(tensors)]
    first, stop = box_index(layout).candidates(np.arange(tensors), np.full(tensors, 417), np.full(tensors, 418))
    assert int((stop - first).sum()) == tensors


def test_states_of_one_parameter_are_looked_up_once_and_read_in_their_own_planes() -> None:
    states = [meta("w.a", (4, 2), "int32"), meta("w.b", (4, 2), "int16"), meta("w.c", (4, 2), "int64")]
    saved = save(states, [SavedBox(states[0], Box.whole((4, 2)), [(8, 0)])], 1, 16, leaders=[0, 0, 0])
    table = ShardTable.build([ShardRow(state, Box((1, 0), (2, 2)), 1, 4) for state in states])
    found = wants(saved.layout, table)
    assert found.tensor[np.argsort(found.row)].tolist() == [0, 1, 2]
    assert sorted((found.stop - found.start).tolist()) == [6, 12, 24]
    assert found.first.tolist() == [3, 3, 3]
    memory = Memory(saved, table)
    memory.place(0, 0, len(saved.files[0]))
    memory.check()


def test_boxes_are_indexed_once_for_a_layout_and_not_for_ever() -> None:
    tensor = meta("w", (4,))
    layouts = [
        save([tensor], [SavedBox(tensor, Box.whole((4,)), [(4, 0)])], 1, 16).layout
        for _ in range(_indices.capacity + 1)
    ]
    first = box_index(layouts[0])
    assert box_index(layouts[0]) is first
    for layout in layouts[1:]:
        assert box_index(layout) is not first
    assert box_index(layouts[0]) is not first


def test_nothing_wanted_is_no_ranges() -> None:
    tensor = meta("w", (64,), "uint8")
    saved = save([tensor], [SavedBox(tensor, Box.whole((64,)), [(64, 0)])], 1, 16)
    assert wants(saved.layout, ShardTable.build([])).ranges().shape == (0, 3)


def test_an_empty_checkpoint_has_nothing_that_is_wanted() -> None:
    table = ShardTable.build([ShardRow(meta("w", (2,)), Box.whole((2,)))])
    assert len(wants(save([], [], 1, 16).layout, table)) == 0


def test_scalars_alone_are_found() -> None:
    scalars = [meta("a", ()), meta("b", ())]
    saved = save(scalars, [SavedBox(scalar, Box((), ()), [(1, 0)]) for scalar in scalars], 1, 16)
    memory = Memory(saved, ShardTable.build([ShardRow(scalar, Box((), ())) for scalar in scalars]))
    memory.place(0, 0, 8)
    memory.check()


def test_tied_tensors_are_read_where_they_are_stored_and_unknown_ones_not_at_all() -> None:
    stored, tied = meta("embed", (4, 2)), meta("head", (4, 2), tied_to="embed")
    saved = save([stored, tied], [SavedBox(stored, Box.whole((4, 2)), [(8, 0)])], 1, 16)
    other = meta("other", (4, 2, 3))  # more dimensions than the layout has columns
    table = ShardTable.build([ShardRow(tied, Box((1, 0), (2, 2))), ShardRow(other, Box.whole((4, 2, 3)))])
    found = wants(saved.layout, table)
    assert list(zip(found.row, found.start, found.stop, strict=True)) == [(0, 8, 24)]
    assert found.tensor.tolist() == [0]


def test_lookups() -> None:
    tensors = [meta("a", (1,)), meta("b", (1,)), meta("a", (1,), kind="optimizer")]
    saved = save(tensors, [SavedBox(t, Box.whole((1,)), [(1, 0)]) for t in tensors], 1, 16)
    assert [find(saved.layout, "model", name) for name in ("", "a", "aa", "b", "c")] == [None, 0, None, 1, None]
    assert find(saved.layout, "optimizer", "a") == 2
    assert find(saved.layout, "optimizer", "b") is None
    dangling = replace(saved.layout, tensors=TensorTable.build([meta("a", (1,), tied_to="zz")]))
    with pytest.raises(CorruptError, match="zz"):
        resolve(dangling, 0)


@given(
    st.lists(st.tuples(st.sampled_from(["model", "optimizer", "extra_states"]), st.text("ab", max_size=3)), max_size=9)
)
def test_many_lookups_are_as_many_single_ones(keys: list[tuple[str, str]]) -> None:
    tensors = [meta("a", (1,)), meta("ab", (1,), tied_to="a"), meta("b", (1,), kind="optimizer")]
    layout = save(tensors, [SavedBox(t, Box.whole((1,)), [(1, 0)]) for t in tensors if not t.tied_to], 1, 16).layout
    found = find_all(layout, TensorTable.build([meta(fqn, (1,), kind=kind) for kind, fqn in keys]))
    single = [find(layout, kind, fqn) for kind, fqn in keys]
    assert found.tolist() == [-1 if row is None else row for row in single]
    assert resolve_all(layout, found).tolist() == [-1 if row is None else resolve(layout, row) for row in single]


def test_wants_of_a_column_shard_skip_segments_between_its_rows() -> None:
    tensor = meta("w", (4, 8), "uint8")
    saved = save([tensor], [SavedBox(tensor, Box.whole((4, 8)), [(4, k % 2) for k in range(8)])], 2, 16)
    found: ReadRequest = wants(saved.layout, ShardTable.build([ShardRow(tensor, Box((0, 1), (4, 2)))]))
    assert found.file.tolist() == [0, 0, 0, 0]  # the right halves of all rows are in file 1
    assert (found.stop - found.start).tolist() == [2, 2, 2, 2]


def test_wants_end_with_the_last_needed_row_of_a_segment_that_goes_on() -> None:
    tensor = meta("w", (4, 8), "uint8")
    saved = save([tensor], [SavedBox(tensor, Box.whole((4, 8)), [(26, 0), (6, 0)])], 1, 16)
    found = wants(saved.layout, ShardTable.build([ShardRow(tensor, Box((0, 1), (2, 2)))]))
    assert list(zip(found.segment, found.start, found.stop, strict=True)) == [(0, 1, 11)]


def test_splitting_columns_finer_asks_for_one_hull_of_a_segment() -> None:
    tensor = meta("w", (1000, 8), "uint8")
    saved = save([tensor], [SavedBox(tensor, Box((0, 4 * k), (1000, 4)), [(4000, k)]) for k in range(2)], 2, 16)
    found = wants(saved.layout, ShardTable.build([ShardRow(tensor, Box((0, 6), (1000, 2)))]))
    assert found.ranges().tolist() == [[1, 2, 4000]]


def test_an_empty_shard_wants_nothing() -> None:
    tensor = meta("w", (4, 8), "uint8")
    saved = save([tensor], [SavedBox(tensor, Box.whole((4, 8)), [(32, 0)])], 1, 16)
    rows = [ShardRow(tensor, Box((4, 0), (0, 8))), ShardRow(tensor, Box((0, 0), (4, 8)), 5, 5)]
    assert len(wants(saved.layout, ShardTable.build(rows))) == 0
