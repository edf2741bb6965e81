"""The bytes that are written and read: known to clients and servers, and different at every offset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import numpy as np
from xxhash import xxh3_64

__all__ = ["MIB", "Bytes", "digest_of", "filled", "payload_crc", "payload_digest", "pieces", "wipe"]

MIB = 1 << 20
_PIECE_BYTES = 8 * MIB
_ODD = np.uint64(0x9E3779B97F4A7C15)
"""Word number ``n`` of the payload is ``n`` times this, so that no two words of any payload are equal."""

Bytes = bytes | bytearray | memoryview


def pieces(nbytes: int) -> Iterator[bytes]:
    """Yield the payload of ``nbytes``, a multiple of 8, piece by piece."""
    for start in range(0, nbytes, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, nbytes)
        yield (np.arange(start // 8, stop // 8, dtype=np.uint64) * _ODD).tobytes()


def filled(nbytes: int) -> bytearray:
    """Return the payload in memory that was touched."""
    out = bytearray(nbytes)
    at = 0
    for piece in pieces(nbytes):
        out[at : at + len(piece)] = piece
        at += len(piece)
    return out


def wipe(out: memoryview) -> None:
    """Overwrite a buffer with bytes that no payload has, and touch all of its pages."""
    np.frombuffer(out, np.uint8).fill(0xFF)


def digest_of(buffers: Iterable[Bytes]) -> int:
    """Return a digest of buffers that lie one after the other."""
    digest = xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


@cache
def payload_digest(nbytes: int) -> int:
    """Return the digest of the payload."""
    return digest_of(pieces(nbytes))


@cache
def payload_crc(nbytes: int) -> int:
    """Return the CRC-32C of the payload."""
    import google_crc32c  # noqa: PLC0415 -- a package of extras, which local disks do without

    crc = 0
    for piece in pieces(nbytes):
        crc = google_crc32c.extend(crc, piece)
    return crc
