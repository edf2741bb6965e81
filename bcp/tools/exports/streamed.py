"""A file that is written in parts of one size: fixed bytes, elements of tensors, and bytes that need checksums."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bcp.plan.box import Box

__all__ = ["Elements", "Fixed", "Part", "Sealed", "TargetFile"]

JOINED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Fixed:
    """Bytes that are known beforehand: headers and padding."""

    at: int  # first byte in the file
    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a block of a tensor, in row-major order."""

    at: int  # first byte in the file; a multiple of the size of an element
    number: int  # 0, 1, 2 ... in the file: the place of its checksum
    row: int  # the tensor, as a row of the checkpoint's layout
    box: Box  # the block of the global tensor
    dtype: str  # of the elements in the file
    itemsize: int  # bytes of one of them

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.box.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Sealed:
    """Bytes that follow from the CRC-32 of the elements in front of them, as in a zip archive."""

    at: int  # first byte in the file
    nbytes: int
    make: Callable[[Sequence[int]], bytes]  # from the checksums, by the numbers of the elements


Piece = Fixed | Elements | Sealed


@dataclass(frozen=True, slots=True)
class Part:
    """A byte range of a file, as an item of a graph."""

    name: str
    index: int  # 0, 1, 2 ... in file order
    start: int  # first byte in the file
    nbytes: int
    pieces: Sequence[Piece]  # those that it has bytes of, in file order

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.start + self.nbytes

    def within(self, piece: Piece) -> slice:
        """Return the bytes of a piece that lie in the part, counted from the first byte of the part."""
        return slice(max(piece.at - self.start, 0), min(piece.at + piece.nbytes - self.start, self.nbytes))

    def of(self, piece: Piece) -> slice:
        """Return the same bytes, counted from the first byte of the piece."""
        found, ahead = self.within(piece), self.start - piece.at
        return slice(found.start + ahead, found.stop + ahead)


class TargetFile:
    """A file that is laid out piece by piece, before any byte is written.

    Attributes:
        key: its name in the target.
        nbytes: bytes so far.
        pieces: the pieces, in file order and without gaps; none is empty.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.nbytes = 0
        self.pieces: list[Piece] = []
        self._elements = 0

    def __repr__(self) -> str:
        return f"<TargetFile {self.key}: {len(self.pieces)} pieces, {self.nbytes} bytes>"

    def fixed(self, data: bytes) -> None:
        """Add bytes; small neighbours become one piece."""
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, Fixed) and last.nbytes < JOINED_BYTES:
            self.pieces[-1] = Fixed(last.at, last.data + data)
            self.nbytes += len(data)
        elif data:
            self._add(Fixed(self.nbytes, data))

    def pad(self, alignment: int) -> None:
        """Add zeros up to the next multiple of so many bytes."""
        self.fixed(bytes(-self.nbytes % alignment))

    def elements(self, row: int, box: Box, dtype: str, itemsize: int) -> int:
        """Add the elements of a block of the tensor in a row; return the number of their checksum."""
        if self.nbytes % itemsize:
            raise ValueError(f"{self.key}: elements of {itemsize} bytes cannot begin at byte {self.nbytes}")
        number = self._elements
        self._elements += 1
        if box.numel:
            self._add(Elements(self.nbytes, number, row, box, dtype, itemsize))
        return number

    def sealed(self, nbytes: int, make: Callable[[Sequence[int]], bytes]) -> None:
        """Add bytes that follow from the checksums of elements in front of them."""
        self._add(Sealed(self.nbytes, nbytes, make))

    def _add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.nbytes += piece.nbytes

    @property
    def checksums(self) -> int:
        """How many checksums its sealed pieces may ask for; 0 if it has no such piece."""
        return self._elements if any(isinstance(piece, Sealed) for piece in self.pieces) else 0

    @property
    def data_nbytes(self) -> int:
        """Bytes of elements."""
        return sum(piece.nbytes for piece in self.pieces if isinstance(piece, Elements))

    def parts(self, part_bytes: int) -> Iterator[Part]:
        """Cut the file into parts of so many bytes; the last one may have fewer. An empty file has no part.

        ``part_bytes`` is a multiple of 16, the size of the largest element, so that no element lies in two parts.
        """
        starts = [piece.at for piece in self.pieces]
        for index, start in enumerate(range(0, self.nbytes, part_bytes)):
            stop = min(start + part_bytes, self.nbytes)
            first, last = bisect_right(starts, start) - 1, bisect_right(starts, stop - 1)
            yield Part(f"{self.key} part {index}", index, start, stop - start, self.pieces[first:last])
