"""The choice of twins: on another host, with equal shards, evenly; in all small worlds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import permutations, product

import numpy as np
import pytest

from bcp._messages.tiers import SHARE_BYTES
from bcp.plan.twins import Twins, choose_twins
from bcp.plan.write.divide import SHARE

LAYOUTS: dict[str, Callable[[int], list[int]]] = {
    "DDP": lambda world: [0] * world,
    "FSDP": lambda world: [*range(world)],
    "HSDP": lambda world: [rank % max(world // 2, 1) for rank in range(world)],
    "HSDP, neighbours": lambda world: [rank // 2 for rank in range(world)],
}


def worlds() -> list[tuple[str, list[int], tuple[int, ...]]]:
    """Return all assignments of up to four ranks to up to three hosts, in all layouts."""
    found = []
    for world in range(1, 5):
        for hosts in product(range(3), repeat=world):
            if {*hosts} == {*range(max(hosts) + 1)}:
                found += [(name, make(world), hosts) for name, make in LAYOUTS.items()]
    return found


def check(held: list[int], host_of: list[int], twins: Twins) -> None:
    """Hold twins against what they have to be."""
    count = max(host_of) + 1
    copied_by = twins.copied_by.tolist()
    assert sorted(copied_by) == [*range(count)], "each host copies one"
    if count > 1:
        assert all(other != host for host, other in enumerate(copied_by))
    there = [{held[rank] for rank in range(len(held)) if host_of[rank] == host} for host in range(count)]
    for rank, writer in enumerate(twins.writer.tolist()):
        other = copied_by[host_of[rank]]
        if writer < 0:
            assert other == host_of[rank] or held[rank] not in there[other]
        else:
            assert host_of[writer] == other != host_of[rank]
            assert held[writer] == held[rank]
    for host in range(count):
        for shards in there[host]:
            loads = Counter(twins.writer.tolist())
            mates = [loads[rank] for rank in range(len(held)) if (host_of[rank], held[rank]) == (host, shards)]
            assert max(mates) - min(mates) <= 1, "twins of equal shards write equally much"


def most(held: list[int], host_of: list[int]) -> int:
    """Return how many ranks can have a twin at most, by trial of all ways to let each host copy another one."""
    count = max(host_of) + 1
    there = [{held[rank] for rank in range(len(held)) if host_of[rank] == host} for host in range(count)]
    ways = [way for way in permutations(range(count)) if all(other != host for host, other in enumerate(way))]
    return max((sum(held[rank] in there[way[host]] for rank, host in enumerate(host_of)) for way in ways), default=0)


@pytest.mark.parametrize("stride", [1, 2])
def test_all_small_worlds(stride: int) -> None:
    for name, held, hosts in worlds():
        twins = choose_twins(np.array(held), np.array(hosts), stride)
        check(held, [*hosts], twins)
        assert (twins.writer >= 0).sum() == most(held, [*hosts]), (name, hosts)


@pytest.mark.parametrize("seed", range(50))
def test_random_worlds(seed: int) -> None:
    random = np.random.default_rng(seed)
    world = int(random.integers(1, 40))
    hosts = np.unique(random.integers(0, random.integers(1, 9), world), return_inverse=True)[1]
    held = random.integers(0, random.integers(1, 9), world)
    twins = choose_twins(held, hosts, int(random.integers(1, 4)))
    check(held.tolist(), hosts.tolist(), twins)


@pytest.mark.parametrize(("hosts", "stride"), [(2, 1), (3, 1), (16, 1), (16, 8), (24, 8), (7, 3)])
def test_without_replicas_hosts_copy_each_other_at_the_stride(hosts: int, stride: int) -> None:
    twins = choose_twins(np.arange(2 * hosts), np.repeat(np.arange(hosts), 2), stride)
    assert twins.copied_by.tolist() == [(host + stride) % hosts for host in range(hosts)]
    assert (twins.writer == -1).all()


@pytest.mark.parametrize("stride", [1, 8, 16])
def test_replicas_of_four_hosts_each(stride: int) -> None:
    """Eight ranks a host, and 32 shards; a lost rack of so many hosts loses nothing."""
    hosts = 64
    held = np.arange(8 * hosts) % 32
    twins = choose_twins(held, np.repeat(np.arange(hosts), 8), stride)
    check(held.tolist(), np.repeat(np.arange(hosts), 8).tolist(), twins)
    assert (twins.writer >= 0).all()
    assert sorted(twins.writer.tolist()) == [*range(8 * hosts)], "each rank writes one twin"
    distance = (twins.copied_by - np.arange(hosts)) % hosts
    assert np.minimum(distance, hosts - distance).min() >= stride


def test_a_host_alone_has_no_second_holder() -> None:
    twins = choose_twins(np.array([0, 0]), np.array([0, 0]))
    assert twins.copied_by.tolist() == [0]
    assert twins.writer.tolist() == [-1, -1]
    assert twins.of(0) == []


def test_whose_tensors_a_rank_writes() -> None:
    twins = choose_twins(np.array([0, 0, 0]), np.array([0, 0, 1]))
    assert twins.writer.tolist() == [2, 2, 0]
    assert (twins.of(0), twins.of(1), twins.of(2)) == ([2], [], [0, 1])


def test_messages_know_the_size_of_a_row() -> None:
    assert SHARE.itemsize == SHARE_BYTES
