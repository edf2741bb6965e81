"""Which chunks are read to where they belong, and what their runs are."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import Memory, SavedBox, checkpoints, meta, save, targets

from bcp.plan.box import Box
from bcp.plan.columns import Ints
from bcp.plan.read import copies as module
from bcp.plan.read.copies import Bools, ByteRuns, Copies, apart, copies, zero_copy_reads
from bcp.plan.shards import ShardRow, ShardTable

SHAPE = (8, 8)
CHUNKS = np.array([[0, 0, 128], [0, 128, 256]])
ALL = np.array([True, True])


def found(*boxes: Box, chunks: Ints = CHUNKS) -> Copies:
    """Return the copies of these boxes of an 8 x 8 tensor of 4-byte elements."""
    tensor = meta("w", SHAPE)
    saved = save([tensor], [SavedBox(tensor, Box.whole(SHAPE), [(64, 0)])], 1, 64)
    memory = Memory(saved, ShardTable.build([ShardRow(tensor, box) for box in boxes]))
    return copies(saved.layout, memory.table, memory.wants, chunks)


def able(each: Copies, private: Bools = ALL, plain: list[bool] | None = None) -> list[bool]:
    rows = int(each.row.max(initial=-1)) + 1
    return zero_copy_reads(each, private, np.array([True] * rows if plain is None else plain)).chunks.tolist()


def test_chunks_of_runs_that_nobody_shares_go_straight() -> None:
    assert able(found(Box.whole(SHAPE))) == [True, True]
    assert able(found(Box((0, 0), (8, 4)))) == [True, True]


def test_a_chunk_that_other_ranks_need_does_not() -> None:
    assert able(found(Box.whole(SHAPE)), np.array([False, True])) == [False, True]


def test_a_chunk_for_memory_that_is_not_plain_does_not() -> None:
    halves = found(Box((0, 0), (4, 8)), Box((4, 0), (4, 8)))
    assert able(halves, plain=[True, False]) == [True, False]
    assert able(halves, plain=[False, True]) == [False, True]


def test_a_chunk_of_which_a_byte_is_wanted_twice_does_not() -> None:
    assert able(found(Box((0, 0), (5, 8)), Box((4, 0), (4, 8)))) == [True, False]
    assert able(found(Box((0, 0), (3, 8)), Box((2, 0), (6, 8)))) == [False, True]


def test_a_chunk_of_which_nothing_is_wanted_does_not() -> None:
    assert able(found(Box((0, 0), (2, 8)))) == [True, False]


def test_a_chunk_of_too_many_runs_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = found(Box((0, 0), (8, 4)), chunks=np.array([[0, 0, 160], [0, 160, 256]]))
    monkeypatch.setattr(module, "MOST_RUNS", 4)
    assert able(pieces) == [False, True]


# -- their runs ----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_runs_of_straight_chunks_are_those_of_their_copies_in_file_order(data: st.DataObject) -> None:
    saved = data.draw(checkpoints())
    memory = Memory(saved, data.draw(targets(saved)))
    size = saved.layout.block_bytes
    chunks = [
        (file, at, min(at + size, len(each)))
        for file, each in enumerate(saved.files)
        for at in range(0, len(each), size)
    ]
    each = copies(saved.layout, memory.table, memory.wants, np.array(chunks, dtype=np.int64).reshape(-1, 3))
    plain = np.array(data.draw(st.lists(st.booleans(), min_size=len(memory.table), max_size=len(memory.table))), bool)
    private = np.array(data.draw(st.lists(st.booleans(), min_size=len(chunks), max_size=len(chunks))), bool)
    way = zero_copy_reads(each, private, plain)
    for number, (_, lo, hi) in enumerate(chunks):
        copied = each.runs(each.of_chunk(number))
        rows = sorted(zip(*(column.tolist() for column in columns(copied)), strict=True))
        overlap = any(one[0] + one[1] > two[0] for one, two in pairwise(rows))
        expected = private[number] and not overlap and all(plain[row] for _, _, row, _ in rows)
        found = list(zip(*(column.tolist() for column in columns(way.of_chunk(number))), strict=True))
        assert found == (rows if expected else [])
        assert way.chunks[number] == bool(found)
        assert all(lo <= start < start + nbytes <= hi for start, nbytes, _, _ in found)


def columns(runs: ByteRuns) -> tuple[Ints, ...]:
    return runs.start, runs.nbytes, runs.row, runs.to


# -- memory that overlaps ------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=8))
def test_pieces_that_share_a_byte_are_found(pieces: list[tuple[int, int]]) -> None:
    address, nbytes = (
        np.array(column, dtype=np.int64) for column in (zip(*pieces, strict=True) if pieces else ([], []))
    )
    held = [set(range(at, at + n)) for at, n in pieces]
    alone = [not any(one & two for j, two in enumerate(held) if j != i) for i, one in enumerate(held)]
    assert apart(address, nbytes).tolist() == alone
