"""Strided views against sets of addresses."""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from math import prod

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcp.plan.strided import Strided, overlaps_itself, row_major

BUFFER = 12


def elements(lengths, strides, offset=0):
    return [offset + sum(map(prod, zip(at, strides, strict=True))) for at in product(*map(range, lengths))]


def covered(view):
    """Return all bytes of a view."""
    return {at + byte for at in elements(view.lengths, view.strides, view.start) for byte in range(view.itemsize)}


def every_view():
    """Yield (lengths, strides, offset) of all views of up to 3 x 3 elements of a small buffer."""
    for lengths, strides, offset in product(product((1, 2, 3), repeat=2), product(range(5), repeat=2), range(4)):
        if max(elements(lengths, strides, offset)) < BUFFER:
            yield lengths, strides, offset


def test_every_small_view_that_has_an_element_twice():
    for lengths, strides, offset in every_view():
        found = elements(lengths, strides, offset)
        assert overlaps_itself(lengths, strides) == (len(set(found)) < len(found)), (lengths, strides)


def test_every_pair_of_small_views():
    views = {}
    for lengths, strides, offset in every_view():
        view = Strided(4 * offset, 4, lengths, tuple(4 * stride for stride in strides))
        views.setdefault(
            (view.start, view.order), (view, sum(1 << at for at in set(elements(lengths, strides, offset))))
        )
    assert len(views) > 300
    for (one, mine), (other, its) in combinations_with_replacement(views.values(), 2):
        assert one.meets(other) == bool(mine & its), (one, other)


def test_the_order_of_a_view_is_that_of_its_elements():
    orders = {}
    for lengths, strides, offset in every_view():
        found = tuple(elements(lengths, strides, offset))
        order = (offset, Strided(offset, 1, lengths, strides).order)
        assert orders.setdefault(order, found) == found


views = st.builds(
    lambda start, itemsize, dims: Strided(
        start * itemsize, itemsize, [length for length, _ in dims], [stride * itemsize for _, stride in dims]
    ),
    st.integers(0, 40),
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), max_size=4),
)


@given(views, views)
def test_views_of_other_dtypes_and_more_dimensions(one, other):
    assert one.meets(other) == other.meets(one) == bool(covered(one) & covered(other))
    found = elements(one.lengths, one.strides)
    assert overlaps_itself(one.lengths, one.strides) == (len(set(found)) < len(found))


def test_large_views_are_told_apart_at_once():
    rows, width = 1 << 20, 3 << 12
    left, right = (Strided(4 * at, 4, (rows, width // 2), (4 * width, 4)) for at in (0, width // 2))
    transposed = Strided(0, 4, (width // 2, rows), (4, 4 * width))
    assert not left.meets(right)
    assert left.meets(transposed)
    assert not right.meets(transposed)
    assert not overlaps_itself((width, rows), (1, width))
    assert overlaps_itself((rows, width), (1, 1))


def test_numpy_agrees():
    memory = np.zeros((6, 5, 4), np.int32)
    parts = [memory[a::2, b:, c::3] for a, b, c in product(range(2), range(3), range(3))] + [memory.view(np.int16)[1]]
    of = [Strided(part.ctypes.data, part.itemsize, part.shape, part.strides) for part in parts]
    for (one, mine), (other, its) in product(zip(parts, of, strict=True), repeat=2):
        assert mine.meets(its) == np.shares_memory(one, other)


@given(st.lists(st.integers(0, 4), max_size=4))
def test_row_major_strides_are_those_of_torch(shape):
    assert row_major(shape) == torch.empty(shape, device="meta").stride()
