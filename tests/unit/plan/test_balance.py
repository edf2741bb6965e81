from __future__ import annotations

import numpy as np
import pytest
from divided import world_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bcp.plan.box import Box
from bcp.plan.columns import Ints
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.plan.write.divide import BALANCES, WriterIntervals, _water_fill, split, worst_fit
from bcp.plan.write.merge import DistinctShards, merge_shards, merge_tensors

Held = list[tuple[tuple[int, ...], int, set[int]]]  # shape, itemsize, ranks


def shards_of(held: Held, world_size: int) -> tuple[DistinctShards, Ints]:
    rows: list[list[ShardRow]] = [[] for _ in range(world_size)]
    for index, (shape, itemsize, ranks) in enumerate(held):
        for rank in ranks:
            tensor = TensorMeta("model", f"t{index:04}", f"int{8 * itemsize}", itemsize, shape)
            rows[rank].append(ShardRow(tensor, Box.whole(shape)))
    tables = [ShardTable.build(mine) for mine in rows]
    return merged(tables)


def merged(tables: list[ShardTable]) -> tuple[DistinctShards, Ints]:
    world = world_of(tables)
    tensors = merge_tensors(world)
    shards = merge_shards(world, tensors)
    return shards, tensors.weight[shards.tensor]


def load_of(cuts: WriterIntervals, itemsize: Ints, world_size: int) -> Ints:
    load = np.zeros(world_size, dtype=np.int64)
    np.add.at(load, cuts.rank, (cuts.stop - cuts.start) * itemsize[cuts.shard])
    return load


def imbalance(held: Held, world_size: int, balance: str = "split") -> float:
    shards, itemsize = shards_of(held, world_size)
    load = load_of(BALANCES[balance](shards, itemsize, world_size), itemsize, world_size)
    return float(load.max() / load.mean())


def check_cuts(shards: DistinctShards, cuts: WriterIntervals) -> None:
    """Cuts tile every shard, in order, none is empty, and each is written by a holder."""
    assert np.all(cuts.start < cuts.stop)
    for shard in range(len(shards)):
        mine = np.flatnonzero(cuts.shard == shard)
        assert cuts.start[mine[0]] == shards.start[shard]
        assert cuts.stop[mine[-1]] == shards.stop[shard]
        assert np.array_equal(cuts.start[mine[1:]], cuts.stop[mine[:-1]])
        assert set(cuts.rank[mine].tolist()) <= set(shards.holders(shard).tolist())
    assert np.all(np.diff(cuts.shard) >= 0)


EVERY4 = {0, 1, 2, 3}
SMALL: Held = [
    ((300, 256), 2, EVERY4),
    *[((64,), 2, EVERY4)] * 200,
    *[((), 4, EVERY4)] * 100,
    *[((40, 20), 2, EVERY4)] * 15,
]


def test_split_balances_a_small_model_with_one_huge_tensor():
    assert 150_000 < sum(int(np.prod(shape)) * size for shape, size, _ in SMALL) < 250_000
    assert imbalance(SMALL, 4) <= 1.05
    assert imbalance(SMALL, 4, "worst-fit") > 2  # what the split is for


def test_split_balances_a_real_model():
    everyone = set(range(70))
    layers = [((53248, 2048), 2, everyone), ((16384, 2048), 2, everyone), ((16384,), 2, everyone)] * 8
    assert imbalance([*layers, ((128256, 2048), 2, everyone)], 70) <= 1.01


def test_split_counts_what_ranks_write_anyway():
    alone: Held = [((5000, 100), 4, {0}), ((1000, 100), 4, {2})]
    shards, itemsize = shards_of([*alone, ((6000, 100), 4, {0, 1, 2, 3})], 4)
    load = load_of(split(shards, itemsize, 4), itemsize, 4)
    assert load[0] / load.mean() <= 5 * 4 / 12 + 1e-9  # rank 0 carries its own and nothing else
    assert np.ptp(load[1:]) <= 0.01 * load.mean()


def test_split_serves_sets_of_few_ranks_first():
    held: Held = [((4000, 100), 4, {0, 1, 2, 3}), ((4000, 100), 4, {0, 1})]
    assert imbalance(held, 4) <= 1.01


def test_tiny_shards_stay_whole():
    shards, itemsize = shards_of(SMALL, 4)
    cuts = split(shards, itemsize, 4)
    pieces = np.bincount(cuts.shard)
    tiny = (shards.stop - shards.start) * itemsize <= 1024
    assert np.all(pieces[tiny] == 1)
    assert pieces.max() == 4


def test_an_even_cut_through_a_tiny_shard_moves_to_its_end():
    shards, itemsize = shards_of([((200,), 2, EVERY4)] * 301, 4)
    assert len(split(shards, itemsize, 4).shard) == 301


def test_a_model_smaller_than_a_cut_is_worth_is_not_cut():
    shards, itemsize = shards_of([((3, 3), 4, {0, 1, 2})] * 3, 3)
    assert len(split(shards, itemsize, 3).shard) == 3


