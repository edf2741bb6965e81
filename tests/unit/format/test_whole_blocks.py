"""Which blocks of a file a range has whole, compared with a look at each block."""

from __future__ import annotations

from itertools import combinations_with_replacement, product

import pytest

from bcp.format.receipt import Blocks


@pytest.mark.parametrize("lengths", [each for count in range(4) for each in product((1, 2, 3), repeat=count)])
def test_whole_blocks_of_all_ranges(lengths: tuple[int, ...]) -> None:
    blocks, total = Blocks.build(lengths, lengths, [bytes(16)] * len(lengths)), sum(lengths)
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    for start, stop in combinations_with_replacement(range(total + 3), 2):
        whole = [row for row, at in enumerate(starts) if start <= at and at + lengths[row] <= stop]
        first, end = blocks.whole_in(start, stop)
        assert [*range(first, end)] == whole
