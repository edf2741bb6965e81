"""torchdata's StatefulDataLoader: workers move between readers, and everything else is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from adapting import chain, load, save
from feeding import Checkpoint, seeded
from ranks import forkserver
from samples import sample
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata_sets import Numbers, Reading, Stateless, hub, ids_of

from bcp.data.adapters import PerReader
from bcp.data.adapters.torchdata import TorchdataWorkers, worker_number
from bcp.errors import InputError, MismatchError, StateError

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated, please do not call:UserWarning"),  # torchdata's call
    pytest.mark.filterwarnings(
        "ignore:This DataLoader will create . worker processes in total:UserWarning"
    ),  # on two cores
]

CONTEXT = forkserver()  # a fork of this process would have the locks of its threads, and not the threads


class Job:
    """Readers with their loaders and states, until they are killed."""

    def __init__(
        self, readers: int, workers: int, size: int, kind: Callable[..., Any] = Numbers, **options: Any
    ) -> None:
        options = {"batch_size": 2, "num_workers": workers, "multiprocessing_context": CONTEXT, **options}
        self.loaders = [StatefulDataLoader(kind(size, reader, readers), **options) for reader in range(readers)]
        self.states = [
            TorchdataWorkers(loader, reader=reader, readers=readers) for reader, loader in enumerate(self.loaders)
        ]
        self.iterators: list[Iterator[Any]] = []

    def load(self, checkpoint: Checkpoint) -> None:
        load(self.states, checkpoint)

    def step(self) -> list[list[int]]:
        """The next batch of each reader that has one, by reader."""
        if not self.iterators:
            self.iterators = [iter(loader) for loader in self.loaders]
        batches = [next(iterator, None) for iterator in self.iterators]
        return [list(map(int, batch)) for batch in batches if batch is not None]

    def close(self) -> None:
        for iterator in [*self.iterators, *(loader._iterator for loader in self.loaders)]:
            if iterator is not None:
                iterator._shutdown_workers()


def run(job: Job, steps: int | None = None) -> list[list[int]]:
    batches: list[list[int]] = []
    while steps is None or steps > 0:
        new = job.step()
        if not new:
            break
        batches += new
        steps = None if steps is None else steps - 1
    return batches


def flat(batches: Sequence[Sequence[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


@pytest.mark.parametrize("kind", sample([Numbers, Reading], Reading))
def test_workers_move_between_readers_and_each_sample_is_fed_once_in_order(kind: Callable[..., Any]) -> None:
    rng, size = seeded(4), 4 * 2 * 12  # 12 batches of each of 4 workers
    for _ in range(2):
        fed: list[list[int]] = []
        checkpoint = None
        for readers, steps in chain(rng, [1, 2, 4], 4):
            with closing(Job(readers, 4 // readers, size, kind, prefetch_factor=rng.choice([1, 3]))) as job:
                if checkpoint:
                    job.load(checkpoint)
                fed += run(job, steps)
                checkpoint = save(job.states)
                run(job, rng.randrange(3))  # lost with the kill
        with closing(Job(1, 4, size, kind)) as job:
            assert checkpoint
            job.load(checkpoint)
            fed += run(job)
        assert fed == [list(range(8 * row + each, size, 4))[:2] for row in range(12) for each in range(4)]


def test_saves_at_any_step_and_ended_workers_feed_each_sample_once() -> None:
    rng = seeded(1)
    for _ in range(3):
        size = rng.randrange(60, 75)
        fed: list[int] = []
        checkpoint = None
        for readers in [rng.choice([1, 2, 4]) for _ in range(3)] + [2]:
            with closing(Job(readers, 4 // readers, size)) as job:
                if checkpoint:
                    job.load(checkpoint)
                fed += flat(run(job, rng.randrange(5)))
                checkpoint = save(job.states)
        with closing(Job(1, 4, size)) as job:
            job.load(checkpoint)
            fed += flat(run(job))
            end = save(job.states)
            assert all(unit["main"]["finished"] for unit in end.units.values())
        assert sorted(fed) == list(range(size))


def test_a_streaming_set_of_datasets_divides_its_files_by_the_same_number() -> None:
    fed: list[list[int]] = []
    checkpoint = None
    for readers in (4, 1, 2):
        with closing(Job(readers, 4 // readers, 96, hub, collate_fn=ids_of)) as job:
            if checkpoint:
                job.load(checkpoint)
            fed += run(job, 4 // readers if readers != 2 else None)
            checkpoint = save(job.states)
    with closing(Job(1, 4, 96, hub, collate_fn=ids_of)) as job:
        assert fed == run(job)
    assert sorted(flat(fed)) == list(range(96))


def test_prefetched_batches_are_no_part_of_the_state() -> None:
    with closing(Job(1, 2, 200, prefetch_factor=8)) as job:
        fed = run(job, 3)
        checkpoint = save(job.states)
    assert [unit["worker"]["dataset_state"] for unit in checkpoint.units.values()] == [{"at": 4}, {"at": 2}]
    with closing(Job(1, 2, 200)) as job:
        job.load(checkpoint)
        assert sorted(flat(fed + run(job))) == list(range(200))


@pytest.mark.parametrize("steps", range(5))
def test_the_same_readers_go_on_between_two_snapshots(steps: int) -> None:
    with closing(Job(1, 2, 40, snapshot_every_n_steps=3)) as job:
        whole = run(job)
    with closing(Job(1, 2, 40, snapshot_every_n_steps=3)) as job:
        fed = run(job, steps)
        checkpoint = save(job.states)
    with closing(Job(1, 2, 40, snapshot_every_n_steps=3)) as job:
        job.load(checkpoint)
        assert fed + run(job) == whole


def test_other_readers_go_on_from_a_snapshot_alone() -> None:
    with closing(Job(1, 2, 40, snapshot_every_n_steps=4)) as job:
        fed = run(job, 4)
        at_snapshot = save(job.states)
        run(job, 2)
        between = save(job.states)
    with closing(Job(2, 1, 40, snapshot_every_n_steps=4)) as job:
        with pytest.raises(MismatchError, match=r"by 1 readers, 2 batches after .* has 2 readers"):
            load(job.states, between)
        job.load(at_snapshot)
        assert sorted(flat(fed + run(job))) == list(range(40))


def test_an_ended_epoch_is_followed_by_the_next_as_torchdata_does() -> None:
    with closing(Job(2, 1, 8)) as job:
        assert sorted(flat(run(job))) == list(range(8))
        checkpoint = save(job.states)
    with closing(Job(1, 2, 8)) as job:
        job.load(checkpoint)
        assert save(job.states).units.keys() == checkpoint.units.keys()


def test_a_dataset_learns_its_place() -> None:
    assert worker_number(2, 3) == (2, 3)
    with closing(Job(2, 3, 30, batch_size=None)) as job:
        first = [next(iter(loader)) for loader in job.loaders]
    assert first == [0, 1]


# -- bad input --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    with closing(Job(2, 2, 40)) as job:
        run(job, 3)
        return save(job.states)


def unstarted(readers: int, workers: int, reader: int = 0) -> TorchdataWorkers:
    loader = StatefulDataLoader(Numbers(40, reader, readers), batch_size=2, num_workers=workers)
    return TorchdataWorkers(loader, reader=reader, readers=readers)


@pytest.mark.parametrize(("readers", "workers"), [(2, 1), (1, 2), (4, 2), (3, 1)])
def test_another_number_of_all_workers_is_refused(checkpoint: Checkpoint, readers: int, workers: int) -> None:
    state = unstarted(readers, workers)
    message = rf"2 readers of 2 workers saved 4 .*{readers} readers of {workers} workers want {readers * workers}"
    with pytest.raises(MismatchError, match=message):
        state.wanted_units(checkpoint.shared, list(checkpoint.units))
    with pytest.raises(MismatchError, match=message):
        state.load_units(checkpoint.shared, checkpoint.units)


def test_ids_that_are_not_those_of_one_save(checkpoint: Checkpoint) -> None:
    state, ids = unstarted(1, 4), sorted(checkpoint.units)
    assert ids == [f"worker-0000{number}" for number in range(4)]
    with pytest.raises(StateError, match=r"lacks units \['worker-00003'\]"):
        state.wanted_units(checkpoint.shared, ids[:3])
    with pytest.raises(StateError, match=r"twice: \['worker-00001'\]"):
        state.wanted_units(checkpoint.shared, [*ids, ids[1]])
    with pytest.raises(StateError, match=r"foreign ones \['worker-4'\]"):
        state.wanted_units(checkpoint.shared, [*ids, "worker-4"])


def test_units_that_cannot_be_loaded_change_nothing(checkpoint: Checkpoint) -> None:
    state = unstarted(1, 4)
    state._loader.load_state_dict = None  # a call would be an error
    first = checkpoint.units["worker-00000"]
    damaged = [
        None,
        {},
        first | {"more": 1},
        first | {"worker": None},
        first | {"worker": {}},
        first | {"worker": {"dataset_state": None, "fetcher_state": {"dataset_iter_state": None}}},
        first | {"main": {}},
        first | {"turns": "3"},
    ]
    for unit in damaged:
        with pytest.raises(StateError, match="worker-00000"):
            state.load_units(checkpoint.shared, checkpoint.units | {"worker-00000": unit})
    with pytest.raises(StateError, match=r"lacks units \['worker-00002'\]"):
        state.load_units(
            checkpoint.shared, {name: unit for name, unit in checkpoint.units.items() if name != "worker-00002"}
        )
    for shared in (None, {}, {"adapter": "PerReader"}, checkpoint.shared | {"adapter": "PerReader"}):
        with pytest.raises(StateError, match="no state of TorchdataWorkers"):
            state.wanted_units(shared, list(checkpoint.units))


def test_units_of_two_steps_are_refused(checkpoint: Checkpoint) -> None:
    state = unstarted(2, 2)
    units = {name: checkpoint.units[name] for name in ("worker-00000", "worker-00002")}
    units["worker-00002"] = units["worker-00002"] | {"main": units["worker-00002"]["main"] | {"step": 9}}
    with pytest.raises(StateError, match=r"differ in \['step'\]"):
        state.load_units(checkpoint.shared, units)


def test_loaders_whose_workers_have_no_states_are_refused() -> None:
    numbers = list(range(10))
    for loader, message in [
        (StatefulDataLoader(Numbers(9, 0, 1)), "no worker processes"),
        (StatefulDataLoader(numbers, num_workers=2), "its sampler belongs to one reader"),
        (
            StatefulDataLoader(numbers, num_workers=2, sampler=RandomSampler(numbers)),
            "its sampler belongs to one reader",
        ),
        (StatefulDataLoader(Numbers(9, 0, 1), num_workers=2, in_order=False), "out of order"),
        (numbers, "list is no StatefulDataLoader"),
    ]:
        with pytest.raises(InputError, match=message):
            TorchdataWorkers(loader)
    with pytest.raises(InputError, match="reader=2, readers=2"):
        unstarted(2, 1, reader=2)


def test_a_dataset_without_a_state_is_refused_at_the_save() -> None:
    loader = StatefulDataLoader(Stateless(), num_workers=1, multiprocessing_context=CONTEXT)
    with pytest.raises(StateError, match="keeps no state of its own"):
        TorchdataWorkers(loader).unit_states()
    loader._iterator._shutdown_workers()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_belongs_to_its_reader(workers: int) -> None:
    def make(reader: int, readers: int) -> tuple[Any, PerReader]:
        numbers = list(range(reader, 60, readers))
        context = CONTEXT if workers else None
        loader = StatefulDataLoader(
            numbers, batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=context
        )
        return loader, PerReader(loader, reader=reader, readers=readers)

    jobs = [make(reader, 2) for reader in range(2)]
    fed: list[int] = []
    iterators = [iter(loader) for loader, _ in jobs]
    for _ in range(3):
        fed += [number for iterator in iterators for number in next(iterator).tolist()]
    saved = save([state for _, state in jobs])
    rest = [[batch.tolist() for batch in iterator] for iterator in iterators]
    again = [make(reader, 2) for reader in range(2)]
    load([state for _, state in again], saved)
    assert [[batch.tolist() for batch in loader] for loader, _ in again] == rest
    assert sorted(fed + flat([batch for batches in rest for batch in batches])) == list(range(60))
    with pytest.raises(MismatchError, match="readers is 1, but 2 in the checkpoint"):
        make(0, 1)[1].wanted_units(saved.shared, list(saved.units))
