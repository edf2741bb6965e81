"""Parts of any size, put together to parts of one size."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Grid"]


class Grid:
    """Cuts an object into cells of one size, and gives each away as soon as it is full.

    For stores that refuse small parts: encoded parts have any size. The bytes are copied on their way.

    Attributes:
        nbytes: bytes of a cell.
    """

    def __init__(self, nbytes: int) -> None:
        """Begin with no cell."""
        self.nbytes = nbytes
        self._cells: dict[int, bytearray] = {}
        self._filled: dict[int, int] = {}
        self._end = 0

    def __repr__(self) -> str:
        """Show the number of cells that wait."""
        return f"<Grid of {self.nbytes} bytes a cell: {len(self._cells)} cells wait>"

    def add(self, offset: int, data: memoryview) -> Iterator[tuple[int, bytearray]]:
        """Take bytes that begin at an offset of the object; yield the cells that they fill, by number."""
        self._end = max(self._end, offset + len(data))
        full = []
        at = 0
        while at < len(data):
            number, inside = divmod(offset + at, self.nbytes)
            count = min(self.nbytes - inside, len(data) - at)
            cell = self._cells.setdefault(number, bytearray(self.nbytes))
            cell[inside : inside + count] = data[at : at + count]
            self._filled[number] = self._filled.get(number, 0) + count
            if self._filled[number] == self.nbytes:
                full.append(number)
            at += count
        for number in full:
            del self._filled[number]
            yield number, self._cells.pop(number)

    def rest(self) -> tuple[int, bytearray] | None:
        """Return the last cell, cut to the end of the object; None if that was full. All bytes were added before."""
        if not self._cells:
            return None
        ((number, cell),) = self._cells.items()
        return number, cell[: self._end - number * self.nbytes]
