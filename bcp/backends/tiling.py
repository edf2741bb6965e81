"""Which parts of an object have arrived, and whether they tile it."""

from __future__ import annotations

from bcp.errors import StorageError

__all__ = ["Tiling"]


class Tiling:
    """Collects the parts of one object; every backend's writer checks them before the object may appear.

    Not locked: call it from the event loop only.
    """

    def __init__(self, where: str, nbytes: int | None) -> None:
        """Start with no part.

        Args:
            where: backend and key, for messages.
            nbytes: size of the whole object, or None where it is not known.

        """
        self._where = where
        self._nbytes = nbytes
        self._parts: list[tuple[int, int, int]] = []

    def __repr__(self) -> str:
        """Show how far the object is."""
        return f"<Tiling of {self._where}: {len(self._parts)} parts, {self._written()} of {self._nbytes} bytes>"

    def add(self, index: int, offset: int, nbytes: int) -> None:
        """Note a part that has been written."""
        self._parts.append((index, offset, nbytes))

    def check(self) -> int:
        """Return the size of the object in bytes.

        Raises:
            StorageError: parts are missing, given twice, overlap or leave a gap, or the size is another one.

        """
        end = 0
        for expected, (index, offset, nbytes) in enumerate(sorted(self._parts)):
            if index != expected:
                what = f"part {index} was written twice" if index < expected else f"part {expected} is missing"
                raise StorageError(f"{self._where}: {what}; write every part 0, 1, 2 ... once")
            if offset != end:
                what = f"a gap of {offset - end} bytes" if offset > end else f"an overlap of {end - offset} bytes"
                raise StorageError(
                    f"{self._where}: {what} between part {index}, which starts at byte {offset}, and the parts "
                    f"before it, which end at byte {end}; together the parts have to tile the object"
                )
            end = offset + nbytes
        if self._nbytes is not None and end != self._nbytes:
            raise StorageError(f"{self._where}: {end} bytes were written and {self._nbytes} were announced")
        return end

    def _written(self) -> int:
        """Return how many bytes the parts hold together."""
        return sum(nbytes for _, _, nbytes in self._parts)
