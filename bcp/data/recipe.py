"""The order of samples: pure functions of the recipe and of counters.

No random generator has a state here. A permutation is computed position by position, and a draw is a hash of its
number. Two processes with one recipe therefore agree on the order of every sample without a message.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from bcp.errors import InputError

__all__ = ["Permutation", "Recipe", "Source", "Tokens"]

Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
"""int64 of any number of dimensions, on the CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A sequence of tokenized samples, and its share of the mixture.

    Attributes:
        name: name of the source in sample ids, states and errors; unique within a loader.
        samples: ``samples[i]`` is sample ``i``: a flat sequence of integers (list, numpy array or CPU tensor) of any
            length. It answers ``len()``, and always returns the same tokens for the same ``i``. Reader workers receive
            a pickled copy: a class that opens its file by name is small, and a list or a memory-mapped array is not.
        weight: relative probability that the next sample of a virtual shard comes from this source. Weights count
            samples and not tokens. Sources that have ended give their share to the others.

    Raises:
        InputError: the name is empty, the weight is not positive and finite, or there are no samples.

    Example::

        Source("books", [[5, 6, 7], [8, 9]], weight=2.0)

    """

    name: str
    samples: Any
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"Source(name={self.name!r}): pass a string that is not empty")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InputError(f"source {self.name!r}: weight {self.weight} must be positive and finite")
        try:
            empty = len(self.samples) == 0
        except TypeError as error:
            raise InputError(f"source {self.name!r}: samples need len() and [i], not {type(self.samples)}") from error
        if empty:
            raise InputError(f"source {self.name!r} has no samples; leave it out")

    def read(self, index: int) -> Tokens:
        """Return the tokens of sample ``index`` as flat int64.

        Raises:
            InputError: they are not a flat sequence of integers.

        """
        tokens = np.asarray(self.samples[index])
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise InputError(
                f"source {self.name!r}, sample {index}: tokens of shape {list(tokens.shape)} and dtype {tokens.dtype};"
                " a sample is a flat sequence of integers"
            )
        return tokens.astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """Everything that determines the stream of every unit, equal on all readers.

    Attributes:
        sources: the sources, in the order of their numbers.
        context: tokens of a window.
        shards: how many virtual shards there are.
        seed: chooses the permutations and the draws.
        epochs: how often each sample is read; None for without end.
        parts: how many parts each virtual shard is split into; 1 if the readers divide the shards.
    """

    sources: Sequence[Source]
    context: int
    shards: int
    seed: int
    epochs: int | None
    parts: int

    @property
    def units(self) -> int:
        """Return the number of units: unit ``u`` owns the positions ``u`` modulo this of every epoch."""
        return self.shards * self.parts

    def shared_state(self) -> dict[str, Any]:
        """Return all but the parts: the values that a checkpoint and the loader that loads it have in common."""
        return {
            "format": 1,
            "context": self.context,
            "shards": self.shards,
            "seed": self.seed,
            "epochs": self.epochs,
            "sources": [[source.name, len(source.samples), float(source.weight)] for source in self.sources],
        }

    def open_sources(self, unit: int, cursors: Tokens) -> list[int]:
        """Return the numbers of the sources that have samples left for a unit whose cursors these are."""
        return [
            number
            for number, source in enumerate(self.sources)
            if unit < len(source.samples)
            and (
                self.epochs is None
                or int(cursors[number, 0]) + (int(cursors[number, 1]) >= len(source.samples)) < self.epochs
            )
        ]

    def draw(self, unit: int, number: int, among: Sequence[int]) -> int:
        """Return the source of a unit's draw ``number``, by weight among some sources."""
        key = _key(f"draw/{self.seed}/{unit}/{self.units}")
        left = xxh3_64_intdigest(struct.pack("<Q", number), key) / 2**64 * sum(self.sources[s].weight for s in among)
        for source in among:
            left -= self.sources[source].weight
            if left < 0:
                return source
        return among[-1]  # the sum was rounded up

    def index(self, source: int, epoch: int, position: int) -> int:
        """Return the index of the sample at a position of a source's epoch."""
        name, samples = self.sources[source].name, self.sources[source].samples
        return Permutation(len(samples), _key(f"epoch/{self.seed}/{epoch}/{name}"))[position]


class Permutation:
    """A permutation of ``range(size)`` with random access, in constant memory: a Feistel network.

    A position is a row and a column of a table that has at least ``size`` places, and fewer than ``size`` and a column
    more. Each round moves the row by a hash of the column, or the other way round. A place outside is mapped again.

    Example::

        sorted(Permutation(10, key=7)[i] for i in range(10)) == list(range(10))

    """

    __slots__ = ("_columns", "_key", "_rows", "_size")

    def __init__(self, size: int, key: int) -> None:
        self._size, self._key = size, key
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)

    def __getitem__(self, position: int) -> int:
        while True:
            row, column = divmod(position, self._columns)
            for step in range(3):
                row = (row + self._hash(2 * step, column)) % self._rows
                column = (column + self._hash(2 * step + 1, row)) % self._columns
            position = row * self._columns + column
            if position < self._size:
                return position

    def _hash(self, step: int, value: int) -> int:
        return xxh3_64_intdigest(struct.pack("<QQ", step, value), self._key)


@lru_cache(maxsize=4096)
def _key(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