def test_cuts_fall_between_rows():
    shards, itemsize = shards_of([((1000, 128), 4, {0, 1, 2})], 3)
    cuts = split(shards, itemsize, 3)
    assert len(cuts.shard) == 3
    assert np.all(cuts.start % 128 == 0)


def test_cuts_of_a_stack_of_matrices_fall_between_the_matrices_rows():
    shards, itemsize = shards_of([((3, 1000, 128), 4, {0, 1})], 2)
    cuts = split(shards, itemsize, 2)
    assert len(cuts.shard) == 2
    assert np.all(cuts.start % 128 == 0)


def test_a_single_long_row_is_cut_between_elements():
    assert imbalance([((1, 99_999), 4, {0, 1, 2})], 3) <= 1.01


def test_no_splinters():
    shards, itemsize = shards_of([((1000, 1001), 4, {0, 1}), ((1001, 1001), 4, {0, 1})], 2)
    assert len(split(shards, itemsize, 2).shard) == 2  # the even cut is half a row behind the first tensor's end


def test_rows_are_counted_in_the_box_and_not_in_the_interval():
    tensor = TensorMeta("model", "w", "float32", 4, (1000, 128))
    rows = [ShardRow(tensor, Box.whole((1000, 128)), 100), ShardRow(tensor, Box.whole((1000, 128)), 0, 100)]
    tables = [ShardTable.build(rows)] * 2
    shards, itemsize = merged(tables)
    cuts = split(shards, itemsize, 2)
    inner = cuts.start[~np.isin(cuts.start, shards.start)]
    assert len(inner) == 1
    assert inner[0] % 128 == 0


def test_an_interval_deep_inside_its_box_is_cut_in_its_own_middle():
    tensor = TensorMeta("model", "w", "float32", 4, (4000, 128))
    box, deep = Box.whole(tensor.shape), 2000 * 128
    tables = [
        ShardTable.build([ShardRow(tensor, box, deep)]),
        ShardTable.build([ShardRow(tensor, box, deep)]),
        ShardTable.build([ShardRow(tensor, box, 0, deep)]),
    ]
    shards, itemsize = merged(tables)
    assert split(shards, itemsize, 3).start.tolist() == [0, deep, 3000 * 128]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(0, 5000))
def test_water_fill_shares_everything_and_lifts_the_lowest(load, nbytes):
    before = np.array(load, dtype=np.int64)
    [quota] = _water_fill(before[None], np.array([nbytes]))
    assert quota.sum() == nbytes
    assert quota.min() >= 0
    filled = (before + quota)[quota > 0]
    if filled.size:
        assert np.ptp(filled) <= 1
        assert (before + quota).min() >= filled.max() - 1


def test_worst_fit_gives_whole_shards_largest_first():
    held: Held = [((n, 10), 4, {0, 1}) for n in (1, 2, 3, 4, 5)]
    shards, itemsize = shards_of(held, 2)
    cuts = worst_fit(shards, itemsize, 2)
    assert cuts.rank.tolist() == [0, 0, 1, 1, 0]
    assert load_of(cuts, itemsize, 2).tolist() == [320, 280]


@pytest.mark.parametrize("balance", ["split", "worst-fit"])
def test_sizes_beyond_32_bits(balance):
    held: Held = [((1 << 20, 1 << 16), 8, {0, 1, 2}), ((1 << 16, 1 << 16), 2, {0, 1}), ((1 << 20,), 4, {2})]
    shards, itemsize = shards_of(held, 3)
    cuts = BALANCES[balance](shards, itemsize, 3)
    check_cuts(shards, cuts)
    assert load_of(cuts, itemsize, 3).sum() == 8 * (1 << 36) + 2 * (1 << 32) + 4 * (1 << 20)


shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)
worlds = st.lists(
    st.tuples(shapes, st.sampled_from([1, 2, 4, 8]), st.sets(st.integers(0, 5), min_size=1)), min_size=1, max_size=12
)


@given(worlds, st.sampled_from(sorted(BALANCES)))
def test_every_element_is_written_once_by_a_holder(held, balance):
    shards, itemsize = shards_of(held, 6)
    cuts = BALANCES[balance](shards, itemsize, 6)
    check_cuts(shards, cuts)
    again = BALANCES[balance](shards, itemsize, 6)
    assert all(np.array_equal(getattr(cuts, name), getattr(again, name)) for name in ("shard", "start", "stop", "rank"))
    if balance == "worst-fit":
        assert len(cuts.shard) == len(shards)


sizes_of = st.tuples(st.lists(st.integers(1, 300), max_size=3).map(tuple), st.sampled_from([1, 2, 4, 8]))


@settings(max_examples=60)
@given(st.lists(sizes_of, min_size=1, max_size=30), st.integers(2, 8))
def test_replicated_models_are_balanced_whatever_their_tensors(sizes, world_size):
    total = sum(int(np.prod(shape)) * itemsize for shape, itemsize in sizes)
    assume(total >= 50_000 * world_size)
    assert imbalance([(*size, set(range(world_size))) for size in sizes], world_size) <= 1.05
