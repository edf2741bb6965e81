"""Forms of leaves that say themselves what of them is here, or of which a planner does: found again, and told apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.testing._internal.distributed.fake_pg
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch.distributed import HashStore
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bcp.errors import StateError
from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.plan.write.survey import digest
from bcp.planners import Fsdp2Planner
from bcp.protocols import LocalShards
from bcp.state import shard_table as stock
from bcp.state import tensor_specs as forms
from bcp.state.inventory import Leaves
from bcp.state.placement import LocalInterval, Placement, ShardedLeaf
from bcp.state.shard_table import TableRows
from bcp.state.tensor_specs import TensorSpec, firsts_of

FSDP2 = Fsdp2Planner()


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_stocks", [])
    monkeypatch.setattr(forms, "_forms", {})


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two by two ranks, of which this is the second."""
    dist.init_process_group("fake", rank=1, world_size=4, store=HashStore())
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    finally:
        dist.destroy_process_group()


def dtensor(local: torch.Tensor, mesh: DeviceMesh, *placements: object, shape: tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def found(state: dict[str, object]) -> LocalShards:
    """What is found now, checked against what is found without remembering anything."""
    shards = FSDP2.local_shards({"model": state})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock, "_stocks", [])
        patch.setattr(forms, "_forms", {})
        right = FSDP2.local_shards({"model": state})
    assert digest(shards.table) == digest(right.table)
    assert [(t.data_ptr(), t.shape, t.stride()) for t in shards.tensors] == [
        (t.data_ptr(), t.shape, t.stride()) for t in right.tensors
    ]
    return shards


def boxes(shards: LocalShards) -> list[Box]:
    return [shards.table.box(row) for row in range(len(shards.table))]


# -- DTensors -----------------------------------------------------------------------------------------


def test_dtensors_of_one_form_are_worked_out_once(mesh, monkeypatch):
    worked_out = []
    real = forms._inspect_closely
    monkeypatch.setattr(forms, "_inspect_closely", lambda *given: worked_out.append(given[0]) or real(*given))
    many = {f"w{i}": dtensor(torch.zeros(4, 3), mesh, Replicate(), Shard(0), shape=(8, 3)) for i in range(20)}
    first = FSDP2.local_shards({"model": many})
    assert len(worked_out) == 1
    assert FSDP2.local_shards({"model": many}).table is first.table
    assert len(worked_out) == 1
    assert boxes(first) == [Box((4, 0), (4, 3))] * 20


def test_a_local_tensor_that_was_swapped_is_seen(mesh):
    state = {"w": dtensor(torch.zeros(4, 3), mesh, Replicate(), Shard(0), shape=(8, 3))}
    first = found(state)
    state["w"]._local_tensor = torch.ones(4, 3)
    second = found(state)
    assert second.table is first.table
    assert second.tensors[0].eq(1).all()
    state["w"]._local_tensor = torch.ones(2, 3)
    with pytest.raises(StateError, match=r"give this rank \(4, 3\), but its local tensor is \(2, 3\)"):
        FSDP2.local_shards({"model": state})


