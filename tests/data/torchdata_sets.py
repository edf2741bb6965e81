"""Datasets for torchdata's loader, at the top of a module: workers that are spawned import them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from bcp.data.adapters.torchdata import worker_number


class Numbers(IterableDataset[int]):
    """The numbers below ``size``, of which each worker has those of its number modulo the workers."""

    def __init__(self, size: int, reader: int, readers: int) -> None:
        self.size, self.reader, self.readers, self.at = size, reader, readers, 0

    def __iter__(self) -> Iterator[int]:
        place = worker_number(self.reader, self.readers)
        while place.number + place.workers * self.at < self.size:
            self.at += 1
            yield place.number + place.workers * (self.at - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Reading(IterableDataset[int]):
    """As :class:`Numbers`, and the iterator has the state."""

    def __init__(self, size: int, reader: int, readers: int) -> None:
        self.size, self.reader, self.readers = size, reader, readers

    def __iter__(self) -> Iterator[int]:
        return Place(self.size, *worker_number(self.reader, self.readers))


class Place:
    def __init__(self, size: int, number: int, workers: int) -> None:
        self.size, self.next, self.workers = size, number, workers

    def __iter__(self) -> Place:
        return self

    def __next__(self) -> int:
        if self.next >= self.size:
            raise StopIteration
        self.next += self.workers
        return self.next - self.workers

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Stateless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))
