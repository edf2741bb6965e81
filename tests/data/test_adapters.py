"""Adapters without any library: opaque states, replicated states, and virtual shards of plain iterators."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from adapting import chain, load, rest, rounds, save
from feeding import seeded

from bcp.data.adapters import PerReader, Replicated, VirtualShards
from bcp.data.adapters.mosaic import MosaicLoader
from bcp.errors import InputError, MismatchError, MissingExtraError, StageError, StateError
from bcp.protocols import ShardedState


class Counting:
    """An iterator over some numbers, whose state is the live list of those it has given."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers, self.given, self.closed = numbers, [], False

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if len(self.given) == len(self.numbers):
            raise StopIteration
        if self.numbers[len(self.given)] < 0:
            raise KeyboardInterrupt
        self.given.append(self.numbers[len(self.given)])
        return self.given[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]

    def close(self) -> None:
        self.closed = True


def readers_of(count: int, sizes: Sequence[int]) -> list[VirtualShards]:
    def open_shard(shard: int) -> Counting:
        return Counting([shard + len(sizes) * number for number in range(sizes[shard])])

    return [VirtualShards(open_shard, shards=len(sizes), reader=reader, readers=count) for reader in range(count)]


def test_virtual_shards_feed_each_sample_once_over_random_chains() -> None:
    rng = seeded(0)
    for _ in range(400):
        sizes = [rng.randint(0, 7) for _ in range(rng.randint(1, 8))]
        fed: list[int] = []
        checkpoint = None
        for _ in range(rng.randint(1, 7)):
            loaders = readers_of(rng.randint(1, len(sizes)), sizes)
            if checkpoint:
                load(loaders, checkpoint)
            fed += [number for loader in loaders for number in rounds([loader], rng.randint(0, 3))]  # out of step
            checkpoint = save(loaders)
            rounds(loaders, rng.randint(0, 3))  # lost with a kill, and no part of the state
        load(loaders, checkpoint)
        want = [shard + len(sizes) * number for shard, size in enumerate(sizes) for number in range(size)]
        assert sorted(fed + rest(loaders)) == sorted(want)


def test_virtual_shards_keep_the_order_for_readers_that_divide_them() -> None:
    rng = seeded(1)
    for _ in range(100):
        fed: list[int] = []
        checkpoint = None
        for readers, steps in chain(rng, [1, 2, 3, 4, 6, 12], 6):
            loaders = readers_of(readers, [8] * 12)
            if checkpoint:
                load(loaders, checkpoint)
            fed += rounds(loaders, steps)
            checkpoint = save(loaders)
        loaders = readers_of(1, [8] * 12)
        load(loaders, checkpoint)
        assert fed + rest(loaders) == list(range(96))


def test_every_adapter_is_a_sharded_state() -> None:
    for adapter in (
        PerReader(Counting([])),
        Replicated(Counting([])),
        readers_of(1, [1])[0],
        MosaicLoader(Streaming()),
    ):
        state: ShardedState = adapter
        state.prepare(3)
        assert (state.reader, state.readers) == (0, 1)
        load([state], save([state]))


def test_a_state_does_not_change_with_the_loader() -> None:
    counting = Counting([1, 2, 3])
    states = PerReader(counting), Replicated(counting), VirtualShards(lambda _shard: counting, shards=1)
    before = [save([state]) for state in states]
    next(counting)
    assert before[0].units == {"reader-00000": {"given": []}}
    assert before[1].shared["state"] == {"given": []}
    assert before[2].units["00000"]["state"] == {"given": []}


