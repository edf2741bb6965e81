"""Checksums of blocks that lie in any pieces of memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from bcp.errors import CorruptError
from bcp.format.receipt import Blocks, FileReceipt
from bcp.plan.read.copies import Chunk
from bcp.stages.items import ReadItem, Stored
from bcp.stages.load import check


def cut(data: bytes, at: set[int]) -> list[bytes]:
    return [data[a:b] for a, b in pairwise(sorted({0, len(data), *(each % (len(data) + 1) for each in at)}))]


def stored(blocks: list[bytes], pieces: list[bytes]) -> tuple[Stored, FileReceipt]:
    lengths, nbytes = [len(block) for block in blocks], sum(map(len, blocks))
    table = Blocks.build(lengths, lengths, [xxhash.xxh3_128_digest(block) for block in blocks])
    file = FileReceipt(0, 0, nbytes, nbytes, (), table)
    item = ReadItem("w", nbytes, Chunk(0, 0, nbytes, 0, -1), -1, "model/0", file)
    return Stored(item, nbytes, [memoryview(piece) for piece in pieces]), file


@given(st.binary(min_size=1, max_size=300), st.sets(st.integers(0, 300)), st.sets(st.integers(0, 300)))
def test_blocks_are_found_in_any_pieces(data: bytes, blocks: set[int], pieces: set[int]) -> None:
    check(*stored(cut(data, blocks), cut(data, pieces)), rank=0)


@given(st.binary(min_size=1, max_size=300), st.sets(st.integers(0, 300)), st.sets(st.integers(0, 300)), st.data())
def test_one_flipped_bit_in_any_piece_is_noticed(
    data: bytes, blocks: set[int], pieces: set[int], draw: st.DataObject
) -> None:
    at = draw.draw(st.integers(0, len(data) - 1))
    spoiled = bytearray(data)
    spoiled[at] ^= 1 << draw.draw(st.integers(0, 7))
    saved = cut(data, blocks)
    start = max(end for end in [0, *(sum(map(len, saved[:n])) for n in range(len(saved)))] if end <= at)
    with pytest.raises(CorruptError, match=rf"model/0 is corrupt: bytes {start} to .*\(rank 3, w\)"):
        check(*stored(saved, cut(bytes(spoiled), pieces)), rank=3)


def test_empty_pieces_do_not_matter() -> None:
    check(*stored([b"abc", b"de"], [b"", b"ab", b"", b"", b"cde", b""]), rank=0)
