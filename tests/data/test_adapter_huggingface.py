"""Streaming sets of Hugging Face datasets: virtual shards on any number of readers, and one unit per reader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import adapting
import pytest
from adapting import chain, json_copy, load, save
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node
from feeding import Checkpoint, seeded
from samples import sample

from bcp.data.adapters import PerReader
from bcp.data.adapters.huggingface import HuggingFaceShards
from bcp.errors import InputError, MismatchError, StageError, StateError


def lines(files: Sequence[tuple[int, int]]) -> Iterator[dict[str, int]]:
    for first, size in files:
        for number in range(first, first + size):
            yield {"id": number}


def files_of(sizes: Sequence[int]) -> IterableDataset:
    files = [(sum(sizes[:number]), size) for number, size in enumerate(sizes)]
    return IterableDataset.from_generator(lines, gen_kwargs={"files": files})


def readers_of(count: int, dataset: IterableDataset, **options: Any) -> list[HuggingFaceShards]:
    return [HuggingFaceShards(dataset, reader=reader, readers=count, **options) for reader in range(count)]


def rounds(loaders: Sequence[Any], steps: int) -> list[int]:
    return [sample["id"] for sample in adapting.rounds(loaders, steps)]


def rest(loaders: Sequence[Any]) -> list[int]:
    return [sample["id"] for sample in adapting.rest(loaders)]


def more() -> IterableDataset:
    return files_of([3] * 8).map(lambda row: {"id": row["id"] + 1000})


PIPELINES: dict[str, Callable[[IterableDataset], IterableDataset]] = {
    "plain": lambda dataset: dataset,
    "map": lambda dataset: dataset.map(lambda row: {"id": row["id"]}),
    "batched map": lambda dataset: dataset.map(lambda rows: {"id": rows["id"]}, batched=True, batch_size=3),
    "filter": lambda dataset: dataset.filter(lambda row: row["id"] % 3 > 0),
    "shuffled files": lambda dataset: dataset.shuffle(seed=5, buffer_size=1),
    "format": lambda dataset: dataset.with_format("numpy"),
    "arrow": lambda dataset: Dataset.from_list(list(dataset)).to_iterable_dataset(num_shards=dataset.num_shards),
    "concatenated": lambda dataset: concatenate_datasets([dataset, more()]),
    "interleaved": lambda dataset: interleave_datasets(
        [dataset, more()], stopping_strategy="all_exhausted_without_replacement"
    ),
    "interleaved at random": lambda dataset: interleave_datasets(
        [dataset, more()], [0.3, 0.7], seed=2, stopping_strategy="all_exhausted_without_replacement"
    ),
}


@pytest.mark.parametrize("name", sample(PIPELINES, "batched map", "interleaved"))
def test_any_chain_of_readers_feeds_each_sample_once(name: str) -> None:
    rng = seeded(len(name))
    for _ in range(20):
        dataset = PIPELINES[name](files_of([rng.randint(0, 9) for _ in range(rng.randint(6, 9))] + [1]))
        by = rng.choice(["files", "samples"])
        shards = rng.randint(4, dataset.num_shards if by == "files" else 12)
        want = sorted(row["id"] for row in dataset)
        fed: list[int] = []
        checkpoint = None
        for _ in range(rng.randint(2, 6)):
            loaders = readers_of(rng.randint(1, shards), dataset, shards=shards, by=by)
            if checkpoint:
                load(loaders, checkpoint)
            fed += rounds(loaders, rng.randint(0, 4))
            checkpoint = json_copy(save(loaders))
            rounds(loaders, rng.randint(0, 3))  # lost with a kill
        loaders = readers_of(rng.randint(1, shards), dataset, shards=shards, by=by)
        load(loaders, checkpoint)
        assert sorted(fed + rest(loaders)) == want


def test_readers_that_divide_the_shards_see_one_order() -> None:
    dataset = files_of([6] * 12)
    want = rest(readers_of(1, dataset))
    assert want[:13] == [*range(0, 72, 6), 1]
    for seed in range(10):
        fed: list[int] = []
        checkpoint = None
        for readers, steps in chain(seeded(seed), [1, 2, 3, 4, 6, 12], 4):
            loaders = readers_of(readers, dataset)
            if checkpoint:
                load(loaders, checkpoint)
            fed += rounds(loaders, steps)
            checkpoint = save(loaders)
        loaders = readers_of(1, dataset)
        load(loaders, checkpoint)
        assert fed + rest(loaders) == want


def test_epochs_go_on_where_they_were() -> None:
    sizes = [3, 0, 2, 4]
    dataset = files_of(sizes).shuffle(seed=3, buffer_size=1)
    whole = rest(readers_of(1, dataset, shards=2, epochs=3))
    assert sorted(whole) == sorted([*range(9)] * 3)
    for steps in range(28):
        first = readers_of(1, dataset, shards=2, epochs=3)
        fed = rounds(first, steps)
        second = readers_of(2, dataset, shards=2, epochs=3)
        load(second, save(first))
        third = readers_of(1, dataset, shards=2, epochs=3)
        load(third, save(second))  # nothing was read between the load and the save
        assert fed + rest(third) == whole
    endless = readers_of(1, files_of([2, 0]), epochs=None)
    assert rounds(endless, 7) == [0, 1, 0, 1, 0, 1, 0]
    assert rest(readers_of(1, files_of([0, 0]), epochs=None)) == []


def test_shuffled_samples_are_refused_because_a_resumed_set_loses_them(caplog: pytest.LogCaptureFixture) -> None:
    def shuffled() -> IterableDataset:
        return files_of([10, 10]).shuffle(seed=1, buffer_size=8)

    dataset = shuffled()
    samples = iter(dataset)
    fed = [next(samples)["id"] for _ in range(5)]
    again = shuffled()
    again.load_state_dict(dataset.state_dict())
    with caplog.at_level(logging.ERROR, "datasets"):
        fed += [sample["id"] for sample in again]
    assert len(fed) == len(set(fed)) < 20  # datasets by itself
    for wrapped in (
        shuffled(),
        shuffled().map(lambda row: row),
        interleave_datasets([files_of([1]), shuffled()]),
        files_of([1, 1]).shuffle(seed=1),
    ):
        with pytest.raises(InputError, match=r"shuffle buffer of \d+ samples, which its state lacks"):
            HuggingFaceShards(wrapped, shards=1)


def test_samples_are_dealt_where_there_are_few_files() -> None:
    dataset = files_of([30, 18]).shuffle(seed=2, buffer_size=1)
    want = rest(readers_of(1, dataset, shards=12, by="samples", epochs=2))
    assert want[:48] == [sample["id"] for sample in dataset]
    fed: list[int] = []
    checkpoint = None
    for readers in (3, 12, 4, 2, 6):
        loaders = readers_of(readers, dataset, shards=12, by="samples", epochs=2)
        if checkpoint:
            load(loaders, checkpoint)
        fed += rounds(loaders, 12 // readers)
        checkpoint = save(loaders)
    assert fed + rest(loaders) == want


def test_a_set_that_is_split_by_node_is_one_unit_of_its_reader() -> None:
    def readers(count: int) -> tuple[list[PerReader], list[IterableDataset]]:
        sets = [split_dataset_by_node(files_of([5] * 4), reader, count) for reader in range(count)]
        return [PerReader(each, reader=reader, readers=count) for reader, each in enumerate(sets)], sets

    states, sets = readers(2)
    iterators = [iter(each) for each in sets]
    rounds(iterators, 3)
    checkpoint = json_copy(save(states))
    states, sets = readers(2)
    load(states, checkpoint)
    assert rest([iter(each) for each in sets]) == rest(iterators)
    with pytest.raises(MismatchError, match=r"readers is 4, but 2 in the checkpoint; .* virtual shards"):
        readers(4)[0][0].wanted_units(checkpoint.shared, list(checkpoint.units))


# -- bad input --------------------------------------------------------------------------------


def test_datasets_that_cannot_be_dealt() -> None:
    dataset = files_of([2] * 4)
    for arguments, message in [
        ({"dataset": Dataset.from_dict({"id": [1]})}, r"Dataset is no IterableDataset; .* to_iterable_dataset"),
        ({"dataset": split_dataset_by_node(dataset, 0, 2)}, "split by node already"),
        ({"shards": 5}, r"shards=5.*has 4 files.*by='samples'"),
        ({"by": "rows"}, "by='rows'"),
        ({"shards": 0}, "shards=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"readers": 5}, r"shards=4, readers=5.*at least 5 shards, or at most 4 readers"),
        ({"reader": 2, "readers": 2}, "reader=2, readers=2"),
    ]:
        with pytest.raises(InputError, match=message):
            HuggingFaceShards(**{"dataset": dataset, **arguments})


@pytest.fixture
def checkpoint() -> Checkpoint:
    loaders = readers_of(2, files_of([5] * 4))
    rounds(loaders, 3)
    return save(loaders)


def test_another_run_is_named(checkpoint: Checkpoint) -> None:
    for options, message in [
        ({"shards": 2}, "shards is 2, but 4"),
        ({"epochs": 2}, "epochs is 2, but 1"),
        ({"by": "samples"}, "by is 'samples', but 'files'"),
        ({"dataset": files_of([5] * 5), "shards": 4}, "files is 5, but 4"),
    ]:
        (loader,) = readers_of(1, **{"dataset": files_of([5] * 4), **options})
        with pytest.raises(MismatchError, match=message):
            loader.wanted_units(checkpoint.shared, list(checkpoint.units))
        with pytest.raises(MismatchError, match=message):
            loader.load_units(checkpoint.shared, checkpoint.units)


def test_bad_units_change_nothing(checkpoint: Checkpoint) -> None:
    (loader,) = readers_of(1, files_of([5] * 4))
    assert rounds([loader], 2) == [0, 5]
    units, ids = checkpoint.units, sorted(checkpoint.units)
    for names, message in [
        (ids[1:], r"lacks units \['00000'\]"),
        ([*ids, "00001"], r"twice: \['00001'\]"),
        ([*ids, "00004"], r"foreign ones \['00004'\]"),
    ]:
        with pytest.raises(StateError, match=message):
            loader.wanted_units(checkpoint.shared, names)
    state = units["00003"]["state"]
    for damaged in (
        None,
        {},
        units["00003"] | {"turns": "2"},
        units["00003"] | {"ended": 3},
        units["00003"] | {"state": None},
        units["00003"] | {"state": {}},
        units["00003"] | {"state": state | {"epoch": "two"}},
        units["00003"] | {"state": state | {"examples_iterable": {"shard_idx": 0}}},
        units["00003"] | {"state": state | {"examples_iterable": state["examples_iterable"] | {"type": "Other"}}},
    ):
        with pytest.raises(StateError, match="unit '00003'"):
            loader.load_units(checkpoint.shared, units | {"00003": damaged})
    with pytest.raises(StateError, match=r"foreign ones \['00001', '00003'\]"):
        HuggingFaceShards(files_of([5] * 4), readers=2).load_units(checkpoint.shared, units)
    for shared in (None, {}, {"adapter": "HuggingFaceShards"}, PerReader(files_of([1])).shared_state()):
        with pytest.raises(StateError, match="no state of HuggingFaceShards"):
            loader.wanted_units(shared, ids)
    assert rounds([loader], 3) == [10, 15, 1]


def test_a_sample_that_fails_is_not_left_out() -> None:
    def check(row: dict[str, int]) -> dict[str, int]:
        if row["id"] == 6:
            raise ValueError("six is broken")
        return row

    loader = HuggingFaceShards(files_of([5] * 4).map(check))
    assert rounds([loader], 5) == [0, 5, 10, 15, 1]
    for _ in range(2):
        with pytest.raises(StageError, match=r"virtual shard 1 of 4: ValueError: six is broken"):
            next(loader)
    with pytest.raises(StageError, match="virtual shard 1 of 4"):
        loader.unit_states()