def test_iterators_are_closed() -> None:
    opened: list[Counting] = []

    def open_shard(shard: int) -> Counting:
        opened.append(Counting([shard]))
        return opened[-1]

    with VirtualShards(open_shard, shards=2) as loader:
        checkpoint = save([loader])
        load([loader], checkpoint)
        assert [each.closed for each in opened] == [True, True, False, False]
        with pytest.raises(StateError, match="unit '00001' of the dataloader cannot be loaded: KeyError"):
            loader.load_units(
                checkpoint.shared, checkpoint.units | {"00001": {"turns": 0, "ended": False, "state": {}}}
            )
        assert [each.closed for each in opened] == [True, True, False, False, True, True]
        assert rest([loader]) == [0, 1]
    assert all(each.closed for each in opened)


def test_an_interrupted_shard_has_no_state() -> None:
    loader = VirtualShards(lambda _shard: Counting([1, -1, 3]), shards=1)
    assert next(loader) == 1
    with pytest.raises(KeyboardInterrupt):
        next(loader)
    with pytest.raises(StageError, match="virtual shard 0 of 1"):
        loader.unit_states()
    with pytest.raises(StageError, match="virtual shard 0 of 1"):
        next(loader)


# -- bad input --------------------------------------------------------------------------------


def test_objects_without_a_state() -> None:
    for make in (PerReader, Replicated):
        with pytest.raises(InputError, match=r"list has neither state_dict\(\) and load_state_dict\(\) nor get_state"):
            make([1, 2])
        with pytest.raises(InputError, match="reader=1, readers=1"):
            make(Counting([]), reader=1)
    with pytest.raises(InputError, match="list_iterator has neither"):
        VirtualShards(lambda _shard: iter([1]), shards=1)
    with pytest.raises(InputError, match="list is no StreamingDataLoader"):
        MosaicLoader([])


def test_another_number_of_readers_is_refused_with_both() -> None:
    old = [PerReader(Counting([1, 2]), reader=reader, readers=4) for reader in range(4)]
    checkpoint = save(old)
    for readers in (1, 3, 8):
        counting = Counting([1, 2])
        state = PerReader(counting, readers=readers)
        counting.load_state_dict = None  # a call would be an error
        message = rf"readers is {readers}, but 4 in the checkpoint; .*resume with as many readers as saved it"
        with pytest.raises(MismatchError, match=message):
            state.wanted_units(checkpoint.shared, sorted(checkpoint.units))
        with pytest.raises(MismatchError, match=message):
            state.load_units(checkpoint.shared, checkpoint.units)


def test_units_of_a_reader_that_are_not_its_own() -> None:
    old = [PerReader(Counting([1, 2]), reader=reader, readers=2) for reader in range(2)]
    checkpoint = save(old)
    ids = sorted(checkpoint.units)
    for names, message in [
        (ids[:1], r"lacks units \['reader-00001'\]"),
        ([*ids, ids[0]], r"twice: \['reader-00000'\]"),
        ([*ids, "reader-00002"], r"foreign ones \['reader-00002'\]"),
    ]:
        with pytest.raises(StateError, match=message):
            old[0].wanted_units(checkpoint.shared, names)
    with pytest.raises(StateError, match=r"reader 0 of 2 lacks units \[\] .* foreign ones \['reader-00001'\]"):
        old[0].load_units(checkpoint.shared, checkpoint.units)
    with pytest.raises(StateError, match="no state of PerReader"):
        old[0].wanted_units(Replicated(Counting([])).shared_state(), [])


# -- Mosaic: an object with the interface and the arithmetic of streaming 0.13.0 ----------------


