"""Equal shares of a work: each reader takes every n-th item, and the last items are divided among all readers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Share"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one of several readers; by default the share of a reader without others.

    Attributes:
        reader: 0, 1, 2 ...
        readers: how many there are.
    """

    reader: int = 0
    readers: int = 1

    def of(self, items: Sequence[T]) -> list[T]:
        """Return every n-th item."""
        return list(items[self.reader :: self.readers])

    def parts(self, items: Sequence[T]) -> Iterator[tuple[T, Share]]:
        """Yield whole items, as many for each reader, and this reader's parts of the remaining items.

        A checkpoint of one rank is shared among many readers in this way.

        Example:
            >>> from bcp.read.shares import Share
            >>> list(Share(1, 2).parts("abc"))
            [('b', Share(reader=0, readers=1)), ('c', Share(reader=1, readers=2))]

        """
        whole = len(items) - len(items) % self.readers
        for item in items[self.reader : whole : self.readers]:
            yield item, Share()
        for number, item in enumerate(items[whole:]):
            yield item, Share((self.reader + number) % self.readers, self.readers)
