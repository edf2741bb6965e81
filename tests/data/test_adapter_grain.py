"""Grain: virtual shards on any number of readers, its elastic iterator, and one unit per reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import grain
import numpy as np
import pytest
from adapting import chain, json_copy, load, rest, rounds, save
from feeding import seeded
from grain.experimental import ElasticIterator, FirstFitPackIterDataset
from grain.sharding import ShardOptions
from samples import sample

from bcp.data.adapters import PerReader, Replicated
from bcp.data.adapters.grain import GrainShards
from bcp.errors import InputError, MismatchError, StageError, StateError

QUIET = grain.ReadOptions(num_threads=1, prefetch_buffer_size=3)


@pytest.fixture
def closer() -> Iterator[ExitStack]:
    """Closes what a test opens: Grain's iterators have threads."""
    with ExitStack() as stack:
        yield stack


def readers_of(count: int, dataset: Any, shards: int, closer: ExitStack) -> list[GrainShards]:
    return [
        closer.enter_context(GrainShards(dataset, shards=shards, reader=reader, readers=count))
        for reader in range(count)
    ]


def numbers(samples: Sequence[Any]) -> list[int]:
    return [int(number) for sample in samples for number in np.ravel(sample)]


def source(size: int) -> grain.MapDataset:
    return grain.MapDataset.source(list(range(1, size + 1))).shuffle(seed=3)


PIPELINES: dict[str, Callable[[int, int], Any]] = {
    "map": lambda size, _shards: source(size),
    "repeat": lambda size, _shards: source(size).repeat(2),
    "batch": lambda size, shards: lambda shard: source(size)[shard::shards].to_iter_dataset(QUIET).batch(3),
    "filter": lambda size, shards: (
        lambda shard: source(size)[shard::shards].to_iter_dataset(QUIET).filter(lambda number: number % 3 > 0)
    ),
    "mix": lambda size, shards: (
        lambda shard: grain.IterDataset.mix(
            [
                source(size)[shard::shards].repeat().to_iter_dataset(QUIET),
                source(size).map(lambda number: number + 1000)[shard::shards].to_iter_dataset(QUIET),
            ],
            [1, 2],
        )
    ),
    "pack": lambda size, shards: (
        lambda shard: FirstFitPackIterDataset(
            source(size)
            .map(lambda number: {"ids": np.full(number % 4 + 1, number)})[shard::shards]
            .to_iter_dataset(QUIET),
            length_struct={"ids": 5},
            num_packing_bins=3,
        ).map(lambda packed: packed["ids"])
    ),
}


@pytest.mark.parametrize("name", sample(PIPELINES, "map", "mix"))
def test_any_chain_of_readers_feeds_each_sample_once(name: str, closer: ExitStack) -> None:
    rng = seeded(len(name))
    for _ in range(12):
        size, shards = rng.randint(30, 60), rng.randint(4, 8)
        dataset = PIPELINES[name](size, shards)
        want = sorted(numbers(rest(readers_of(1, dataset, shards, closer))))
        fed: list[Any] = []
        checkpoint = None
        for _ in range(rng.randint(2, 5)):
            loaders = readers_of(rng.randint(1, shards), dataset, shards, closer)
            if checkpoint:
                load(loaders, checkpoint)
            fed += rounds(loaders, rng.randint(0, 3))
            checkpoint = json_copy(save(loaders)) if name != "pack" else save(loaders)
            rounds(loaders, rng.randint(0, 2))  # lost with a kill
        loaders = readers_of(rng.randint(1, shards), dataset, shards, closer)
        load(loaders, checkpoint)
        assert sorted(numbers(fed + rest(loaders))) == want
        closer.close()


def test_readers_that_divide_the_shards_see_the_order_of_the_dataset(closer: ExitStack) -> None:
    dataset = source(72)
    want = numbers(list(dataset))
    for seed in range(10):
        fed: list[Any] = []
        checkpoint = None
        for readers, steps in chain(seeded(seed), [1, 2, 3, 4, 6, 12], 4):
            loaders = readers_of(readers, dataset, 12, closer)
            if checkpoint:
                load(loaders, checkpoint)
            fed += rounds(loaders, steps)
            checkpoint = save(loaders)
        loaders = readers_of(1, dataset, 12, closer)
        load(loaders, checkpoint)
        assert numbers(fed + rest(loaders)) == want


