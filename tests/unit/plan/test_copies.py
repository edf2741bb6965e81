"""Every copy that a rank makes of the chunks that it reads, taken apart into runs of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import Memory, Saved, SavedBox, checkpoints, meta, save, targets

from bcp.errors import CorruptError
from bcp.plan.box import Box
from bcp.plan.columns import Ints
from bcp.plan.read.copies import Copies, check_complete, copies
from bcp.plan.shards import ShardRow, ShardTable


def chunks_of(saved: Saved, cuts: Sequence[Sequence[int]]) -> Ints:
    """Cut every file at these blocks."""
    size, found = saved.layout.block_bytes, []
    for file, data in enumerate(saved.files):
        ends = {0, len(data), *(min(size * cut, len(data)) for cut in cuts[file])}
        found += [(file, a, b) for a, b in pairwise(sorted(ends))]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def chunked(data: st.DataObject, saved: Saved) -> Ints:
    """Draw chunks that tile all files, in any order."""
    count = len(saved.files)
    cuts = data.draw(st.lists(st.sets(st.integers(0, 40), max_size=4), min_size=count, max_size=count))
    chunks = chunks_of(saved, [sorted(each) for each in cuts])
    return chunks[data.draw(st.permutations(range(len(chunks))))]


def one(shape: tuple[int, ...], rows: Sequence[ShardRow], dtype: str = "int32", block_bytes: int = 1 << 20) -> Memory:
    """Save one tensor as one box, and want these shards of it."""
    tensor = meta("w", shape, dtype)
    saved = save([tensor], [SavedBox(tensor, Box.whole(shape), [(int(np.prod(shape)), 0)])], 1, block_bytes)
    return Memory(saved, ShardTable.build(rows))


def found_in(memory: Memory, chunks: Ints | None = None) -> Copies:
    every = chunks_of(memory.saved, [[] for _ in memory.saved.files]) if chunks is None else chunks
    return copies(memory.saved.layout, memory.table, memory.wants, every)


# -- properties ---------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_runs_of_all_chunks_write_every_byte_once(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    memory = Memory(saved, data.draw(targets(saved)))
    chunks = chunked(data, saved)
    found = found_in(memory, chunks)
    check_complete(found, memory.table, memory.wants)
    itemsizes = [memory.saved.layout.tensors[memory.tensor(row)].itemsize for row in range(len(memory.table))]
    sizes = [int(n) for n in (memory.table.stop - memory.table.start)]
    bytes_of = [np.zeros(n * each, np.uint8) for n, each in zip(sizes, itemsizes, strict=True)]
    counts = [np.zeros_like(each) for each in bytes_of]
    for number, (file, lo, hi) in enumerate(chunks.tolist()):
        runs = found.runs(found.of_chunk(number))
        columns = (column.tolist() for column in (runs.row, runs.start, runs.nbytes, runs.to))
        for row, start, nbytes, to in zip(*columns, strict=True):
            assert lo <= start < start + nbytes <= hi
            bytes_of[row][to : to + nbytes] = saved.files[file][start : start + nbytes]
            counts[row][to : to + nbytes] += 1
    for row, (raw, count) in enumerate(zip(bytes_of, counts, strict=True)):
        assert (count == 1).all()
        dtype = saved.layout.tensors[memory.tensor(row)].dtype
        expected = memory.expected(row, saved.arrays[memory.tensor(row)])
        np.testing.assert_array_equal(raw.view(dtype).reshape(expected.shape), expected)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_chunks_together_are_the_chunks_one_by_one(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    memory = Memory(saved, data.draw(targets(saved)))
    chunks = chunked(data, saved)
    together = found_in(memory, chunks)
    for number in range(len(chunks)):
        alone = found_in(memory, chunks[number : number + 1])
        mine = together.runs(together.of_chunk(number))
        each = alone.runs(alone.of_chunk(0))
        for name in ("row", "start", "nbytes", "to"):
            assert getattr(mine, name).tolist() == getattr(each, name).tolist()


# -- examples -----------------------------------------------------------------------------------


def test_a_whole_tensor_is_one_run() -> None:
    memory = one((6, 5, 4), [ShardRow(meta("w", (6, 5, 4)), Box.whole((6, 5, 4)))])
    found = found_in(memory)
    runs = found.runs(found.of_chunk(0))
    assert (runs.start.tolist(), runs.nbytes.tolist(), runs.to.tolist()) == ([0], [480], [0])


def test_rows_are_one_run_and_columns_are_one_run_a_row() -> None:
    tensor = meta("w", (6, 8))
    rows, columns = Box((2, 0), (3, 8)), Box((0, 2), (6, 4))
    memory = one((6, 8), [ShardRow(tensor, rows), ShardRow(tensor, columns)])
    found = found_in(memory)
    assert found.run[found.row == 0].tolist() == found.numel[found.row == 0].tolist() == [24]
    assert set(found.run[found.row == 1].tolist()) == {4}
    runs = found.runs(np.flatnonzero(found.row == 1))
    assert runs.start.tolist() == [4 * (8 * row + 2) for row in range(6)]
    assert runs.to.tolist() == [16 * row for row in range(6)]


def test_dimensions_of_length_one_do_not_cut_runs() -> None:
    shape = (1, 7, 1, 3, 1)
    found = found_in(one(shape, [ShardRow(meta("w", shape), Box.whole(shape))]))
    assert (found.run.tolist(), found.numel.tolist()) == ([21], [21])


def test_a_chunk_that_ends_within_a_row_has_its_pieces() -> None:
    memory = one((4, 8), [ShardRow(meta("w", (4, 8)), Box.whole((4, 8)))], block_bytes=16)
    found = found_in(memory, np.array([[0, 0, 48], [0, 48, 128]]))
    for chunk, (start, stop) in enumerate([(0, 48), (48, 128)]):
        runs = found.runs(found.of_chunk(chunk))
        assert sum(runs.nbytes.tolist()) == stop - start
        assert runs.to.tolist() == runs.start.tolist()


def test_a_tensor_without_dimensions_is_one_element() -> None:
    found = found_in(one((), [ShardRow(meta("w", ()), Box((), ()))]))
    assert (found.numel.tolist(), found.ndim.tolist()) == ([1], [0])
    assert found.block(0).source_lengths == ()


def test_nothing_wanted_is_nothing_to_copy() -> None:
    memory = one((4,), [])
    found = found_in(memory)
    assert len(found) == len(found.runs(found.of_chunk(0))) == 0
    check_complete(found, memory.table, memory.wants)


def test_a_chunk_that_is_left_out_is_noticed() -> None:
    memory = one((8,), [ShardRow(meta("w", (8,)), Box.whole((8,)))], block_bytes=16)
    found = found_in(memory, np.array([[0, 16, 32]]))
    with pytest.raises(CorruptError, match="of 8 elements that this rank wants, 4 are in what is to be read"):
        check_complete(found, memory.table, memory.wants)
