"""Sources whose tokens are all different, checkpoints as plain dicts, and a run of several readers in lockstep."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import torch

from bcp.data import Batch, SampleId, Source, TokenLoader


def seeded(seed: int) -> Random:
    return Random(seed)  # noqa: S311 -- tests are to be repeated


def make_sources(rng: Random, sizes: Sequence[int], longest: int) -> list[Source]:
    """Sources of samples of 0 to ``longest`` tokens. Each token of all of them is a different number, from 1."""
    token = 1
    sources = []
    for number, size in enumerate(sizes):
        samples = []
        for _ in range(size):
            length = rng.randint(0, longest)
            samples.append(list(range(token, token + length)))
            token += length
        sources.append(Source(f"source {number}", samples, weight=rng.choice([0.5, 1.0, 3.0])))
    return sources


@dataclass
class Checkpoint:
    """What a save writes: the shared part once, and the units of all readers."""

    shared: Any
    units: dict[str, Any]

    def copied(self, names: Collection[str] | None = None) -> Checkpoint:
        """As it comes back from storage, all of it or some units: in other memory."""
        units = {
            name: {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in unit.items()}
            for name, unit in self.units.items()
            if names is None or name in names
        }
        return Checkpoint(self.shared, units)


def save(loaders: Sequence[Any]) -> Checkpoint:
    units: dict[str, Any] = {}
    for loader in loaders:
        own = loader.unit_states()
        assert not units.keys() & own.keys()
        units |= own
    assert all(loader.shared_state() == loaders[0].shared_state() for loader in loaders)
    return Checkpoint(loaders[0].shared_state(), units)


def load(loaders: Sequence[Any], checkpoint: Checkpoint) -> None:
    for loader in loaders:
        wanted = loader.wanted_units(checkpoint.shared, sorted(checkpoint.units))
        loader.load_units(checkpoint.shared, checkpoint.copied(set(wanted)).units)


@dataclass
class Fed:
    """What a run has consumed: the ids of samples, the tokens, and each window that is not empty by its number."""

    ids: Counter[SampleId] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    windows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    documents: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, batch: Batch) -> None:
        for samples in batch.samples:
            self.ids.update(samples)
        for number, row, documents in zip(batch.windows, batch.tokens.tolist(), batch.documents.tolist(), strict=True):
            assert number not in self.windows
            assert [token > 0 for token in row] == [document >= 0 for document in documents]
            if any(row):
                self.windows[number] = tuple(row)
                self.documents[number] = tuple(documents)
                self.tokens.update(token for token in row if token)

    def check_documents(self, sources: Sequence[Source]) -> None:
        """Documents are numbered from 0 in each window, and end where another sample or reading of it begins."""
        owners = [
            {token: (number, index) for index, sample in enumerate(source.samples) for token in sample}
            for number, source in enumerate(sources)
        ]
        owner = dict(ChainMap(*owners))
        for number, window in self.windows.items():
            tokens = [token for token in window if token]
            documents = [document for document in self.documents[number] if document >= 0]
            changes = [owner[left] != owner[right] or left + 1 != right for left, right in pairwise(tokens)]
            assert documents == list(accumulate(changes, initial=0))


def step(loaders: Sequence[TokenLoader], fed: Fed) -> bool:
    """Take one batch of every reader that has one; tell whether any had."""
    batches = [batch for loader in loaders if (batch := next(loader, None))]
    for batch in batches:
        fed.add(batch)
    return bool(batches)


def drain(loader: TokenLoader, fed: Fed) -> None:
    while step([loader], fed):
        pass


def everything(sources: Sequence[Source], epochs: int) -> tuple[Counter[SampleId], Counter[int]]:
    ids = Counter(
        SampleId(source.name, epoch, index)
        for source in sources
        for epoch in range(epochs)
        for index in range(len(source.samples))
    )
    tokens: Counter[int] = Counter()
    for source in sources:
        for index in list(range(len(source.samples))) * epochs:
            tokens.update(source.samples[index])
    return ids, tokens


def alike(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Two unit states are equal, bit for bit."""
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
        for key, value in left.items()
    )
