"""Prompts that complete out of order, over kills and other numbers of readers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from feeding import Checkpoint, alike, load, save, seeded

from bcp.data import Frontier
from bcp.errors import InputError, MismatchError, StageError, StateError
from bcp.protocols import ShardedState


class Stream:
    """Prompts without length, from the beginning each time."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return (f"prompt {number}" for number in range(self.size))


def prompts(size: int, kind: str) -> Any:
    return [f"prompt {number}" for number in range(size)] if kind == "sequence" else Stream(size)


def pulled(frontier: Frontier, count: int) -> list[int]:
    return [ordinal for _ in range(count) if (ordinal := frontier.pull()) is not None]


def test_it_is_a_sharded_state() -> None:
    assert isinstance(Frontier([]), ShardedState)


@pytest.mark.parametrize("kind", ["sequence", "stream"])
def test_no_prompt_is_lost_and_only_unacknowledged_ones_are_repeated(kind: str) -> None:
    for seed in range(300):
        rng = seeded(seed)
        size, shards = rng.randint(0, 200), rng.choice([1, 4, 12])
        trained: Counter[str] = Counter()  # steps that the last checkpoint has
        checkpoint: Checkpoint | None = None
        done = False
        while not done:
            readers = rng.choice([n for n in (1, 2, 3, 4, 7) if n <= shards])
            frontiers = [
                Frontier(prompts(size, kind), reader=r, readers=readers, shards=shards) for r in range(readers)
            ]
            if checkpoint:
                load(frontiers, checkpoint)
            since: Counter[str] = Counter()
            flying: list[tuple[Frontier, int]] = []
            for _ in range(rng.randint(1, 6)):
                for frontier in frontiers:
                    flying += [(frontier, ordinal) for ordinal in pulled(frontier, rng.randint(0, 12))]
                rng.shuffle(flying)
                for _ in range(rng.randint(0, len(flying))):
                    frontier, ordinal = flying.pop()
                    assert frontier[ordinal] == f"prompt {ordinal}"
                    since[frontier[ordinal]] += 1
                    frontier.ack(ordinal)
                if rng.random() < 0.5:
                    checkpoint = save(frontiers)
                    trained += since
                    since.clear()
            if checkpoint:
                load(ends := [Frontier(prompts(size, kind), shards=shards)], checkpoint)
                done = ends[0].pull() is None
        assert trained == Counter(f"prompt {number}" for number in range(size)), seed


def test_a_restart_hands_out_the_unacknowledged_ones_first() -> None:
    frontier = Frontier(range(100, 200), shards=4)
    assert pulled(frontier, 10) == list(range(10))
    frontier.ack(9, 0, 4)
    frontier.ack(2)
    checkpoint = save([frontier])
    load([again := Frontier(range(100, 200), shards=4)], checkpoint)
    assert pulled(again, 8) == [1, 3, 5, 6, 7, 8, 10, 11]
    assert again.outstanding == (1, 3, 5, 6, 7, 8, 10, 11)
    assert again[5] == 105


def test_a_lost_run_of_many_kills() -> None:
    """736 prompts, a kill at every third step, up to 64 rollouts in flight."""
    rng, trained, checkpoint = seeded(0), Counter[int](), None
    restarts = repeated = 0
    while trained.total() < 736:
        frontier = Frontier(range(736))
        if checkpoint:
            load([frontier], checkpoint)
            restarts += 1
        flying = pulled(frontier, 64)
        for _ in range(3):
            batch = [flying.pop(rng.randrange(len(flying))) for _ in range(min(32, len(flying)))]
            frontier.ack(*batch)
            trained.update(batch)
            checkpoint = save([frontier])
            flying += pulled(frontier, 32)
        repeated += len(flying)
    assert trained == Counter(range(736))
    assert restarts == 7
    assert repeated > 64


def test_items_come_with_their_ordinals_until_the_end() -> None:
    assert list(Frontier(["a", "b"])) == [(0, "a"), (1, "b")]
    assert list(Frontier(iter(["a", "b"]))) == [(0, "a"), (1, "b")]
    assert list(Frontier(["a", "b"], epochs=2)) == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    endless = Frontier(["a", "b"], epochs=None)
    assert [next(endless)[1] for _ in range(5)] == ["a", "b", "a", "b", "a"]
    assert Frontier([], epochs=None).pull() is None


def test_readers_share_the_ordinals() -> None:
    frontiers = [Frontier(range(20), reader=reader, readers=3, shards=5) for reader in range(3)]
    parts = [[ordinal for ordinal, _ in frontier] for frontier in frontiers]
    assert sorted(chain.from_iterable(parts)) == list(range(20))
    assert parts[2] == [2, 7, 12, 17]


def test_acks_that_cannot_be_change_nothing() -> None:
    frontier = Frontier(range(9))
    pulled(frontier, 4)
    frontier.ack(1)
    before = save([frontier])
    for ordinals in ([1], [4], [2, 1], [3, 3], [-1]):
        with pytest.raises(InputError, match="are not handed out"):
            frontier.ack(*ordinals)
    with pytest.raises(InputError, match="are not handed out"):
        frontier[1]
    assert save([frontier]).units.keys() == before.units.keys()
    assert all(alike(unit, before.units[name]) for name, unit in save([frontier]).units.items())


