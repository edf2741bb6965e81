"""Chains of restarts on other numbers of readers and workers: every sample once, and the order of one reader.

``BCP_CHAINS=10 make test ARGS=tests/data/test_loader_chains.py`` runs ten times as many.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from feeding import Fed, alike, everything, load, make_sources, save, seeded, step
from samples import sample

import bcp
from bcp.coordinators.local import memory_coordinators
from bcp.data import SampleId, Source, TokenLoader

TIMES = int(os.environ.get("BCP_CHAINS", "1"))
"""How many times as many chains to run."""


@dataclass
class Run:
    """One run's fixed choices."""

    sources: list[Source]
    context: int
    shards: int
    seed: int
    epochs: int | None

    def loaders(self, readers: int, batch: int, workers: int = 0, prefetch: int = 2) -> list[TokenLoader]:
        return [
            TokenLoader(
                self.sources,
                self.context,
                batch,
                reader=reader,
                readers=readers,
                shards=self.shards,
                workers=workers,
                prefetch=prefetch,
                seed=self.seed,
                epochs=self.epochs,
            )
            for reader in range(readers)
        ]

    def uninterrupted(self) -> Fed:
        fed = Fed()
        (loader,) = self.loaders(1, self.shards)
        while step([loader], fed):
            pass
        return fed


def random_run(rng: Random, shards: int) -> Run:
    sizes = [rng.randint(1, 40) for _ in range(rng.randint(1, 3))]
    return Run(
        make_sources(rng, sizes, rng.choice([3, 10, 30])),
        rng.randint(1, 16),
        shards,
        rng.randrange(99),
        rng.randint(1, 2),
    )


def chain(
    run: Run,
    rng: Random,
    readers: list[int],
    workers: list[int],
    save: Callable[[Sequence[TokenLoader]], Any] = save,
    load: Callable[[Sequence[TokenLoader], Any], None] = load,
) -> tuple[Fed, int]:
    """Restart on random layouts until the data has ended; return what was fed, and the number of restarts."""
    fed = Fed()
    checkpoint: Any = None
    restarts = 0
    while True:
        count = rng.choice(readers)
        batch = count * rng.choice([1, 2, 3, 5])
        with ExitStack() as stack:
            loaders = run.loaders(count, batch, rng.choice(workers), rng.choice([1, 2, 4]))
            for loader in loaders:
                stack.enter_context(loader)
            if checkpoint is not None:
                load(loaders, checkpoint)
            for number in range(rng.randint(0, 8)):
                if rng.random() < 0.3:
                    for loader in loaders:
                        loader.prepare(number)
                if not step(loaders, fed):
                    return fed, restarts
            checkpoint = save(loaders)
            for loader in loaders:  # what is read from now on is lost with its processes
                if rng.random() < 0.5:
                    next(loader, None)
        restarts += 1


@pytest.mark.parametrize("part", sample(range(8), 0))
def test_every_sample_is_fed_once_and_in_the_order_of_one_reader(part: int) -> None:
    for seed in range(part, 600 * TIMES, 8):
        rng = seeded(seed)
        run = random_run(rng, shards := rng.choice([6, 12, 24]))
        fed, _ = chain(run, rng, [n for n in (1, 2, 3, 4, 6, 8, 12, 24) if shards % n == 0], [0])
        assert (fed.ids, fed.tokens) == everything(run.sources, run.epochs), seed
        fed.check_documents(run.sources)
        assert fed.windows == run.uninterrupted().windows, seed


@pytest.mark.parametrize("part", sample(range(8), 0))
def test_every_sample_is_fed_once_if_the_readers_do_not_divide_the_shards(part: int) -> None:
    for seed in range(part, 600 * TIMES, 8):
        rng = seeded(seed)
        run = random_run(rng, rng.choice([1, 2, 3, 4]))
        fed, _ = chain(run, rng, [1, 2, 3, 4, 5, 6, 8, 12], [0])
        assert (fed.ids, fed.tokens) == everything(run.sources, run.epochs), seed
        fed.check_documents(run.sources)


def test_a_run_without_end_has_fed_what_its_cursors_have_passed() -> None:
    """Each sample before the cursors was fed, or is buffered, or in the backlog; and none twice."""
    for seed in range(100 * TIMES):
        rng = seeded(seed)
        shards = rng.choice([1, 2, 3])
        sizes = [rng.randint(12 * shards, 40), rng.randint(1, 20)]
        run = Run(make_sources(rng, sizes, 9), rng.randint(1, 16), shards, seed, None)
        ids, checkpoint = Counter[SampleId](), None
        for _ in range(rng.randint(1, 6)):
            readers = rng.choice([1, 2, 3, 4, 6, 12])
            loaders = run.loaders(readers, readers * rng.choice([1, 2, 5]))
            if checkpoint:
                load(loaders, checkpoint)
            for _ in range(rng.randint(0, 12)):
                for loader in loaders:
                    ids.update(itertools.chain.from_iterable(next(loader).samples))
            checkpoint = save(loaders)
        assert checkpoint
        load([last := run.loaders(1, 1)[0]], checkpoint)
        for unit, state in enumerate(save([last]).units.values()):
            kept = [row for row in state["samples"].tolist() if not row[3]] + state["backlog"].tolist()
            ids.update(SampleId(run.sources[row[0]].name, row[1], row[2]) for row in kept)
            for number, (epoch, position) in enumerate(state["cursors"].tolist()):
                size, name = sizes[number], run.sources[number].name
                for before in range(epoch + 1):
                    for place in range(unit, size if before < epoch else min(size, position), shards):
                        ids[SampleId(name, before, last._recipe.index(number, before, place))] -= 1
        assert not any(ids.values()), seed


