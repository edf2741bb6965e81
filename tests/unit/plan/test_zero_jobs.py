"""Jobs as Megatron-LM shards them, small: ZeRO-1 with one flat buffer or with buckets, MoE, replicas over TP x DP."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from divided import Divided, divided, world_of
from hypothesis import given, settings
from hypothesis import strategies as st

from bcp.errors import CoverageError
from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.plan.write.merge import merge_shards, merge_tensors

STATES = ("exp_avg", "exp_avg_sq", "master")


@dataclass(frozen=True)
class Job:
    """Ranks count TP first, then DP. Experts are spread over ``ep`` groups of DP ranks, and replicated in the rest."""

    tp: int
    dp: int
    bucket: int | None = None  # elements after which a bucket is closed; None: one buffer
    ep: int = 1
    layers: int = 3
    states: tuple[str, ...] = STATES
    empty_rows: bool = True  # state boxes of which a rank has nothing too
    params: list[tuple[str, tuple[int, ...], int]] = field(init=False)

    def __post_init__(self) -> None:
        found: list[tuple[str, tuple[int, ...], int]] = []
        for layer in range(self.layers):
            found += [
                (f"layers.{layer}.norm", (12,), -1),
                (f"layers.{layer}.up", (24, 12), 0),
                (f"layers.{layer}.down", (12, 24), 1),
            ]
        object.__setattr__(self, "params", [("embed", (50 * self.tp, 12), 0), *found])

    @property
    def world_size(self) -> int:
        return self.tp * self.dp

    def box(self, shape: tuple[int, ...], cut: int, tp: int) -> Box:
        offsets, lengths = [0] * len(shape), list(shape)
        if cut >= 0:
            lengths[cut] //= self.tp
            offsets[cut] = tp * lengths[cut]
        return Box(tuple(offsets), tuple(lengths))

    def held(self, rank: int) -> list[ShardRow]:
        """Return what a rank holds of the model, and of the optimizer with ZeRO-1."""
        tp, dp = rank % self.tp, rank // self.tp
        rows, flat, boxes = [], 0, []
        bucket: list[tuple[str, tuple[int, ...], Box]] = []
        buckets = [bucket]
        for fqn, shape, cut in self.params:
            box = self.box(shape, cut, tp)
            rows.append(ShardRow(TensorMeta("model", fqn, "bfloat16", 2, shape), box))
            boxes.append(box)
            buckets[-1].append((fqn, shape, box))
            flat += box.numel
            if self.bucket is not None and flat >= self.bucket:
                buckets.append([])
                flat = 0
        for each in buckets:
            rows += self._sharded(each, dp, self.dp)
        if self.ep > 1:
            group, replicas = dp % self.ep, self.dp // self.ep
            for expert in range(group, 2 * self.ep, self.ep):
                shape = (6, 12)
                meta = TensorMeta("model", f"experts.{expert}.up", "bfloat16", 2, (6 * self.tp, 12))
                box = self.box(meta.shape, 0, tp)
                rows.append(ShardRow(meta, box))
                rows += self._sharded([(meta.fqn, meta.shape, box)], dp // self.ep, replicas)
                assert box.lengths == shape
        return rows

    def _sharded(self, bucket: list[tuple[str, tuple[int, ...], Box]], index: int, ranks: int) -> list[ShardRow]:
        """Cut a buffer evenly; every rank has one interval of it."""
        total = sum(box.numel for _, _, box in bucket)
        share = -(-total // ranks)
        low, high, at, rows = index * share, min((index + 1) * share, total), 0, []
        for fqn, shape, box in bucket:
            start, stop = max(low - at, 0), min(high - at, box.numel)
            start, stop = (start, stop) if start < stop else (0, 0)
            if start < stop or self.empty_rows:
                metas = (TensorMeta("optimizer", f"state.{fqn}.{state}", "float32", 4, shape) for state in self.states)
                rows += [ShardRow(meta, box, start, stop) for meta in metas]
            at += box.numel
        return rows

    def tables(self) -> list[ShardTable]:
        return [ShardTable.build(self.held(rank)) for rank in range(self.world_size)]


def counts(division: Divided, tables: list[ShardTable]) -> dict[tuple[str, str], np.ndarray]:
    """Count how often every element is written, by what the ranks are told to write."""
    found: dict[tuple[str, str], np.ndarray] = {}
    for table in tables:
        for row in range(len(table.tensors)):
            meta = table.tensors[row]
            found.setdefault((meta.kind, meta.fqn), np.zeros(meta.shape, dtype=int))
    for table, writes in zip(tables, division.writes, strict=True):
        for row, start, stop in zip(writes.row.tolist(), writes.start.tolist(), writes.stop.tolist(), strict=True):
            meta, box = table.meta(row), table.box(row)
            block = np.zeros(box.lengths, dtype=int)
            block.reshape(-1)[start:stop] = 1
            found[meta.kind, meta.fqn][
                tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))
            ] += block
    return found


JOBS = [
    Job(tp=2, dp=3),
    Job(tp=2, dp=3, bucket=200),
    Job(tp=1, dp=4, bucket=100),
    Job(tp=4, dp=1),
    Job(tp=2, dp=4, ep=2),
    Job(tp=2, dp=4, ep=4, bucket=300),
    Job(tp=1, dp=1),
    Job(tp=2, dp=3, bucket=200, empty_rows=False),
    Job(tp=1, dp=2, states=("a", "b", "c", "d", "e", "f", *map(str, range(20)))),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_every_element_is_written_once(job):
    tables = job.tables()
    division = divided(tables)
    assert all(np.all(count == 1) for count in counts(division, tables).values())


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_states_share_boxes_and_segments(job):
    layout = divided(job.tables()).layout
    optimizer = np.flatnonzero(layout.tensors.kind == 1)
    leaders = np.unique(layout.leader[optimizer])
    assert len(leaders) == len(optimizer) / len(job.states) * max(1, len(job.states) - 15)  # 16 are a family, at most
    for leader in leaders.tolist():
        members = np.flatnonzero(layout.leader == leader)
        assert len({layout.tensors.fqn[row].rpartition(".")[0] for row in members.tolist()}) == 1
        assert len(np.unique(layout.plane[members])) == len(members)


def test_a_data_parallel_group_is_one_template_and_a_stage_one_catalogue():
    world = world_of(Job(tp=2, dp=3, bucket=200).tables())
    assert (len(world.catalogues), len(world.template_slots)) == (1, 2)
    assert world.template.tolist() == [0, 1] * 3


def test_tensors_replicated_over_tp_and_dp_are_written_by_all_their_holders():
    job = Job(tp=2, dp=3)
    tables = [ShardTable.build([ShardRow(TensorMeta("model", "norm", "float32", 4, (60_000,)), Box((0,), (60_000,)))])]
    division = divided(tables * job.world_size)
    assert division.layout.file_nbytes.tolist() == [40_000] * 6

    world = world_of(job.tables())
    merged = merge_tensors(world)
    shards = merge_shards(world, merged)
    holders = {merged.tensors.fqn[row]: shards.holders(at).tolist() for at, row in enumerate(shards.tensor.tolist())}
    assert holders["layers.0.norm"] == list(range(6))
    assert holders["layers.0.up"] in ([0, 2, 4], [1, 3, 5])
    # A norm's states are cut over DP and replicated over TP.
    mine = [
        at for at, row in enumerate(shards.tensor.tolist()) if merged.tensors.fqn[row] == "state.layers.0.norm.exp_avg"
    ]
    assert [len(shards.holders(at)) for at in mine] == [2] * len(mine)


def test_experts_are_written_by_the_fewer_ranks_that_hold_them():
    job = Job(tp=2, dp=4, ep=2)
    tables = job.tables()
    division = divided(tables)
    for rank, (table, writes) in enumerate(zip(tables, division.writes, strict=True)):
        mine = {table.meta(row).fqn for row in writes.row.tolist() if "experts" in table.meta(row).fqn}
        group = rank // 2 % 2
        assert all(int(fqn.split("experts.")[1].split(".")[0]) % 2 == group for fqn in mine)


def test_balance_of_zero_and_replicas_together():
    job = Job(tp=2, dp=4, layers=4)
    job.params[:] = [(name, tuple(40 * n for n in shape), cut) for name, shape, cut in job.params]
    layout = divided(job.tables()).layout
    load = np.bincount(layout.file_rank, weights=layout.file_nbytes, minlength=job.world_size)
    assert load.max() / load.mean() <= 1.01
    in_group = load.reshape(job.dp, job.tp)
    assert np.all(in_group.max(axis=0) / in_group.mean(axis=0) <= 1.01)


@pytest.mark.parametrize("holder", [0, 1, 2])
def test_ranks_without_anything_take_part(holder):
    meta = TensorMeta("model", "w", "float32", 4, (8, 4))
    tables = [ShardTable.build([])] * 3
    tables[holder] = ShardTable.build([ShardRow(meta, Box.whole(meta.shape))])
    division = divided(tables)
    assert [len(writes) for writes in division.writes] == [int(rank == holder) for rank in range(3)]
    assert division.layout.world_size == 3


def test_a_job_of_nothing_at_all():
    division = divided([ShardTable.build([])] * 2)
    assert (len(division.layout.tensors), len(division.layout.file_rank)) == (0, 0)


def test_a_rank_that_states_nothing_of_what_others_cut_leaves_a_gap():
    tables = Job(tp=1, dp=3).tables()
    optimizer = tables[1].tensors.kind[tables[1].tensor] == 1
    tables[1] = replace(
        tables[1], start=np.where(optimizer, 0, tables[1].start), stop=np.where(optimizer, 0, tables[1].stop)
    )
    with pytest.raises(CoverageError, match=r"optimizer tensor 'state\..*no rank holds"):
        divided(tables)


def test_states_that_one_rank_holds_differently_are_laid_out_one_by_one():
    shape = (6, 4)
    a, b = (TensorMeta("optimizer", f"state.w.{name}", "float32", 4, shape) for name in "ab")
    whole, halves = Box.whole(shape), [(0, 10), (10, 24)]
    alike = [ShardTable.build([ShardRow(a, whole, *cut), ShardRow(b, whole, *cut)]) for cut in halves]
    assert divided(alike).layout.leader.tolist() == [0, 0]
    moved = [
        ShardTable.build([ShardRow(a, whole, *halves[0]), ShardRow(b, whole, *halves[0])]),
        ShardTable.build([ShardRow(a, whole, *halves[1]), ShardRow(b, whole, 10, 15)]),
        ShardTable.build([ShardRow(b, whole, 15, 24)]),
    ]
    division = divided(moved)
    assert division.layout.leader.tolist() == [0, 1]
    assert all(np.all(count == 1) for count in counts(division, moved).values())


def test_families_of_one_name_but_other_members_elsewhere_are_split():
    shape = (4,)
    metas = {name: TensorMeta("optimizer", f"state.w.{name}", "float32", 4, shape) for name in "abc"}
    tables = [
        ShardTable.build([ShardRow(metas["a"], Box.whole(shape), 0, 2), ShardRow(metas["b"], Box.whole(shape), 0, 2)]),
        ShardTable.build([ShardRow(metas["a"], Box.whole(shape), 2, 4), ShardRow(metas["c"], Box.whole(shape), 2, 4)]),
        ShardTable.build([ShardRow(metas["c"], Box.whole(shape), 0, 2), ShardRow(metas["b"], Box.whole(shape), 2, 4)]),
    ]
    division = divided(tables)
    assert division.layout.leader.tolist() == [0, 1, 2]
    assert all(np.all(count == 1) for count in counts(division, tables).values())


def test_states_of_different_item_sizes_are_aligned():
    shape = (7, 3)
    metas = [
        TensorMeta("optimizer", f"state.w.{name}", dtype, size, shape)
        for name, dtype, size in (
            ("exp_avg", "bfloat16", 2),
            ("master", "float32", 4),
            ("mask", "bool", 1),
            ("count", "int64", 8),
        )
    ]
    tables = [ShardTable.build([ShardRow(m, Box.whole(shape), a, b) for m in metas]) for a, b in ((0, 5), (5, 21))]
    layout = divided(tables).layout
    assert len(np.unique(layout.leader)) == 1
    for row in range(4):
        assert np.all(layout.file_planes[:, layout.plane[row]] % layout.tensors.itemsize[row] == 0)
    assert layout.file_nbytes.tolist() == [5 * 15, 16 * 15]


@settings(max_examples=60)
@given(
    st.builds(
        Job,
        tp=st.sampled_from([1, 2, 4]),
        dp=st.integers(1, 5),
        bucket=st.none() | st.integers(1, 800),
        layers=st.integers(1, 3),
        states=st.sampled_from([("a",), STATES]),
        empty_rows=st.booleans(),
    ),
    st.sampled_from(["split", "worst-fit"]),
)
def test_any_such_job_is_divided_exactly(job, balance):
    tables = job.tables()
    division = divided(tables, balance=balance)
    assert all(np.all(count == 1) for count in counts(division, tables).values())
    total = sum(math.prod(shape) for _, shape, _ in job.params) * (2 + 4 * len(job.states))
    assert division.layout.file_nbytes.sum() == total
