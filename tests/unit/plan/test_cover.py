from __future__ import annotations

import math

import numpy as np
import pytest
from divided import world_of
from hypothesis import given
from hypothesis import strategies as st

from bcp.errors import CoverageError
from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.plan.write.cover import check_cover
from bcp.plan.write.merge import merge_shards, merge_tensors


def meta(shape: tuple[int, ...], fqn: str = "w", tied_to: str = "") -> TensorMeta:
    return TensorMeta("model", fqn, "float32", 4, shape, tied_to=tied_to)


def check(*ranks: list[ShardRow], more: tuple[TensorMeta, ...] = ()) -> None:
    tables = [ShardTable.build(rows, more=more) for rows in ranks]
    world = world_of(tables)
    merged = merge_tensors(world)
    check_cover(merged, merge_shards(world, merged))


def rows(tensor: TensorMeta, first: int, last: int) -> ShardRow:
    return ShardRow(tensor, Box((first, *(0 for _ in tensor.shape[1:])), (last - first, *tensor.shape[1:])))


def test_tiles_in_every_dimension_pass():
    w, scalar, empty = meta((4, 6)), meta((), "step"), meta((0, 5), "empty")
    quarters = [ShardRow(w, Box((i, j), (2, 3))) for i in (0, 2) for j in (0, 3)]
    check(quarters[:2], [*quarters[2:], ShardRow(scalar, Box((), ()))], more=(empty,))


def test_gap_names_tensor_block_and_ranks():
    w = meta((8, 4), "layers.0.weight")
    with pytest.raises(CoverageError, match=r"model tensor 'layers\.0\.weight' of shape \(8, 4\).*\[4:6, 0:4\].*0, 2"):
        check([rows(w, 0, 4)], [], [rows(w, 6, 8)])


def test_overlap_names_both_shards_and_their_ranks():
    w = meta((8, 4))
    with pytest.raises(CoverageError, match=r"block \[4:5, 0:4\] lies in 2 .*\[0:5, 0:4\] of rank 0 and \[4:8, 0:4\]"):
        check([rows(w, 0, 5)], [rows(w, 4, 8)])


def test_gap_and_overlap_of_equal_volume_are_found():
    w = meta((6,))
    with pytest.raises(CoverageError, match=r"\[2:3\] lies in 2"):
        check([rows(w, 0, 3)], [rows(w, 2, 5)])


def test_tensor_that_nobody_holds_is_a_gap():
    with pytest.raises(CoverageError, match=r"\[0:3\]; no rank holds any of it"):
        check([], [], more=(meta((3,)),))


def test_scalar_that_nobody_holds_is_a_gap():
    with pytest.raises(CoverageError, match="no rank holds the block"):
        check([], more=(meta(()),))


def test_tied_tensor_needs_no_shard():
    target = meta((3,))
    check([ShardRow(target, Box.whole((3,)))], more=(meta((3,), "v", tied_to="w"),))


def test_flat_intervals_that_tile_a_box_pass():
    w = meta((3, 5))
    check(*([ShardRow(w, Box.whole((3, 5)), a, b)] for a, b in ((7, 15), (0, 4), (4, 7))))


@pytest.mark.parametrize(
    ("intervals", "message"),
    [
        (((0, 4), (6, 15)), r"no rank holds elements 4 to 6 \(flat, row-major\) of the block \[0:3, 0:5\]"),
        (((2, 15),), "no rank holds elements 0 to 2"),
        (((0, 4), (4, 14)), "no rank holds elements 14 to 15 .* rank 1"),
        (((0, 5), (4, 15)), "elements 4 to 5 .* two different shards, of ranks 0, 1"),
        (((0, 15), (4, 6)), "elements 4 to 6 .* two different shards"),
    ],
)
def test_flat_faults_say_where(intervals, message):
    w = meta((3, 5))
    with pytest.raises(CoverageError, match=message):
        check(*([ShardRow(w, Box.whole((3, 5)), a, b)] for a, b in intervals))


@pytest.mark.parametrize(
    "row",
    [
        ShardRow(meta((4,)), Box((2,), (3,))),
        ShardRow(meta((4,)), Box((-1,), (4,))),
        ShardRow(meta((4,)), Box((0,), (4,)), 0, 5),
        ShardRow(meta((4,)), Box((0,), (4,)), -1, 4),
        ShardRow(meta((4,)), Box((0,), (4,)), 3, 2),
    ],
)
def test_shard_that_sticks_out_is_refused(row):
    with pytest.raises(CoverageError, match="of rank 1 sticks out"):
        check([], [row])


def test_many_ranks_are_counted_not_listed():
    w = meta((4,))
    with pytest.raises(CoverageError, match=r"ranks 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(20 ranks\)"):
        check(*([rows(w, 0, 3)] for _ in range(20)))


def test_sizes_beyond_32_bits():
    shape = (1 << 20, 1 << 20, 1 << 10)
    w = meta(shape)
    half = Box((0, 0, 0), (1 << 19, 1 << 20, 1 << 10))
    other = Box((1 << 19, 0, 0), half.lengths)
    cut = half.numel // 3
    check([ShardRow(w, half, 0, cut)], [ShardRow(w, half, cut), ShardRow(w, other)])
    with pytest.raises(CoverageError, match=f"{cut} to {cut + 1} "):
        check([ShardRow(w, half, 0, cut)], [ShardRow(w, half, cut + 1), ShardRow(w, other)])


boxes_of = st.lists(st.integers(1, 4), min_size=0, max_size=3).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)),
        st.lists(st.tuples(*(st.tuples(st.integers(0, n - 1), st.integers(1, n)) for n in shape)), max_size=5),
        st.booleans(),
    )
)


@given(boxes_of)
def test_says_what_counting_every_element_says(case):
    shape, corners, complete = case
    found = {
        Box(tuple(a for a, _ in c), tuple(min(n, s - a) for (a, n), s in zip(c, shape, strict=True))) for c in corners
    }
    count = np.zeros(shape, dtype=int)
    for box in found:
        count[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))] += 1
    if complete and count.max(initial=0) <= 1:  # fill the holes with single elements, so that good covers occur too
        holes = {Box(tuple(map(int, at)), (1,) * len(shape)) for at in np.argwhere(count == 0)}
        found, count = found | holes, np.ones(shape, dtype=int)
    ranks = [[ShardRow(meta(shape), box)] for box in sorted(found, key=lambda b: (b.offsets, b.lengths))]
    if np.all(count == 1):
        check(*ranks, more=(meta(shape),))
    else:
        with pytest.raises(CoverageError):
            check(*ranks, [], more=(meta(shape),))


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=5))
def test_says_what_counting_every_flat_element_says(numel, pairs):
    intervals = {(min(p), min(max(p), numel)) for p in pairs if min(p) < min(max(p), numel)}
    count = np.zeros(numel, dtype=int)
    for a, b in intervals:
        count[a:b] += 1
    shape = (math.gcd(numel, 6), numel // math.gcd(numel, 6))
    ranks = [[ShardRow(meta(shape), Box.whole(shape), a, b)] for a, b in sorted(intervals)]
    if np.all(count == 1):
        check(*ranks)
    else:
        with pytest.raises(CoverageError):
            check(*ranks, [], more=(meta(shape),))
