"""Checksums of blocks that lie one behind the other in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

__all__ = ["cut", "digest_of", "digests"]


def digests(outs: Sequence[memoryview], lengths: Sequence[int]) -> Iterator[bytes]:
    """Yield the xxh3-128 of blocks of these lengths, which lie one behind the other in the buffers."""
    return map(digest_of, cut(outs, lengths)[: len(lengths)])


def digest_of(views: Sequence[memoryview]) -> bytes:
    """Return the xxh3-128 of what lies in several views.

    ``update`` and not ``xxh3_128_digest``: before xxhash 4 the latter keeps the GIL.
    """
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.digest()


def cut(outs: Sequence[memoryview], lengths: Sequence[int]) -> list[list[memoryview]]:
    """Cut what lies in buffers, one behind the other, into pieces of these lengths, and into the rest if there is any.

    Example:
        >>> [[bytes(view) for view in piece] for piece in cut([memoryview(b"ab"), memoryview(b"cde")], [1, 3])]
        [[b'a'], [b'b', b'cd'], [b'e']]

    """
    more, rest, pieces = iter(outs), memoryview(b""), list[list[memoryview]]()
    for length in lengths:
        piece, left = list[memoryview](), length
        while left:
            rest = rest or next(more)
            piece.append(rest[:left])
            rest, left = rest[left:], left - len(piece[-1])
        pieces.append(piece)
    behind = [view for view in (rest, *more) if view]
    return [*pieces, behind] if behind else pieces