def test_the_elastic_iterator_shares_one_state(closer: ExitStack) -> None:
    dataset = source(96)
    want = numbers(list(dataset))

    def elastic(readers: int) -> tuple[list[Any], list[Replicated]]:
        iterators = [
            iter(ElasticIterator(dataset, 8, ShardOptions(shard_index=reader, shard_count=readers), read_options=QUIET))
            for reader in range(readers)
        ]
        for iterator in iterators:
            closer.enter_context(closing(iterator))
        return iterators, [Replicated(each, reader=number, readers=readers) for number, each in enumerate(iterators)]

    fed: list[list[int]] = []
    checkpoint = None
    for readers in (4, 2, 8, 1):
        iterators, states = elastic(readers)
        if checkpoint:
            load(states, checkpoint)
        fed += [sorted(numbers([next(iterator) for iterator in iterators])) for _ in range(2)]
        checkpoint = json_copy(save(states))
        assert checkpoint.units == {}
        rounds(iterators, 1)
    iterators, states = elastic(2)
    load(states, checkpoint)
    while batches := rounds(iterators, 1):
        fed.append(sorted(numbers(batches)))
    assert fed == [sorted(want[start : start + 8]) for start in range(0, 96, 8)]
    with pytest.raises(StateError, match=r"foreign ones \['00000'\]"):
        states[0].wanted_units(checkpoint.shared, ["00000"])
    with pytest.raises(StateError, match="foreign ones"):
        states[0].load_units(checkpoint.shared, {"00000": {}})
    with pytest.raises(StateError, match="no state of Replicated"):
        states[0].wanted_units(PerReader(iterators[0]).shared_state(), [])


def test_any_iterator_is_one_unit_of_its_reader(closer: ExitStack) -> None:
    def readers(count: int) -> tuple[list[Any], list[PerReader]]:
        iterators = [iter(source(40)[reader::count].to_iter_dataset(QUIET).batch(3)) for reader in range(count)]
        for iterator in iterators:
            closer.enter_context(closing(iterator))
        return iterators, [PerReader(each, reader=number, readers=count) for number, each in enumerate(iterators)]

    iterators, states = readers(2)
    fed = rounds(iterators, 3)
    checkpoint = json_copy(save(states))
    assert sorted(checkpoint.units) == ["reader-00000", "reader-00001"]
    left = rest(iterators)
    iterators, states = readers(2)
    load(states, checkpoint)
    assert numbers(rest(iterators)) == numbers(left)
    assert sorted(numbers(fed + left)) == list(range(1, 41))
    with pytest.raises(MismatchError, match=r"readers is 3, but 2 in the checkpoint; .*resume with as many readers"):
        readers(3)[1][0].wanted_units(checkpoint.shared, list(checkpoint.units))


# -- bad input --------------------------------------------------------------------------------


def test_datasets_that_cannot_be_dealt() -> None:
    for dataset, options, message in [
        (source(9).to_iter_dataset(), {}, "pass a MapDataset, or a function"),
        (lambda shard: source(9)[shard::4], {"read_options": QUIET}, "read options of its own"),
        (lambda _shard: [1, 2], {}, "virtual shard 0 is list"),
        (source(9), {"readers": 5}, r"shards=4, readers=5.*at least 5 shards, or at most 4 readers"),
        (source(9), {"reader": -1}, "reader=-1"),
    ]:
        with pytest.raises(InputError, match=message):
            GrainShards(dataset, shards=4, **options)


def test_bad_units_change_nothing(closer: ExitStack) -> None:
    (loader,) = readers_of(1, source(40), 4, closer)
    fed = rounds([loader], 5)
    checkpoint = save([loader])
    units = checkpoint.units
    for damaged in (None, {}, units["00002"] | {"state": {}}, units["00002"] | {"state": None}):
        with pytest.raises(StateError, match="unit '00002'"):
            loader.load_units(checkpoint.shared, units | {"00002": damaged})
    with pytest.raises(StateError, match=r"lacks units \['00002'\]"):
        loader.load_units(checkpoint.shared, {name: unit for name, unit in units.items() if name != "00002"})
    with pytest.raises(MismatchError, match="shards is 5, but 4"):
        readers_of(1, source(40), 5, closer)[0].wanted_units(checkpoint.shared, sorted(units))
    assert numbers(fed + rest([loader])) == numbers(list(source(40)))


def test_a_sample_that_fails_is_not_left_out(closer: ExitStack) -> None:
    def check(number: int) -> int:
        if number == 7:
            raise ValueError("seven is broken")
        return number

    (loader,) = readers_of(1, source(20).map(check), 4, closer)
    for _ in range(2):
        with pytest.raises(StageError, match=r"virtual shard \d of 4: ValueError: seven is broken"):
            rest([loader])
    with pytest.raises(StageError, match="seven is broken"):
        loader.unit_states()


def test_a_closed_loader_says_so_until_it_loads(closer: ExitStack) -> None:
    (loader,) = readers_of(1, source(8), 2, closer)
    checkpoint = save([loader])
    loader.close()
    loader.close()
    for use in (loader.unit_states, loader.__next__):
        with pytest.raises(InputError, match="the dataloader is closed"):
            use()
    load([loader], checkpoint)
    assert numbers(rest([loader])) == numbers(list(source(8)))
