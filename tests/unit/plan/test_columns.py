from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bcp.plan.columns import order_of


@given(st.integers(1, 4), st.integers(0, 12), st.data())
def test_the_order_is_lexsorts(width: int, rows: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 2), min_size=rows, max_size=rows)
    columns = [np.array(data.draw(row), np.int64) for _ in range(width)]
    if data.draw(st.booleans()):  # as a rule they are in order
        columns = list(np.array(columns)[:, np.lexsort(columns)])
    assert order_of(columns).tolist() == np.lexsort(columns).tolist()