def test_every_sample_is_fed_once_by_worker_processes() -> None:
    restarts = 0
    for seed in range(6 * TIMES):
        rng = seeded(seed)
        run = random_run(rng, 12)
        fed, more = chain(run, rng, [1, 2, 3], [0, 1, 2])
        assert (fed.ids, fed.tokens) == everything(run.sources, run.epochs), seed
        fed.check_documents(run.sources)
        assert fed.windows == run.uninterrupted().windows, seed
        restarts += more
    assert restarts > 6


@pytest.mark.long
def test_every_sample_is_fed_once_by_the_worker_processes_of_split_shards() -> None:
    for seed in range(6 * TIMES):
        rng = seeded(seed)
        run = random_run(rng, 2)
        fed, _ = chain(run, rng, [1, 2, 4], [0, 1, 2])
        assert (fed.ids, fed.tokens) == everything(run.sources, run.epochs), seed
        fed.check_documents(run.sources)


@pytest.mark.parametrize("part", sample(range(2), 0))
def test_every_sample_is_fed_once_by_way_of_checkpoints(tmp_path: Path, part: int) -> None:
    paths = (tmp_path / f"{number}" for number in itertools.count())

    def collective(call: Callable[..., Any], path: Path, loaders: Sequence[TokenLoader]) -> None:
        async def all_ranks() -> None:
            ranks = zip(loaders, memory_coordinators(len(loaders)), strict=True)
            await asyncio.gather(*(call(path, {"dataloader": loader}, coordinator=rank) for loader, rank in ranks))

        asyncio.run(all_ranks())

    def saved(loaders: Sequence[TokenLoader]) -> Path:
        collective(bcp.asave, path := next(paths), loaders)
        return path

    def loaded(loaders: Sequence[TokenLoader], path: Path) -> None:
        collective(bcp.aload, path, loaders)

    for seed in range(part, 8 * TIMES, 2):
        rng = seeded(seed)
        run = random_run(rng, shards := rng.choice([2, 6, 12]))
        fed, _ = chain(run, rng, [1, 2, 3, 4, 6, 8], [0, 0, 0, 2], saved, loaded)
        assert (fed.ids, fed.tokens) == everything(run.sources, run.epochs), (seed, shards)


def test_documents_are_the_samples_of_a_window() -> None:
    for seed in range(20):
        run = random_run(seeded(seed), 4)
        run.uninterrupted().check_documents(run.sources)


def test_a_state_is_the_same_for_any_number_of_readers_and_batches() -> None:
    rng = seeded(3)
    run = Run(make_sources(rng, [200, 100], 20), 16, 12, 0, 1)
    checkpoints = []
    for readers, batch in ((1, 24), (2, 24), (3, 12), (12, 12)):
        loaders = run.loaders(readers, batch)
        while loaders[0].consumed < 48:
            assert step(loaders, Fed())
        checkpoints.append(save(loaders))
    for other in checkpoints[1:]:
        assert other.shared == checkpoints[0].shared
        assert other.units.keys() == checkpoints[0].units.keys()
        assert all(alike(unit, other.units[name]) for name, unit in checkpoints[0].units.items())


def test_split_and_merge_without_a_step_between_give_the_same_state() -> None:
    for seed in range(200):
        rng = seeded(seed)
        run = random_run(rng, 2)
        loaders = run.loaders(2, 2)
        for _ in range(rng.randint(0, 9)):
            step(loaders, Fed())
        before = save(loaders)
        split = run.loaders(rng.choice([4, 6, 8]), 24)
        load(split, before)
        between = save(split)
        assert len(between.units) == len(split)
        assert all(f"of{len(split) // 2}" in name for name in between.units)
        load(merged := run.loaders(2, 2), between)
        after = save(merged)
        assert after.units.keys() == before.units.keys()
        assert all(alike(unit, after.units[name]) for name, unit in before.units.items()), seed


def test_a_begun_sample_stays_with_the_first_part() -> None:
    source = Source("long", [list(range(100 * i + 1, 100 * i + 71)) for i in range(8)])
    run = Run([source], 50, 1, 0, 1)
    (loader,) = run.loaders(1, 1)
    begun = next(loader).samples[0][0]
    next(loader)  # 100 of 140 tokens are consumed: the second sample has begun
    next(loader)
    load(parts := run.loaders(2, 2), save([loader]))
    states = [part.unit_states() for part in parts]
    assert [list(state) for state in states] == [["00000.0of2"], ["00000.1of2"]]
    samples = [next(iter(state.values()))["samples"].tolist() for state in states]
    assert begun.index not in {row[2] for rows in samples for row in rows}
    assert samples[0][0][3] == 1
    assert not any(row[3] for row in samples[0][1:] + samples[1])
