"""Reads in pieces: each piece is full when its number is told, and nothing is told that has not come."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from bcp.backends import LocalBackend
from bcp.errors import CorruptError
from bcp.format.checksums import cut, digests

lengths = st.lists(st.integers(0, 40), max_size=8)


@given(lengths, lengths)
def test_what_is_cut_is_what_was_there(buffers: list[int], pieces: list[int]) -> None:
    data = np.random.default_rng(0).bytes(sum(buffers))
    ends = np.cumsum([0, *buffers])
    outs = [memoryview(data)[start:stop] for start, stop in pairwise(ends)]
    fitting = [length for length, end in zip(pieces, np.cumsum(pieces), strict=True) if end <= len(data)]
    found = cut(outs, fitting)
    assert b"".join(b"".join(piece) for piece in found) == data
    assert [sum(map(len, piece)) for piece in found[: len(fitting)]] == fitting
    assert len(found) - len(fitting) == (sum(fitting) < len(data))
    names = [xxhash.xxh3_128_digest(b"".join(piece)) for piece in found[: len(fitting)]]
    assert [*digests(outs, fitting)] == names


@pytest.mark.parametrize("size", [10_000, 12_288, 700_000])
def test_each_piece_is_full_when_it_is_told(size: int, tmp_path: Path) -> None:
    data = np.random.default_rng(size).bytes(size)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").write_bytes(data)
    out = memoryview(bytearray(size - 100))
    pieces, told = cut([out[:1000], out[1000:]], [1, 999, 4096]), []

    def arrived(number: int) -> None:
        stop = sum(len(view) for piece in pieces[: number + 1] for view in piece)
        assert out[:stop] == data[100 : 100 + stop]
        told.append(number)

    asyncio.run(LocalBackend(tmp_path).read_pieces("model/a", 100, pieces, arrived))
    assert told == [0, 1, 2, 3]
    assert out == data[100:]


def test_a_file_that_ends_within_a_piece_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    pieces, told = cut([memoryview(bytearray(12))], [4, 4]), list[int]()
    with pytest.raises(CorruptError, match="wanted 12 bytes from byte 0 and got 10"):
        asyncio.run(LocalBackend(tmp_path).read_pieces("a", 0, pieces, told.append))
    assert told == [0, 1]
    with pytest.raises(FileNotFoundError):
        asyncio.run(LocalBackend(tmp_path).read_pieces("b", 0, pieces, told.append))
