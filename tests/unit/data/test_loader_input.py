"""What the loader refuses, before it changes anything, and what its first steps promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from feeding import Checkpoint, Fed, alike, drain, load, save, step

from bcp.data import Source, TokenLoader
from bcp.errors import InputError, MismatchError, StageError, StateError
from bcp.protocols import ShardedState


def sources(**changes: Any) -> list[Source]:
    given = {"name": "b", "size": 20, "weight": 1.0} | changes
    return [
        Source("a", [[i, i, i] for i in range(30)], 2.0),
        Source(given["name"], [[i] * 5 for i in range(given["size"])], given["weight"]),
    ]


def loader(**changes: Any) -> TokenLoader:
    return TokenLoader(**{"sources": sources(), "context": 4, "batch": 4, "shards": 4, "seed": 7} | changes)


@pytest.fixture
def checkpoint() -> Checkpoint:
    saved = loader()
    for _ in range(3):
        next(saved)
    return save([saved])


def test_it_is_a_sharded_state() -> None:
    assert isinstance(loader(), ShardedState)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "context=0"),
        ({"batch": 0}, "batch=0"),
        ({"batch": 6, "readers": 4}, "4 readers do not divide it"),
        ({"reader": 2, "readers": 2}, "reader=2, readers=2"),
        ({"reader": -1}, "reader=-1"),
        ({"shards": 0}, "shards=0"),
        ({"shards": 2.0}, "shards=2.0"),
        ({"workers": -1}, "workers=-1"),
        ({"workers": 1.0}, "workers=1.0"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"prefetch": 101}, "prefetch=101.* at most 100"),
        ({"start_method": "thread"}, "start_method='thread'"),
        ({"epochs": 0}, "epochs=0"),
        ({"sources": []}, "at least one source"),
        ({"sources": [*sources(), *sources()]}, "a name of its own"),
        ({"shards": 31}, "31 virtual shards .* has 30"),
        ({"readers": 12, "batch": 12, "shards": 5}, "5 virtual shards in 12 parts .* has 30"),
    ],
)
def test_arguments_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        loader(**changes)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: Source("", [[1]]), "name=''"),
        (lambda: Source("a", []), "no samples"),
        (lambda: Source("a", iter([[1]])), "len"),
        (lambda: Source("a", [[1]], 0.0), "weight 0.0"),
        (lambda: Source("a", [[1]], float("nan")), "weight nan"),
        (lambda: Source("a", [[1]], float("inf")), "weight inf"),
    ],
)
def test_sources_that_cannot_work(source: Callable[[], Source], message: str) -> None:
    with pytest.raises(InputError, match=message):
        source()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 5}, "context is 5, but 4"),
        ({"shards": 2}, "shards is 2, but 4"),
        ({"seed": 8}, "seed is 8, but 7"),
        ({"epochs": 2}, "epochs is 2, but None"),
        ({"sources": sources(name="c")}, "'c'"),
        ({"sources": sources(size=21)}, "21"),
        ({"sources": sources(weight=3.0)}, "3.0"),
        ({"sources": sources()[:1]}, "sources is"),
        ({"sources": sources()[::-1]}, "sources is"),
    ],
)
def test_another_run_is_named(checkpoint: Checkpoint, changes: dict[str, Any], message: str) -> None:
    other = loader(**changes)
    with pytest.raises(MismatchError, match=message):
        other.wanted_units(checkpoint.shared, list(checkpoint.units))
    with pytest.raises(MismatchError, match=message):
        other.load_units(checkpoint.shared, checkpoint.units)
    assert other.consumed == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["00000", "00001", "00002"], r"lacks 1 of 4 units .*\['00003'\]"),
        ([], "lacks 4 of 4"),
        (["00000", "00001", "00001", "00002", "00003"], "'00001' is in the checkpoint twice"),
        (["00000", "00001", "00002", "00003", "00004"], "'00004' is none"),
        (["00000", "00001", "00002", "3"], "'3' is none"),
        (["00000", "00001", "00002", "frontier"], "'frontier' is none"),
        (["00000", "00001", "00002", "00003.0of1"], "'00003.0of1' is none"),
        (["00000", "00001", "00002", "00003.2of2"], "'00003.2of2' is none"),
        (["00000", "00001", "00002", "00003.0of2", "00003.1of2"], r"units of \[1, 2\] parts"),
        ([f"{v:05d}.{p}of2" for v in range(4) for p in range(2)][1:], r"lacks 1 of 8 .*\['00000.0of2'\]"),
    ],
)
def test_ids_that_are_not_those_of_one_save(checkpoint: Checkpoint, ids: list[str], message: str) -> None:
    with pytest.raises(StateError, match=message):
        loader().wanted_units(checkpoint.shared, ids)


def test_a_shared_state_of_something_else(checkpoint: Checkpoint) -> None:
    for shared in (None, 3, {}, {"step": 3}, {**checkpoint.shared, "more": 1}):
        with pytest.raises(StateError, match="no token loader"):
            loader().wanted_units(shared, list(checkpoint.units))


def test_units_of_another_reader(checkpoint: Checkpoint) -> None:
    reader = loader(reader=1, readers=2)
    assert reader.wanted_units(checkpoint.shared, list(checkpoint.units)) == ["00001", "00003"]
    with pytest.raises(StateError, match=r"has units of other readers: \['00000', '00002'\]"):
        reader.load_units(checkpoint.shared, checkpoint.units)
    with pytest.raises(StateError, match=r"lacks units of the dataloader: \['00003'\]"):
        reader.load_units(checkpoint.shared, {"00001": checkpoint.units["00001"]})


def _without(field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda unit: {key: value for key, value in unit.items() if key != field}


def _with(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda unit: unit | changes


@pytest.mark.parametrize(
    "damage",
    [
        lambda _unit: None,
        lambda _unit: [1, 2],
        *(_without(field) for field in ("at", "draws", "cursors", "samples", "tokens", "backlog")),
        _with(tokens=torch.zeros(3)),
        _with(tokens=torch.zeros(1000, dtype=torch.int64)),
        _with(tokens="text"),
        _with(draws=-1),
        _with(at=None),
        _with(cursors=torch.zeros((1, 2), dtype=torch.int64)),
        _with(cursors=torch.tensor([[0, 3], [0, 2]])),
        _with(samples=torch.tensor([[2, 0, 0, 0, 0]]), tokens=torch.zeros(0, dtype=torch.int64)),
        _with(samples=torch.tensor([[1, 0, 20, 0, 0]]), tokens=torch.zeros(0, dtype=torch.int64)),
        _with(samples=torch.zeros((1, 4), dtype=torch.int64)),
        _with(backlog=torch.tensor([[0, 0, 30]])),
        _with(backlog=torch.tensor([[0, -1, 3]])),
        _with(at=13),
    ],
)
def test_a_damaged_unit_is_named_and_nothing_is_loaded(
    checkpoint: Checkpoint, damage: Callable[[dict[str, Any]], Any]
) -> None:
    other = loader()
    for _ in range(2):
        next(other)
    before = save([other])
    with pytest.raises(StateError, match="unit '00002'"):
        other.load_units(checkpoint.shared, {**checkpoint.units, "00002": damage(checkpoint.units["00002"])})
    after = save([other])
    assert all(alike(unit, after.units[name]) for name, unit in before.units.items())
    assert next(other).windows == (8, 9, 10, 11)


def test_a_sample_that_is_no_sequence_of_integers() -> None:
    for sample in ([0.5], [[1, 2]], 3, "text", [2**64]):
        odd = loader(sources=[Source("odd", [sample] * 4)])
        with pytest.raises(StageError, match=r"read.*sample \d of source 'odd' in epoch 0.*flat sequence"):
            next(odd)


def test_samples_may_be_lists_arrays_and_tensors_of_any_integers() -> None:
    samples = [[1, 2], (3, 4), np.array([5, 6], np.uint16), torch.tensor([7, 8], dtype=torch.int32), [], np.array([])]
    fed = Fed()
    reader = loader(sources=[Source("mixed", samples)], shards=1, batch=1, epochs=1)
    while step([reader], fed):
        pass
    assert fed.tokens == Counter(range(1, 9))
    assert sorted(sample.index for sample in fed.ids) == list(range(6))


def test_an_error_of_a_source_is_raised_again_and_the_state_before_it_can_be_saved() -> None:
    class Failing(list[list[int]]):
        broken = True

        def __getitem__(self, index: Any) -> Any:
            if index == 13 and self.broken:
                raise OSError("the disk is gone")
            return [index + 1] * 3

    samples = Failing([[0]] * 20)
    reader, fed = loader(sources=[Source("disk", samples)], epochs=1), Fed()
    with pytest.raises(StageError, match="sample 13 of source 'disk' in epoch 0: OSError: the disk is gone"):
        drain(reader, fed)
    with pytest.raises(StageError, match="sample 13"):
        next(reader)
    Failing.broken = False
    again = loader(sources=[Source("disk", samples)], epochs=1)
    load([again], save([reader]))
    while step([again], fed):
        pass
    assert sorted(sample.index for sample in fed.ids.elements()) == list(range(20))
    assert fed.tokens == Counter(range(1, 21)) + Counter(range(1, 21)) + Counter(range(1, 21))


def test_an_interrupt_while_reading_loses_nothing() -> None:
    class Interrupted(list[list[int]]):
        countdown = 9

        def __getitem__(self, index: Any) -> Any:
            self.countdown -= 1
            if self.countdown == 0:
                raise KeyboardInterrupt
            return [index + 1] * 3

    samples, fed = Interrupted([[0]] * 20), Fed()
    reader = loader(sources=[Source("disk", samples)], epochs=1)
    with pytest.raises(KeyboardInterrupt):
        drain(reader, fed)
    with pytest.raises(InputError, match="was interrupted; save the state, and load it to go on"):
        next(reader)
    load([reader], save([reader]))
    drain(reader, fed)
    assert fed.tokens == Counter(list(range(1, 21)) * 3)


def test_batches_have_the_shapes_that_are_promised() -> None:
    batch = next(loader(batch=8, readers=2, reader=1))
    assert batch.tokens.shape == batch.documents.shape == (4, 4)
    assert batch.tokens.dtype == batch.documents.dtype == torch.int64
    assert batch.windows == (1, 3, 5, 7)
    assert len(batch.samples) == 4


def test_the_batch_may_change_when_a_run_resumes(checkpoint: Checkpoint) -> None:
    reference = loader(batch=1)
    windows = {number: next(reference).tokens for number in range(36)}
    resumed = loader(batch=6)
    load([resumed], checkpoint)
    for _ in range(4):
        batch = next(resumed)
        assert torch.equal(batch.tokens, torch.cat([windows[number] for number in batch.windows]))
    assert resumed.consumed == 36


def test_an_ended_loader_stays_ended_over_a_restart() -> None:
    reader = loader(epochs=1)
    count = len(list(reader))
    assert count > 4
    assert list(reader) == []
    load([again := loader(epochs=1)], save([reader]))
    assert list(again) == []


def test_a_closed_loader_says_so_until_it_loads_again(checkpoint: Checkpoint) -> None:
    with loader() as reader:
        next(reader)
    reader.close()
    with pytest.raises(InputError, match="closed"):
        next(reader)
    with pytest.raises(InputError, match="closed"):
        reader.unit_states()
    load([reader], checkpoint)
    assert next(reader).windows == (12, 13, 14, 15)


def test_units_of_different_steps(checkpoint: Checkpoint) -> None:
    ahead = loader()
    load([ahead], checkpoint)
    next(ahead)
    mixed = checkpoint.units | {"00001": ahead.unit_states()["00001"]}
    with pytest.raises(StateError, match=r"different steps: unit '00003' at window 12, unit '00001' at window 16"):
        loader().load_units(checkpoint.shared, mixed)
