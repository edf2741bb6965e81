"""Arrow arrays from their buffers beside those that pyarrow makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcp.plan.arrow import arrow_array, numbers_of

TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=20)
COLUMNS = st.one_of(
    st.tuples(st.lists(st.integers(-(2**31), 2**31 - 1)), st.sampled_from([pa.int32(), pa.int64(), pa.float64()])),
    st.tuples(st.lists(st.integers(0, 2**64 - 1)), st.just(pa.uint64())),
    st.tuples(st.lists(st.floats(width=32, allow_nan=False)), st.just(pa.float32())),
    st.tuples(TEXTS, st.just(pa.string())),
    st.tuples(st.lists(TEXTS, max_size=5), st.just(pa.list_(pa.string()))),
    st.tuples(st.lists(st.binary(min_size=16, max_size=16)), st.just(pa.binary(16))),
)


@given(COLUMNS)
def test_it_is_the_array_that_pyarrow_makes(column: tuple[list[Any], pa.DataType]) -> None:
    values, kind = column
    made = arrow_array(values, kind)
    made.validate(full=True)
    assert made.equals(pa.array(values, kind))


@given(st.lists(st.integers(-128, 127)), st.sampled_from(["i1", "i2", "i4", "i8", "f4", "f8"]), st.integers(0, 3))
def test_numbers_come_back_from_any_part_of_an_array(values: list[int], kind: str, start: int) -> None:
    numbers = np.array(values, kind)
    found = numbers_of(arrow_array(numbers, pa.from_numpy_dtype(numbers.dtype)).slice(start))
    assert found.dtype == numbers.dtype
    assert found.tolist() == values[start:]
    with pytest.raises(ValueError, match="read-only"):
        found[...] = 0


@pytest.mark.parametrize("strided", [np.arange(10)[::2], np.arange(12).reshape(3, 4)[:, 1]])
def test_a_strided_column_is_copied(strided: np.ndarray[Any, Any]) -> None:
    assert arrow_array(strided, pa.int64()).to_pylist() == strided.tolist()


def test_digests_may_be_a_numpy_array() -> None:
    digests = np.frombuffer(bytes(range(32)), "V16")
    assert arrow_array(digests, pa.binary(16)).to_pylist() == [bytes(range(16)), bytes(range(16, 32))]


@pytest.mark.parametrize(
    ("values", "kind", "error"),
    [
        (["a", 1], pa.string(), TypeError),
        ([["a"], [None]], pa.list_(pa.string()), TypeError),
        ([b"123", b"12"], pa.binary(3), ValueError),
        (np.zeros(2, "V8"), pa.binary(16), ValueError),
    ],
)
def test_other_values_are_errors(values: Any, kind: pa.DataType, error: type[Exception]) -> None:
    with pytest.raises(error):
        arrow_array(values, kind)