def test_the_state_of_an_earlier_step() -> None:
    frontier = Frontier(range(99), shards=1, history=3)
    for step in range(6):
        frontier.ack(*pulled(frontier, 2))
        frontier.mark(step)
    lowest = {step: frontier.unit_states(step)["00000"]["lowest"] for step in (3, 4, 5)}
    assert lowest == {3: 8, 4: 10, 5: 12}
    with pytest.raises(InputError, match=r"step 2 is not among the marked ones \[3, 4, 5\]"):
        frontier.unit_states(2)
    frontier.ack(*pulled(frontier, 1))
    frontier.mark(5)
    assert frontier.unit_states(5)["00000"]["lowest"] == 13
    assert frontier.unit_states(3)["00000"]["lowest"] == 8


def test_threads_pull_and_acknowledge_together() -> None:
    frontier, counts = Frontier(range(2000), shards=8), Counter[int]()
    lock = threading.Lock()

    def rollouts() -> None:
        for ordinal, prompt in frontier:
            assert prompt == ordinal
            frontier.ack(ordinal)
            with lock:
                counts[ordinal] += 1

    threads = [threading.Thread(target=rollouts) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == Counter(range(2000))
    assert frontier.outstanding == ()
    assert all(len(unit["acked"]) == 0 for unit in frontier.unit_states().values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reader": 1}, "reader=1"),
        ({"readers": 65}, "readers=65, shards=64"),
        ({"epochs": 0}, "epochs=0"),
        ({"history": 0}, "history=0"),
        ({"prompts": Stream(3), "epochs": 2}, "handed out once"),
    ],
)
def test_arguments_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Frontier(**{"prompts": range(9)} | changes)


@pytest.fixture
def checkpoint() -> Checkpoint:
    frontier = Frontier(range(40), shards=4)
    frontier.ack(*pulled(frontier, 9)[::2])
    return save([frontier])


def test_another_run_is_named(checkpoint: Checkpoint) -> None:
    for other, message in (
        (Frontier(range(40), shards=5), "shards is 5, but 4"),
        (Frontier(range(41), shards=4), "prompts is 41, but 40"),
        (Frontier(Stream(40), shards=4), "prompts is None, but 40"),
    ):
        with pytest.raises(MismatchError, match=message):
            other.wanted_units(checkpoint.shared, list(checkpoint.units))
        with pytest.raises(MismatchError, match=message):
            other.load_units(checkpoint.shared, checkpoint.units)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["00000", "00001", "00002"], r"lacks units \['00003'\]"),
        (["00000", "00001", "00002", "00003", "00004"], r"foreign ones \['00004'\]"),
        (["00000", "00001", "00002", "00003", "00001"], r"twice: \['00001'\]"),
    ],
)
def test_ids_that_are_not_those_of_one_save(checkpoint: Checkpoint, ids: list[str], message: str) -> None:
    with pytest.raises(StateError, match=message):
        Frontier(range(40), shards=4).wanted_units(checkpoint.shared, ids)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _unit: None,
        lambda unit: {"lowest": unit["lowest"]},
        lambda unit: unit | {"lowest": "text"},
        lambda unit: unit | {"lowest": 7},
        lambda unit: unit | {"lowest": -2},
        lambda unit: unit | {"acked": torch.tensor([7])},
        lambda unit: unit | {"acked": torch.tensor([unit["lowest"]])},
        lambda unit: unit | {"lowest": 14, "acked": torch.tensor([10])},
    ],
)
def test_a_damaged_unit_is_named_and_nothing_is_loaded(
    checkpoint: Checkpoint, damage: Callable[[dict[str, Any]], Any]
) -> None:
    frontier = Frontier(range(40), shards=4)
    frontier.ack(*pulled(frontier, 3))
    with pytest.raises(StateError, match="unit '00002'"):
        frontier.load_units(checkpoint.shared, {**checkpoint.units, "00002": damage(checkpoint.units["00002"])})
    assert frontier.pull() == 3


def test_units_of_another_reader(checkpoint: Checkpoint) -> None:
    frontier = Frontier(range(40), shards=4, reader=1, readers=2)
    assert frontier.wanted_units(checkpoint.shared, list(checkpoint.units)) == ["00001", "00003"]
    with pytest.raises(StateError, match=r"foreign ones \['00000', '00002'\]"):
        frontier.load_units(checkpoint.shared, checkpoint.units)


def test_an_iterator_that_was_read_cannot_go_back() -> None:
    frontier = Frontier(iter(range(40)), shards=4)
    pulled(frontier, 9)
    checkpoint = save([frontier])
    with pytest.raises(StateError, match="read already"):
        load([frontier], checkpoint)
    assert frontier.pull() == 9
    load([fresh := Frontier(iter(range(40)), shards=4)], checkpoint)
    assert fresh.pull() == 0


def test_prompts_that_cannot_be_read_are_not_taken_for_their_end() -> None:
    def broken() -> Iterator[int]:
        yield from range(3)
        raise OSError("the network is gone")

    frontier = Frontier(broken(), shards=4)
    assert pulled(frontier, 3) == [0, 1, 2]
    with pytest.raises(OSError, match="the network is gone"):
        frontier.pull()
    for _ in range(2):
        with pytest.raises(StageError, match="prompt 3, in an earlier call: OSError: the network is gone"):
            frontier.pull()


def test_a_shared_state_of_something_else() -> None:
    for shared in (None, {"step": 3}):
        with pytest.raises(StateError, match="no frontier"):
            Frontier(range(40)).wanted_units(shared, [])
