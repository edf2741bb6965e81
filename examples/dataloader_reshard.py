"""Feed one epoch to 4, then 2, then 8 readers: every sample once, and the table that shows it.

Each phase is a job of its own. It loads the checkpoint of the one before, and saves another. A checkpoint has one unit
for each of 24 virtual shards, so that its size and its contents do not depend on the readers.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from local_ranks import LocalRanks

import bcp
from bcp.data import SampleId, Source, TokenLoader

PHASES = [(4, 20), (2, 20), (8, None)]
"""Readers, and steps; None for until the data ends."""
BATCH, CONTEXT, SHARDS = 24, 128, 24


def sources() -> list[Source]:
    """Make two sources of samples of 1 to 200 tokens."""
    lengths = Random(0)  # noqa: S311 -- the same samples in each process
    books = [[token] * lengths.randint(1, 200) for token in range(1500)]
    web = [[token] * lengths.randint(1, 200) for token in range(900)]
    return [Source("books", books, weight=2.0), Source("web", web, weight=1.0)]


def read(rank: int, size: int, pipe: Connection, before: Path | None, after: Path, steps: int | None) -> None:
    """Be one reader of a phase: go on, read some batches, save, and tell the parent of the samples."""
    with TokenLoader(sources(), CONTEXT, BATCH, reader=rank, readers=size, shards=SHARDS, seed=1, epochs=1) as loader:
        states = {"dataloader": loader}
        if before:
            bcp.load(before, states)
        first, fed, count = loader.consumed, list[SampleId](), 0
        while count != steps and (batch := next(loader, None)):
            fed += [sample for window in batch.samples for sample in window]
            count += 1
        bcp.save(after, states)
        pipe.send((first, count, fed, len(loader.unit_states())))


def phase(number: int, root: Path) -> list[tuple[int, int, list[SampleId], int]]:
    """Run a phase; return what each reader tells."""
    readers, steps = PHASES[number]
    before = root / f"phase-{number - 1}" if number else None
    ranks = LocalRanks(read, readers, root / f"meeting-{number}", before, root / f"phase-{number}", steps)
    told = [pipe.recv() for pipe in ranks.pipes]
    assert ranks.join() == [0] * readers
    return told


def row(values: Sequence[object]) -> str:
    """Return a line of the table."""
    return "  ".join(f"{value!s:>12}" for value in values)


def main(root: Path) -> None:
    """Run all phases, print the table, and count."""
    fed: Counter[SampleId] = Counter()
    print(row(["readers", "units each", "from window", "steps", "samples", "of a reader"]))
    for number, (readers, _) in enumerate(PHASES):
        told = phase(number, root)
        for _, _, samples, _ in told:
            fed.update(samples)
        counts = [len(samples) for _, _, samples, _ in told]
        steps = max(count for _, count, _, _ in told)
        spread = f"{min(counts)}-{max(counts)}"
        print(row([readers, told[0][3], told[0][0], steps, sum(counts), spread]))
    expected = {SampleId(source.name, 0, index) for source in sources() for index in range(len(source.samples))}
    lost, twice = len(expected - fed.keys()), sum(count > 1 for count in fed.values())
    print(f"{len(expected)} samples: {lost} lost, {twice} fed twice")
    assert fed == Counter(expected)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
