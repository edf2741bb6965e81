from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcp.plan.box import Box
from bcp.plan.shards import BUFFER, MAY_DIFFER, ONE_WRITER, ShardRow, ShardTable, TensorMeta
from bcp.plan.write import RankTable, plan_save
from bcp.plan.write.replicas import REPLICAS, rows_of

Place = tuple[str, str, tuple[int, ...], int, int]


def meta(name: str, kind: str = "optimizer", length: int = 12) -> TensorMeta:
    return TensorMeta(kind, name, "float32", 4, (length, 2))


@st.composite
def worlds(draw: st.DrawFn) -> list[ShardTable]:
    """Draw tables in which a tensor is replicated, cut into boxes or cut into flat intervals, on some of the ranks."""
    world_size = draw(st.integers(1, 6))
    rows: list[list[ShardRow]] = [[] for _ in range(world_size)]
    objects: list[list[tuple[str, str]]] = [[] for _ in range(world_size)]
    for number in range(draw(st.integers(1, 6))):
        holders = sorted(draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
        way = draw(st.sampled_from(["whole", "boxes", "flat"]))
        states = draw(st.sets(st.sampled_from(["a", "b", "c"]), min_size=1))
        for state in sorted(states):
            tensor = meta(f"state.w{number}.{state}", draw(st.sampled_from(["model", "optimizer"])))
            for place, rank in enumerate(holders):
                half = place % 2 if len(holders) > 1 else None
                low, high = {None: (0, 12), 0: (0, 5), 1: (5, 12)}[half if way != "whole" else None]
                if way == "flat":
                    rows[rank].append(ShardRow(tensor, Box.whole(tensor.shape), 2 * low, 2 * high))
                else:
                    rows[rank].append(ShardRow(tensor, Box((low, 0), (high - low, 2))))
        for rank in holders:
            objects[rank].append((draw(st.sampled_from(["model", "optimizer"])), f"param_groups.w{number}.lr"))
    return [ShardTable.build(held, values) for held, values in zip(rows, objects, strict=True)]


def places(table: ShardTable, row: int) -> Place:
    tensor, box = table.meta(row), table.box(row)
    return tensor.kind, tensor.fqn, (*box.offsets, *box.lengths), int(table.start[row]), int(table.stop[row])


@settings(max_examples=60, deadline=None)
@given(worlds(), st.data())
def test_the_weights_of_equal_replicas_add_up_to_nothing_and_those_of_others_do_not(
    tables: list[ShardTable], data: st.DataObject
) -> None:
    plan = plan_save(tables)
    weights: defaultdict[object, dict[int, int]] = defaultdict(dict)
    holders = Counter[object]()
    for rank, (table, own) in enumerate(zip(tables, plan.ranks, strict=True)):
        rows, compared = range(len(table)), own.compared
        holders.update(places(table, row) for row in rows)
        holders.update(key for key in table.objects if key[0] == "optimizer")
        for row, weight in zip(compared.row.tolist(), compared.weight.tolist(), strict=True):
            weights[places(table, row)][rank] = weight
        for row, weight in zip(compared.objects.tolist(), compared.object_weight.tolist(), strict=True):
            weights[table.objects[row]][rank] = weight
    assert weights.keys() == {place for place, count in holders.items() if count > 1}
    for place, by_rank in weights.items():
        count = holders[place]
        assert sorted(by_rank.values()) == [-1] * (count - 1) + [count - 1]
        assert by_rank[min(by_rank)] == count - 1
        values = data.draw(st.lists(st.sampled_from([3, 5, 11]), min_size=count, max_size=count))
        total = sum(weight * (1 << 64) ** value for weight, value in zip(by_rank.values(), values, strict=True))
        assert (total == 0) == (len(set(values)) == 1)


@pytest.mark.parametrize(
    ("marks", "kind", "length", "writers", "compared"),
    [
        (0, "model", 4096, {0, 1, 2}, 1),
        (BUFFER, "model", 4096, {0}, 1),
        (BUFFER, "model", 1 << 20, {0, 1, 2}, 1),
        (ONE_WRITER, "optimizer", 1 << 20, {0}, 1),
        (ONE_WRITER | MAY_DIFFER, "model", 1 << 20, {0}, 0),
        (MAY_DIFFER, "model", 4096, {0, 1, 2}, 0),
    ],
)
@pytest.mark.parametrize("balance", ["split", "worst-fit"])
def test_marks_choose_the_writers(
    marks: int, kind: str, length: int, writers: set[int], compared: int, balance: str
) -> None:
    tensor = meta("state.w.a", kind, length)
    table = ShardTable.build([ShardRow(tensor, Box.whole(tensor.shape))])
    marked = replace(table, marks=np.array([marks]))
    plan = plan_save([table, marked, table], balance=balance)  # one rank's mark is enough
    found = {rank for rank, own in enumerate(plan.ranks) if len(own.writes)}
    assert found == writers if balance == "split" else found <= writers
    assert [len(own.compared.row) for own in plan.ranks] == [compared] * 3


@pytest.mark.parametrize(
    "row", [(-1, 1, -1, 1), (0, 0, -1, 1), (0, 3, -1, 1), (0, 1, -3, 1), (0, 1, 2, 1), (0, 2, -2, 1)]
)
def test_rows_that_a_rank_does_not_have_are_refused(row: tuple[int, ...]) -> None:
    table = ShardTable.build(
        [
            ShardRow(tensor, Box.whole(tensor.shape))
            for tensor in (meta("state.w.a"), meta("state.w.b"), meta("state.v.a"))
        ],
        [("optimizer", "lr")],
    )
    rank = RankTable.of(table)
    assert rows_of(rank.factored, np.array([(0, 2, -1, 1), (0, 1, -2, 1)], dtype=REPLICAS), 1, 128) is not None
    assert rows_of(rank.factored, np.array([row], dtype=REPLICAS), 1, 128) is None
