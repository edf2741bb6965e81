"""Parts of any size, put together to parts of one size.

CRC-32C of bytes, and of bytes that lie one after the other, from their CRCs alone.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np

from bcp.runtime.imports import importing
from bcp.runtime.threads import in_thread

__all__ = ["Grid", "checksum", "combined", "encoded"]

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, the lowest bit first
_ONE = 1 << 31  # the polynomial 1, of which the highest power comes in the lowest bit
_INLINE_BYTES = 128 << 10
# Of so many bytes the CRC takes 10 us, and a thread takes 50.


async def checksum(data: memoryview) -> int:
    """Return the CRC of a flat buffer; of a large one in a thread, which lets others run."""
    return _crc(data) if len(data) <= _INLINE_BYTES else await in_thread(_crc, data)


def _crc(data: memoryview) -> int:
    # It refuses every buffer that has to be released, as memoryview and bytearray; an array of numpy has not.
    return _crc32c()(np.frombuffer(data, np.uint8) if len(data) else b"")


@cache  # a checksum waits for no import of another thread
def _crc32c() -> Callable[[Any], int]:
    with importing:
        import google_crc32c  # noqa: PLC0415 -- a package of the extra

    crc32c: Callable[[Any], int] = google_crc32c.value
    return crc32c


def encoded(crc: int) -> str:
    """Return a CRC as Google Cloud Storage writes it."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def combined(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the CRC of the concatenation of pieces.

    Args:
        pieces: CRC and number of bytes of each, in order.

    Example::

        combined([(crc_of_hello, 5), (crc_of_world, 5)])  # the CRC of b"helloworld"

    """
    whole = 0
    for crc, nbytes in pieces:
        whole = _product(_power(nbytes), whole) ^ crc
    return whole


@lru_cache(maxsize=1024)
def _power(nbytes: int) -> int:
    """Return x to the power of the number of bits, modulo the polynomial: multiplication by it appends zeros."""
    power, square, bits = _ONE, _ONE >> 1, nbytes * 8
    while bits:
        if bits & 1:
            power = _product(square, power)
        square = _product(square, square)
        bits >>= 1
    return power


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the CRC's own."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


class Grid:
    """Cuts an object into cells of one size, and gives each away as soon as it is full.

    For stores that refuse small parts: encoded parts have any size. The bytes are copied on their way.

    Attributes:
        nbytes: bytes of a cell.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._cells: dict[int, bytearray] = {}
        self._filled: dict[int, int] = {}
        self._end = 0

    def __repr__(self) -> str:
        return f"<Grid of {self.nbytes} bytes a cell: {len(self._cells)} cells wait>"

    def add(self, offset: int, data: memoryview) -> Iterator[tuple[int, bytearray]]:
        """Take bytes that begin at an offset of the object; yield the cells that they fill, by number."""
        self._end = max(self._end, offset + len(data))
        full = []
        position = 0
        while position < len(data):
            number, inside = divmod(offset + position, self.nbytes)
            count = min(self.nbytes - inside, len(data) - position)
            cell = self._cells.setdefault(number, bytearray(self.nbytes))
            cell[inside : inside + count] = data[position : position + count]
            self._filled[number] = self._filled.get(number, 0) + count
            if self._filled[number] == self.nbytes:
                full.append(number)
            position += count
        for number in full:
            del self._filled[number]
            yield number, self._cells.pop(number)

    def rest(self) -> tuple[int, bytearray] | None:
        """Return the last cell, cut to the end of the object; None if that was full. All bytes were added before."""
        if not self._cells:
            return None
        ((number, cell),) = self._cells.items()
        return number, cell[: self._end - number * self.nbytes]