OTHERWISE = {
    "other dimension": lambda mesh: dtensor(torch.zeros(4, 4), mesh["a"], Shard(1), shape=(4, 8)),
    "other shape": lambda mesh: dtensor(torch.zeros(4, 4), mesh["a"], Shard(0), shape=(7, 4)),
    "other place in the mesh": lambda mesh: dtensor(torch.zeros(4, 4), mesh["b"], Shard(0), shape=(8, 4)),
    "more dimensions of the mesh": lambda mesh: dtensor(torch.zeros(4, 2), mesh, Shard(0), Shard(1), shape=(8, 4)),
    "replicated": lambda mesh: dtensor(torch.zeros(4, 4), mesh["a"], Replicate(), shape=(4, 4)),
    "no placement": lambda _: torch.zeros(4, 4),
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_what_lies_otherwise_is_told_apart(mesh, how):
    usual = dtensor(torch.zeros(4, 4), mesh["a"], Shard(0), shape=(8, 4))
    before = found({"w": usual})
    after = found({"w": OTHERWISE[how](mesh)})
    assert after.table is not before.table
    assert digest(after.table) != digest(before.table)
    assert found({"w": usual}).table is before.table


def test_strided_shards_are_told_from_plain_ones_and_from_each_other(mesh):
    def strided(factor: int) -> DTensor:
        made = dtensor(torch.zeros(4, 2), mesh, Shard(0), Replicate(), shape=(8, 2))
        placements = (_StridedShard(0, split_factor=factor), Replicate())
        order = {"shard_order": None} if hasattr(made._spec, "shard_order") else {}  # torch 2.6 states no order
        made._spec = replace(made._spec, placements=placements, **order)
        return made

    plain = dtensor(torch.zeros(4, 2), mesh, Shard(0), Replicate(), shape=(8, 2))
    for _ in range(2):
        assert boxes(found({"w": plain})) == [Box((0, 0), (4, 2))]
        assert boxes(found({"w": strided(2)})) == [Box((0, 0), (2, 2)), Box((4, 0), (2, 2))]
        assert boxes(found({"w": strided(4)})) == [Box((row, 0), (1, 2)) for row in (0, 2, 4, 6)]


def test_a_pending_reduction_is_refused_although_its_like_was_saved(mesh):
    state = {"w": dtensor(torch.zeros(4, 2), mesh, Replicate(), Replicate(), shape=(4, 2))}
    found(state)
    state["w"] = dtensor(torch.zeros(4, 2), mesh, Partial(), Replicate(), shape=(4, 2))
    for _ in range(2):
        with pytest.raises(StateError, match="'w' on rank 1 has the placement Partial"):
            FSDP2.local_shards({"model": state})


def test_blocks_that_a_local_tensor_states_are_asked_for_each_time(mesh):
    state = {"w": dtensor(torch.zeros(4, 3), mesh, Replicate(), Shard(0), shape=(8, 3))}
    assert boxes(found(state)) == [Box((4, 0), (4, 3))]
    stated = {"at": 0}
    state["w"]._local_tensor.__create_chunk_list__ = lambda: [
        ChunkStorageMetadata(torch.Size((stated["at"], 0)), torch.Size((4, 3)))
    ]
    assert boxes(found(state)) == [Box((0, 0), (4, 3))]
    stated["at"] = 2
    assert boxes(found(state)) == [Box((2, 0), (4, 3))]


# -- leaves that a planner has placed -----------------------------------------------------------------


def held(*leaves: ShardedLeaf) -> LocalShards:
    taken = Leaves()
    taken.add_all("model", ((f"w{number}", leaf) for number, leaf in enumerate(leaves)))
    return taken.to_save()


def test_equal_placements_give_the_same_table_and_others_another():
    memory = torch.arange(20.0)

    def leaf(start: int, at: int) -> ShardedLeaf:
        return ShardedLeaf(memory, Placement((3, 4), (20,), (LocalInterval(Box.whole((3, 4)), start, start + 4, at),)))

    first = held(leaf(0, 2), leaf(4, 6))
    again = held(leaf(0, 12), leaf(4, 16))
    assert again.table is first.table
    assert [view.tolist() for view in again.tensors] == [[12, 13, 14, 15], [16, 17, 18, 19]]
    assert held(leaf(0, 2), leaf(5, 6)).table is not first.table


def test_of_one_placement_several_tensors_may_be_of_several_forms():
    placement = Placement((2, 2), (4,), (LocalInterval.whole(Box.whole((2, 2))),))
    shards = held(ShardedLeaf(torch.zeros(4), placement), ShardedLeaf(torch.zeros(4, dtype=torch.float64), placement))
    assert shards.table.tensors.dtype == ["float32", "float64"]
    with pytest.raises(StateError, match=r"placement is of a local tensor of shape \[4\], but that is \[3\]"):
        held(ShardedLeaf(torch.zeros(4), placement), ShardedLeaf(torch.zeros(3), placement))
    with pytest.raises(StateError, match="not contiguous"):
        held(ShardedLeaf(torch.zeros(4), placement), ShardedLeaf(torch.zeros(8)[::2], placement))


# -- tables -------------------------------------------------------------------------------------------


@st.composite
def made_up(draw: st.DrawFn) -> tuple[list[tuple[str, str]], list[TensorSpec], list[list[int]]]:
    kinds = st.sampled_from(["model", "optimizer"])
    names = draw(st.lists(st.tuples(kinds, st.text("abc.", min_size=1, max_size=4)), unique=True, max_size=8))
    few = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        whole = Box.whole(shape)
        spans = tuple(
            LocalInterval(whole, *sorted(draw(st.tuples(*[st.integers(0, whole.numel)] * 2)))) for _ in range(2)
        )
        dtype = draw(st.sampled_from([torch.float32, torch.int8]))
        some = spans[: draw(st.integers(0, 2))]
        asks, tracks = draw(st.booleans()), draw(st.booleans())
        few.append(TensorSpec(dtype, shape, shape, "cpu", asks, tracks, some, whole=False, plain=False))
    tied = draw(st.lists(st.integers(0, max(len(names) - 1, 0)), unique=True, max_size=3))
    ties = [
        group
        for kind in ("model", "optimizer")
        if len(group := [n for n in tied if n < len(names) and names[n][0] == kind]) > 1
    ]
    return names, [draw(st.sampled_from(few)) for _ in names], ties


@given(made_up())
def test_tables_are_what_records_would_make(given_):
    names, seen, ties = given_
    firsts = firsts_of(ties, names)
    rows = TableRows.of(names, seen, firsts, {})
    table = rows.table([])
    metas = [
        TensorMeta(
            *name,
            str(form.dtype).removeprefix("torch."),
            form.dtype.itemsize,
            form.shape,
            form.stride,
            form.device,
            form.requires_grad,
            names[firsts[number]][1] if number in firsts else "",
        )
        for number, (name, form) in enumerate(zip(names, seen, strict=True))
    ]
    records = [
        ShardRow(metas[number], span.box, span.start, span.stop)
        for number in range(len(names))
        if number not in firsts
        for span in seen[number].spans
    ]
    assert rows.stored == [number for number in range(len(names)) if number not in firsts and seen[number].spans]
    right = ShardTable.build(records)
    assert len(table) == len(right)
    for row in range(len(right)):
        assert table.meta(row) == right.meta(row)
        assert table.box(row) == right.box(row)
        assert (table.start[row], table.stop[row]) == (right.start[row], right.stop[row])
    known = [table.tensors[row] for row in range(len(table.tensors))]
    shown = [m for n, m in enumerate(metas) if n in firsts or seen[n].spans or 0 in m.shape]
    assert known == shown