class Streaming:
    """A ``StreamingDataLoader`` and its dataset, for one reader."""

    def __init__(self, size: int = 48, batch: int = 4, reader: int = 0, readers: int = 1) -> None:
        self.size, self.batch, self.reader, self.readers = size, batch, reader, readers
        self.num_samples_yielded = 0
        self.dataset, self.next_epoch, self.resumed = self, 0, None

    def _resume(self, epoch: int) -> tuple[int, int]:
        if self.resumed is None or self.resumed["epoch"] < epoch:
            return epoch, 0
        return self.resumed["epoch"], self.resumed["sample_in_epoch"]

    def __iter__(self) -> Iterator[list[int]]:
        self.num_samples_yielded = 0
        epoch, first = self._resume(self.next_epoch)
        self.next_epoch = epoch + 1
        for start in range(first + self.reader * self.batch, self.size, self.batch * self.readers):
            self.num_samples_yielded += self.batch
            yield [self.size * epoch + number for number in range(start, start + self.batch)]

    def state_dict(self) -> dict[str, Any]:
        epoch, first = self._resume(self.next_epoch - 1)
        return {
            "epoch": epoch,
            "sample_in_epoch": first + self.num_samples_yielded * self.readers,
            "num_canonical_nodes": 8,
            "shuffle_seed": 7,
            "initial_physical_nodes": 1,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resumed = state


def streaming(readers: int) -> tuple[list[Streaming], list[MosaicLoader]]:
    loaders = [Streaming(96, 16 // readers, reader, readers) for reader in range(readers)]
    return loaders, [MosaicLoader(each, reader=number, readers=readers) for number, each in enumerate(loaders)]


def test_mosaic_goes_on_with_any_number_of_readers() -> None:
    fed: list[list[int]] = []
    checkpoint = None
    for readers in (4, 2, 8, 1, 4, 16):
        loaders, states = streaming(readers)
        if checkpoint:
            load(states, checkpoint)
            assert save(states) == checkpoint
        iterators = [iter(loader) for loader in loaders]
        fed += [[number for iterator in iterators for number in next(iterator, [])] for _ in range(2)]
        checkpoint = save(states)
        if not fed[-1]:
            break
    assert fed[:6] == [list(range(start, start + 16)) for start in range(0, 96, 16)]
    loaders, states = streaming(2)
    load(states, checkpoint)
    assert [list(loader) for loader in loaders] == [[], []]
    assert [next(iter(loader))[0] for loader in loaders] == [96, 104]


def test_a_state_that_streaming_would_ignore_is_refused() -> None:
    (loader,), (state,) = streaming(1)
    load([state], save([state]))
    next(iter(loader))
    checkpoint = save([state])
    with pytest.raises(StateError, match=r"has begun epoch 0, .* ignore a state of epoch 0"):
        load([state], checkpoint)
    (loader,), (state,) = streaming(1)
    load([state], checkpoint)
    load([state], checkpoint)
    assert next(iter(loader)) == list(range(16, 32))
    loader.num_samples_yielded, later = 32, checkpoint.shared["state"] | {"epoch": 3}
    state.load_units(checkpoint.shared | {"state": later}, {})
    assert state.shared_state()["state"] == later


def test_states_that_are_not_mosaic_s() -> None:
    (loader,), (state,) = streaming(1)
    shared = state.shared_state()
    for bad in (None, {}, shared["state"] | {"epoch": None}, {"epoch": 0}):
        with pytest.raises(StateError, match="no state of a StreamingDataset"):
            state.load_units(shared | {"state": bad}, {})
    loader.state_dict = lambda: None  # as streaming does for another dataset
    with pytest.raises(StateError, match="no state of a StreamingDataset"):
        MosaicLoader(loader).shared_state()
    with pytest.raises(StateError, match="no state of MosaicLoader"):
        state.wanted_units(Replicated(loader).shared_state(), [])


# -- packages that are not there ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("torchdata", "torchdata", "torchdata"), ("grain", "grain", "grain"), ("huggingface", "datasets", "datasets")],
)
def test_a_missing_package_names_the_extra(
    module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"bcp.data.adapters.{module}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install 'bcp-checkpoint\[{extra}\]'"):
        importlib.import_module(f"bcp.data.adapters.{module}")


def test_data_imports_none_of_the_libraries() -> None:
    program = (
        "import sys, bcp.data, bcp.data.adapters, bcp.data.adapters.mosaic\n"
        "print({'torchdata', 'grain', 'datasets', 'streaming'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout == "set()\n"
