"""Which snapshot is whole, compared with a search over all ranks and hosts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from bcp.plan.holders import Holding, divide, newest_whole


def holding(operation: str, step: int, world: int, ranks: Sequence[int]) -> Holding:
    return Holding(operation, step, world, np.array(ranks, np.int64))


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_latest_step_whose_ranks_all_have_a_holder(seed: int) -> None:
    """Each host forgets some ranks of some saves; the oracle looks at each rank of each save."""
    chance = random.Random(seed)  # noqa: S311 -- no secret
    hosts, world = chance.randint(1, 5), chance.randint(1, 7)
    told = [
        [
            holding(f"op{step}", step, world, [rank for rank in range(world) if chance.random() < 0.6])
            for step in range(3)
            if chance.random() < 0.9
        ]
        for _ in range(hosts)
    ]
    without = {(chance.randrange(hosts), f"op{chance.randrange(3)}") for _ in range(chance.randint(0, 2))}
    usable = {
        (step, host, rank)
        for host, holdings in enumerate(told)
        for each in holdings
        for step in [each.step]
        for rank in each.ranks.tolist()
        if (host, each.operation) not in without
    }
    there = {(step, rank) for step, _, rank in usable}
    expected = [step for step in range(3) if all((step, rank) in there for rank in range(world))]
    whole, reasons = newest_whole(told, without)
    assert (whole.step if whole else None) == max(expected, default=None)
    assert all(int(operation.removeprefix("op")) > max(expected, default=-1) for operation in reasons)
    if whole is not None:
        for rank in range(world):
            assert set(whole.of(rank).tolist()) == {host for host in range(hosts) if (whole.step, host, rank) in usable}


@pytest.mark.parametrize("readers", [[0, 1, 2], [0, 0, 1, 2, 2, 2], [2, 1, 0, 0, 1]])
def test_each_file_is_digested_once_where_it_is(readers: list[int]) -> None:
    told = [[holding("op", 1, 12, ranks)] for ranks in (range(8), range(4, 12), range(12))]
    whole, _ = newest_whole(told)
    assert whole is not None
    chosen = divide(whole, readers)
    for rank, reader in enumerate(chosen.tolist()):
        assert readers[reader] in whole.of(rank).tolist()
    assert max(np.bincount(chosen)) <= 12 // len(readers) + 2


def test_reasons_name_what_is_missing() -> None:
    told = [[holding("a", 3, 4, [0, 1])], [holding("b", 2, 4, [0, 1, 2, 3]), holding("a", 3, 4, [2])]]
    whole, reasons = newest_whole(told)
    assert whole is not None
    assert whole.operation == "b"
    assert reasons == {"a": "step 3: no host has the files of rank 3"}


def test_hosts_that_contradict_each_other_are_not_believed() -> None:
    told = [[holding("a", 3, 2, [0])], [holding("a", 3, 3, [1, 2])]]
    assert newest_whole(told)[1] == {"a": "step 3: hosts disagree about its step or its number of ranks"}
    told = [[holding("a", 3, 2, [0, 1, 2])]]
    assert newest_whole(told) == (None, {"a": "step 3: a host has files of a rank that there was not"})


def test_any_loss_of_two_of_eight_hosts_with_copies_on_the_next_but_one() -> None:
    """Neighbours may go together where a copy is two hosts away; those at that distance may not."""
    holders = [{host, (host + 2) % 8} for host in range(8)]
    for lost in itertools.combinations(range(8), 2):
        told = [
            [holding("a", 1, 8, [rank for rank in range(8) if host in holders[rank] and host not in lost])]
            for host in range(8)
        ]
        is_whole = newest_whole(told)[0] is not None
        assert is_whole == ((lost[1] - lost[0]) % 8 not in (2, 6))
