"""Datasets for torchdata's loader, at the top of a module: workers that are spawned import them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import datasets
from datasets.distributed import split_dataset_by_node
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


def numbers_of(files: Sequence[int], size: int) -> Iterator[dict[str, int]]:
    """Every eighth number below ``size``, from each of the files' own."""
    for first in files:
        yield from ({"id": number} for number in range(first, size, 8))


def hub(size: int, reader: int, readers: int) -> datasets.IterableDataset:
    """A streaming set of 8 files, which divides them by reader and worker itself."""
    rows = datasets.IterableDataset.from_generator(numbers_of, gen_kwargs={"files": [*range(8)], "size": size})
    return split_dataset_by_node(rows, reader, readers)


def ids_of(rows: Sequence[dict[str, int]]) -> list[int]:
    return [row["id"] for row in rows]
