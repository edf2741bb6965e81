"""Groups with parity: which losses of hosts they survive, and how files are cut into stripes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from bcp.plan.holders import Holding, divide, newest_whole
from bcp.plan.parity import Row, Stripe, groups_of, segment_for, stripe_of


@pytest.mark.parametrize("count", range(1, 26))
@pytest.mark.parametrize("most", [3, 4, 5, 8])
def test_groups_of_about_equal_size(count: int, most: int) -> None:
    for stride in (1, 2, 3, 4, 30):
        groups = groups_of(count, most, stride)
        assert sorted(place for group in groups for place in group) == [*range(count)]
        sizes = [len(group) for group in groups]
        assert max(sizes) <= most
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= min(count, 2), "nobody is alone"


@pytest.mark.parametrize("racks", range(2, 8))
@pytest.mark.parametrize("rack", range(1, 7))
def test_a_group_has_one_host_of_a_rack(racks: int, rack: int) -> None:
    for most in range(3, racks + 1):
        for group in groups_of(racks * rack, most, stride=rack):
            assert len({place // rack for place in group}) == len(group)


@pytest.mark.parametrize("size", range(2, 9))
def test_a_host_has_no_segment_in_its_own_stripe(size: int) -> None:
    for member in range(size):
        stripes = [stripe_of(member, segment, size) for segment in range(size - 1)]
        assert sorted(stripes) == [each for each in range(size) if each != member]
        assert [segment_for(member, stripe, size) for stripe in stripes] == [*range(size - 1)]


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("most", [3, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_every_loss_of_hosts(count: int, most: int, stride: int) -> None:
    """A snapshot is whole if no group has lost two hosts; each host has two ranks."""
    groups = groups_of(count, most, stride)
    ranks = [(2 * host, 2 * host + 1) for host in range(count)]
    stripes: dict[int, list[Stripe]] = {host: [] for host in range(count)}
    for group in groups:
        for place, host in enumerate(group if len(group) > 1 else ()):
            stripes[host].append(Stripe("a", place, tuple(ranks[each] for each in group)))
    for lost in itertools.chain.from_iterable(itertools.combinations(range(count), n) for n in range(count)):
        left = [host for host in range(count) if host not in lost]
        told = [[Holding("a", 1, 2 * count, np.array(ranks[host], np.int64))] for host in left]
        whole, reasons = newest_whole(told, parity=[stripes[host] for host in left])
        is_covered = all(len({*group} & {*lost}) <= (len(group) > 1) for group in groups)
        assert (whole is not None) == is_covered, lost
        assert bool(reasons) != is_covered
        if whole is None:
            continue
        assert whole.rebuilt.tolist() == sorted(rank for host in lost for rank in ranks[host])
        assert whole.is_held().sum() == 2 * len(left)
        group_of = {each: {*group} for group in groups for each in group}
        for host, rank in ((each, rank) for each in range(count) for rank in ranks[each]):
            holders = {left[each] for each in whole.of(rank).tolist()}
            assert holders == (group_of[host] - {host} if host in lost else {host})
        readers = divide(whole, range(len(left)))
        assert all(reader in whole.of(rank).tolist() for rank, reader in enumerate(readers.tolist()))


def test_a_missing_stripe_or_file_of_another_host_leads_to_nothing() -> None:
    """And neither do stripes of a world that there was not, nor those of a host whose files are damaged."""
    members = ((0,), (1,), (2,))
    stripes = [[Stripe("a", place, members)] for place in range(3)]
    held = [[Holding("a", 1, 3, np.array([rank], np.int64))] for rank in range(3)]
    lost: list[list[Holding]] = [[], *held[1:]]
    assert newest_whole(lost, parity=[[], *stripes[1:]])[0] is not None
    assert newest_whole(lost, parity=[[], stripes[1], []])[0] is None
    assert newest_whole(lost, parity=[stripes[0], stripes[1], []])[0] is None, "its own stripe is no help"
    assert newest_whole(held, [(0, "a")], stripes)[0] is not None
    assert newest_whole(held, [(0, "a"), (1, "a")], stripes)[0] is None
    for wrong in (((0,), (1,), (7,)), ((0,), (1,), (1,)), ((0,), (1,), (-1,))):
        assert newest_whole(lost, parity=[[], *([Stripe("a", place, wrong)] for place in (1, 2))])[0] is None
    others = [[], [Stripe("a", 1, members)], [Stripe("a", 2, ((0, 1), (2,), ()))]]
    assert newest_whole(lost, parity=others)[0] is None, "they are of other groups"


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_cut_at_blocks(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311 -- no secret
    lengths = [[chance.randint(1, 40) for _ in range(chance.randint(0, 12))] for _ in range(chance.randint(0, 4))]
    keys = [f"file-{number}" for number in range(len(lengths))]
    segments = chance.randint(1, 5)
    starts = [np.cumsum([0, *each])[:-1].astype(np.int64) for each in lengths]
    row = Row.cut(keys, starts, [sum(each) for each in lengths], segments)
    total, most = sum(map(sum, lengths)), max((max(each, default=0) for each in lengths), default=0)
    found: list[tuple[str, int]] = []
    for segment in range(segments):
        assert row.nbytes(segment) <= total / segments + most
        pieces = row.pieces(segment, 0, row.nbytes(segment) + 5)
        assert sum(stop - start for _, start, stop in pieces) == row.nbytes(segment)
        for key, start, stop in pieces[:1]:
            assert start in starts[keys.index(key)]
            assert row.segments(key, start, stop) == [(segment, 0, stop - start)]
            assert row.segments(key, sum(lengths[keys.index(key)]), 10_000) == []
        found += [(key, at) for key, start, stop in pieces for at in range(start, stop)]
    assert found == [(key, at) for key, each in zip(keys, lengths, strict=True) for at in range(sum(each))]
    for key, each in zip(keys, lengths, strict=True):
        start, stop = sorted(chance.randint(0, sum(each)) for _ in range(2))
        back = [piece for where in row.segments(key, start, stop) for piece in row.pieces(*where)]
        assert [(name, at) for name, first, last in back for at in range(first, last)] == [
            (key, at) for at in range(start, stop)
        ]
