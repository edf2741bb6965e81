"""Boxes and flat positions, many at once, against one at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bcp.plan.box import Box, Boxes, decompose, flat_boxes, indices, sweep_intervals
from bcp.plan.columns import matrix

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    numel = int(np.prod(shape, dtype=np.int64))
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@given(st.lists(intervals(), max_size=6), st.integers(0, 2))
def test_decompose_is_flat_boxes_of_every_interval(given_: list[tuple[tuple[int, ...], int, int]], more: int) -> None:
    width = max([1, *(len(shape) for shape, *_ in given_)]) + more
    start, stop = (np.array([each[at] for each in given_], dtype=np.int64) for at in (1, 2))
    found = decompose(matrix([shape for shape, *_ in given_], width, 1), start, stop)
    wanted = [
        (row, flat, *matrix([box.offsets], width, 0).tolist(), *matrix([box.lengths], width, 1).tolist())
        for row, (shape, a, b) in enumerate(given_)
        for flat, box in flat_boxes(shape, a, b)
    ]
    columns = (found.interval.tolist(), found.flat.tolist(), found.offset.tolist(), found.length.tolist())
    assert list(zip(*columns, strict=True)) == wanted
    assert all(columns[0].count(row) <= max(1, 2 * len(shape) - 1) for row, (shape, *_) in enumerate(given_))


def test_empty_arrays_and_no_intervals_decompose_into_nothing() -> None:
    none = np.empty(0, dtype=np.int64)
    assert len(decompose(np.empty((0, 2), dtype=np.int64), none, none).flat) == 0
    zero = np.zeros(2, dtype=np.int64)
    assert len(decompose(np.array([[0, 3], [3, 0]]), zero, zero).flat) == 0


@given(st.data())
def test_blocks_count_and_find_their_elements(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, low, strict=True))
    block = np.zeros(shape, dtype=np.bool_)
    block[tuple(slice(a, a + n) for a, n in zip(low, extent, strict=True))] = True
    elements = np.flatnonzero(block.ravel())
    one = Boxes(*(np.array([each]) for each in (shape, low, extent)))
    positions = np.arange(block.size + 1)
    blocks = one.take(np.zeros_like(positions))
    assert blocks.before(positions).tolist() == [int((elements < p).sum()) for p in positions]
    numbers = np.arange(len(elements))
    assert one.take(np.zeros_like(numbers)).position(numbers).tolist() == elements.tolist()
    assert [int(end[0]) for end in one.ends] == [elements[0], elements[-1] + 1]
    assert indices(positions[:-1], one.length[np.zeros(block.size, dtype=np.int64)]).tolist() == [
        list(index) for index in np.ndindex(shape)
    ]


def test_padding_changes_no_box() -> None:
    assert [box for _, box in flat_boxes((), 0, 1)] == [Box((), ())]
    found = decompose(np.array([[1]]), np.array([0]), np.array([1]))
    assert (found.offset.tolist(), found.length.tolist()) == ([[0]], [[1]])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(-3, 3)), max_size=6))
def test_sweeping_adds_up_the_weights_of_the_runs_that_are_there(given_: list[tuple[int, int, int]]) -> None:
    runs = np.array([(first, first + n) for first, n, _ in given_], dtype=np.int64).reshape(-1, 2)
    weights = np.array([weight for *_, weight in given_], dtype=np.int64)
    intervals, depth, total = sweep_intervals(runs, np.ones_like(weights), weights)
    assert intervals.ravel().tolist() == sorted([*np.unique(runs), *np.unique(runs)[1:-1]])
    for (low, high), many, weight in zip(intervals.tolist(), depth.tolist(), total.tolist(), strict=True):
        holders = [each for first, n, each in given_ if first <= low and high <= first + n]
        assert (len(holders), sum(holders)) == (many, weight)
