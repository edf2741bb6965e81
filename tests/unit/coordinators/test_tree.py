from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcp.coordinators.tree.rendezvous import Place, Tree
from bcp.errors import InputError

hosts_of_ranks = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=80)


def levels(tree: Tree, rank: int) -> int:
    above = tree.parents[rank]
    return 0 if above is None else 1 + levels(tree, above)


def height(members: int, fanout: int) -> int:
    """Return how many levels a tree of so many has below its root, at most."""
    return members - 1 if fanout == 1 else math.ceil(math.log(members * (fanout - 1) + 1, fanout)) - 1


@given(hosts_of_ranks, st.integers(1, 5))
def test_every_rank_is_there_once(hosts: list[str], fanout: int) -> None:
    tree = Tree.of(hosts, fanout)
    assert tree.parents[0] is None
    assert sorted(tree.order) == list(range(len(hosts)))
    assert sorted(child for children in tree.children for child in children) == list(range(1, len(hosts)))
    for rank, children in enumerate(tree.children):
        assert all(tree.parents[child] == rank for child in children)


@given(hosts_of_ranks, st.integers(1, 5))
def test_fanout_and_depth_are_bounded(hosts: list[str], fanout: int) -> None:
    tree = Tree.of(hosts, fanout)
    for rank, children in enumerate(tree.children):
        here = [child for child in children if hosts[child] == hosts[rank]]
        assert len(here) <= fanout
        assert len(children) - len(here) <= fanout
    deepest = height(len(set(hosts)), fanout) + height(max(hosts.count(host) for host in hosts), fanout)
    assert max(levels(tree, rank) for rank in range(len(hosts))) <= deepest


@given(hosts_of_ranks, st.integers(1, 5))
def test_a_host_talks_to_others_through_its_lowest_rank(hosts: list[str], fanout: int) -> None:
    tree = Tree.of(hosts, fanout)
    for rank, parent in enumerate(tree.parents):
        if parent is not None and hosts[parent] != hosts[rank]:
            assert rank == hosts.index(hosts[rank])
            assert parent == hosts.index(hosts[parent])


@given(hosts_of_ranks, st.integers(1, 5))
def test_the_places_fit_together(hosts: list[str], fanout: int) -> None:
    tree = Tree.of(hosts, fanout)
    places = tree.places()
    assert places[0].size == len(hosts)
    assert places[0].order == tree.order
    for place in places:
        assert place.sizes == tuple(places[child].size for child in place.children)
        assert place.neighbours == ((place.parent,) if place.rank else ()) + place.children
        start = tree.order.index(place.rank)
        assert set(tree.order[start + 1 : start + place.size]) >= set(place.children)


def test_two_hosts() -> None:
    tree = Tree.of(["a", "a", "b", "b", "b", "a"], 2)
    assert tree.children == ((1, 5, 2), (), (3, 4), (), (), ())
    assert tree.places()[2] == Place(2, 6, 0, (3, 4), (1, 1))


def test_a_hundred_thousand_ranks() -> None:
    places = Tree.of([str(rank // 8) for rank in range(100_000)], 16).places()
    assert places[0].size == 100_000
    assert max(len(place.children) for place in places) == 16 + 7


@pytest.mark.parametrize(("hosts", "fanout"), [([], 16), (["a"], 0)])
def test_a_tree_of_nothing(hosts: list[str], fanout: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        Tree.of(hosts, fanout)
