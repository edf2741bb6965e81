"""Checksums of blocks that lie one behind the other in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

__all__ = ["digests"]


def digests(outs: Sequence[memoryview], lengths: Sequence[int]) -> Iterator[bytes]:
    """Yield the xxh3-128 of blocks of these lengths, which lie one behind the other in the buffers.

    ``update`` and not ``xxh3_128_digest``: before xxhash 4 the latter keeps the GIL.
    """
    more, rest = iter(outs), memoryview(b"")
    for length in lengths:
        state, left = xxhash.xxh3_128(), length
        while left:
            rest = rest or next(more)
            piece, rest = rest[:left], rest[left:]
            state.update(piece)
            left -= len(piece)
        yield state.digest()
