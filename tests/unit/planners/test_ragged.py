from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planning import assembled, names, saved_by
from ragged import (
    CrashedError,
    Mesh,
    RaggedDTensor,
    RaggedShard,
    Shard,
    StridedRaggedShard,
    cut,
    ragged,
)
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from bcp.errors import StateError
from bcp.plan.box import flat_boxes
from bcp.planners import VeScalePlanner, planner
from bcp.state.dtensor import is_ragged
from bcp.state.hooks import ragged_placement

VESCALE = VeScalePlanner()


@pytest.mark.parametrize(
    "ask",
    [str, repr, hash, lambda p: p == p, lambda p: p.is_shard(), lambda p: isinstance(p, Replicate)],  # noqa: PLR0124
)
def test_the_stand_in_crashes_where_veScales_placement_does(ask):  # noqa: N802 -- its name
    with pytest.raises(CrashedError):
        ask(RaggedShard((0,), (1, 1)))


# -- layouts of veScale's own tests, and the blocks of every rank, by hand --------------------------

ONE, TWO = (4,), (2, 2)
LAYOUTS = [
    (
        ((2, 64), ONE, lambda: [RaggedShard((0, 1), (21, 21, 22, 64))]),
        [[((0, 0), (1, 21))], [((0, 21), (1, 21))], [((0, 42), (1, 22))], [((1, 0), (1, 64))]],
    ),
    (
        ((5, 3, 6, 7), ONE, lambda: [RaggedShard((0, 1), (3, 7, 4, 1))]),
        [
            [((0, 0, 0, 0), (1, 3, 6, 7))],
            [((1, 0, 0, 0), (2, 3, 6, 7)), ((3, 0, 0, 0), (1, 1, 6, 7))],
            [((3, 1, 0, 0), (1, 2, 6, 7)), ((4, 0, 0, 0), (1, 2, 6, 7))],
            [((4, 2, 0, 0), (1, 1, 6, 7))],
        ],
    ),
    (
        ((5, 3, 6, 7), ONE, lambda: [RaggedShard((0, 1, 2, 3), (17, 13, 31, 2))]),
        [
            [((0, 0, 0, 0), (1, 3, 6, 7)), ((1, 0, 0, 0), (1, 1, 6, 7)), ((1, 1, 0, 0), (1, 1, 1, 2))],
            [
                *[((1, 1, 0, 2), (1, 1, 1, 5)), ((1, 1, 1, 0), (1, 1, 5, 7)), ((1, 2, 0, 0), (1, 1, 6, 7))],
                *[((2, 0, 0, 0), (1, 1, 6, 7)), ((2, 1, 0, 0), (1, 1, 1, 6))],
            ],
            [
                *[((2, 1, 0, 6), (1, 1, 1, 1)), ((2, 1, 1, 0), (1, 1, 5, 7)), ((2, 2, 0, 0), (1, 1, 6, 7))],
                *[((3, 0, 0, 0), (1, 3, 6, 7)), ((4, 0, 0, 0), (1, 2, 6, 7)), ((4, 2, 0, 0), (1, 1, 3, 7))],
                ((4, 2, 3, 0), (1, 1, 1, 1)),
            ],
            [((4, 2, 3, 1), (1, 1, 1, 6)), ((4, 2, 4, 0), (1, 1, 2, 7))],
        ],
    ),
    (
        ((6, 8), ONE, lambda: [RaggedShard((0,), (1, 3, 0, 2))]),
        [[((0, 0), (1, 8))], [((1, 0), (3, 8))], [], [((4, 0), (2, 8))]],
    ),
    (
        ((2, 64), ONE, lambda: [RaggedShard((), (0, 1, 0, 0))]),
        [[], [((0, 0), (2, 64))], [], []],
    ),
    (
        ((6, 8), TWO, lambda: [RaggedShard((0,), (1, 2)), TorchShard(1)]),
        [[((0, 0), (2, 4))], [((0, 4), (2, 4))], [((2, 0), (4, 4))], [((2, 4), (4, 4))]],
    ),
    (
        ((8, 6), TWO, lambda: [RaggedShard((0, 1), (5, 7)), Shard(0)]),
        [
            [((0, 0), (1, 6)), ((1, 0), (1, 4))],
            [((4, 0), (1, 6)), ((5, 0), (1, 4))],
            [((1, 4), (1, 2)), ((2, 0), (2, 6))],
            [((5, 4), (1, 2)), ((6, 0), (2, 6))],
        ],
    ),
    (
        ((8, 6), TWO, lambda: [StridedRaggedShard((0, 1), (5, 7), 2), TorchShard(0)]),  # as without a factor
        [
            [((0, 0), (1, 6)), ((1, 0), (1, 4))],
            [((4, 0), (1, 6)), ((5, 0), (1, 4))],
            [((1, 4), (1, 2)), ((2, 0), (2, 6))],
            [((5, 4), (1, 2)), ((6, 0), (2, 6))],
        ],
    ),
    (
        ((6, 4), TWO, lambda: [StridedRaggedShard((0,), (1, 2), 1), Replicate()]),
        [[((0, 0), (2, 4))], [((0, 0), (2, 4))], [((2, 0), (4, 4))], [((2, 0), (4, 4))]],
    ),
    (
        ((6, 4), TWO, lambda: [RaggedShard((0, 1), (1, 5)), Replicate()]),
        [[((0, 0), (1, 4))], [((0, 0), (1, 4))], [((1, 0), (5, 4))], [((1, 0), (5, 4))]],
    ),
]


def on_every_rank(shape, mesh, placements):
    """The tensor of 0, 1, 2 ... as every rank of the mesh has it."""
    whole = torch.arange(float(math.prod(shape))).view(shape)
    coordinates = product(*(range(parts) for parts in mesh))
    return [ragged(whole, Mesh(mesh, coordinate), placements()) for coordinate in coordinates]


def elements(shape, boxes):
    """The flat positions of boxes in a tensor of that shape."""
    whole = torch.arange(math.prod(shape)).view(shape)
    cut_out = [
        whole[tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))] for offsets, lengths in boxes
    ]
    return [index for part in cut_out for index in part.flatten().tolist()]


@pytest.mark.parametrize(("layout", "expected"), LAYOUTS)
def test_every_rank_has_the_blocks_that_it_should(layout, expected):
    for tensor, boxes in zip(on_every_rank(*layout), expected, strict=True):
        placement = ragged_placement(tensor, "t")
        (span,) = placement.spans
        assert placement.local == tuple(tensor._local_tensor.shape)
        assert span.stop - span.start == sum(math.prod(lengths) for _, lengths in boxes)
        inside = [box for _, box in flat_boxes(span.box.lengths, span.start, span.stop)]
        moved = [(tuple(map(sum, zip(span.box.offsets, box.offsets, strict=True))), box.lengths) for box in inside]
        assert sorted(elements(layout[0], moved)) == sorted(elements(layout[0], boxes))
        assert elements(layout[0], moved) == tensor._local_tensor.int().tolist()


@st.composite
def layouts(draw):
    """A shape, a mesh of up to three dimensions, and placements of which one is ragged, with units that fit."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    at = draw(st.integers(0, len(mesh) - 1))
    dims = range(len(shape))
    others = [draw(st.sampled_from(["R", *dims])) if index != at else "ragged" for index in range(len(mesh))]
    left = {}  # numel of every block that is cut: units have to fit all of them
    for coordinate in product(*map(range, mesh)):
        part = torch.zeros(shape)
        for index, other in enumerate(others):
            if other in dims:
                parts = part.chunk(mesh[index], other)
                part = parts[coordinate[index]] if coordinate[index] < len(parts) else parts[0].narrow(other, 0, 0)
        left[part.numel()] = True
    most = math.gcd(*left)
    total = draw(st.sampled_from([n for n in range(1, most + 1) if most % n == 0]))
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=mesh[at] - 1, max_size=mesh[at] - 1)))
    units = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]

    def placements():
        made = [Replicate() if other == "R" else TorchShard(other) if other != "ragged" else None for other in others]
        made[at] = RaggedShard(tuple(dims), units)
        return made

    return shape, mesh, placements


@given(layouts())
def test_ranks_cover_every_element_and_replicas_agree(layout):
    whole = torch.arange(float(math.prod(layout[0]))).view(layout[0])
    parts = []
    for tensor in on_every_rank(*layout):
        shards = VESCALE.local_shards({"model": {"t": tensor}})
        for row, view in enumerate(shards.tensors):
            assert view.numel() == 0 or view.untyped_storage().data_ptr() == _storage(tensor)
            meta, box = shards.table.meta(row), shards.table.box(row)
            start, stop = int(shards.table.start[row]), int(shards.table.stop[row])
            flat = view.reshape(-1)
            for position, inner in flat_boxes(box.lengths, start, stop):
                at = tuple(map(sum, zip(box.offsets, inner.offsets, strict=True)))
                values = flat[position - start :][: inner.numel].view(inner.lengths)
                parts.append((meta, at, inner.lengths, values))
    assert torch.equal(assembled(parts)["model", "t"], whole)


def _storage(tensor):
    return tensor._local_tensor.untyped_storage().data_ptr()


# -- what cannot be read ---------------------------------------------------------------------------


def on_rank(*placements: object, shape=(6, 4), mesh=(2,), coordinate=(0,), local=None):
    fake = Mesh(mesh, coordinate)
    if local is None:
        local = cut(torch.zeros(shape), fake, placements)
    return RaggedDTensor(local, shape, fake, placements)


REFUSED = {
    r"_StridedRaggedShard\(dims=\(0,\), local_units=\(1, 1\)\) has split_factor=2, .*with split_factor=1": lambda: (
        on_rank(StridedRaggedShard((0,), (1, 1), 2))
    ),
    r"has split_factor=3, but Shard\(0\) of the later mesh dimensions makes 2 parts": lambda: on_rank(
        StridedRaggedShard((0,), (1, 2), 3), TorchShard(0), mesh=(2, 2), coordinate=(0, 0)
    ),
    r"has split_factor=2, but Shard\(0\) .*makes 1 parts": lambda: on_rank(  # columns are no rows
        StridedRaggedShard((0,), (1, 2), 2), TorchShard(1), mesh=(2, 2), coordinate=(0, 0)
    ),
    "has split_factor=2, .*make it with split_factor=1": lambda: on_rank(  # Shard(0) stands before it
        TorchShard(0), StridedRaggedShard((0,), (1, 2), 2), mesh=(2, 2), coordinate=(0, 0)
    ),
    "more than one ragged placement": lambda: on_rank(
        RaggedShard((0,), (1, 1)), RaggedShard((0,), (1, 1)), mesh=(2, 2), coordinate=(0, 0)
    ),
    r"dims=\(1,\), .*must be its first ones": lambda: on_rank(RaggedShard((1,), (1, 1))),
    r"dims=\(0, 1, 2\), .*must be its first ones": lambda: on_rank(RaggedShard((0, 1, 2), (1, 1))),
    r"local_units=\(1, 1, 1\)\): needs 2 units": lambda: on_rank(RaggedShard((0,), (1, 1, 1)), local=torch.zeros(8)),
    r"local_units=\(0, 0\)\): needs 2 units": lambda: on_rank(RaggedShard((0,), (0, 0)), local=torch.zeros(0)),
    r"local_units=\(-1, 2\)\): needs 2 units": lambda: on_rank(RaggedShard((0,), (-1, 2)), local=torch.zeros(0)),
    "24 elements cannot be cut into 7 equal units": lambda: on_rank(RaggedShard((0,), (3, 4))),
    r"gives this rank 8 elements of the 24 .*has the shape \(9,\)": lambda: on_rank(
        RaggedShard((0,), (1, 2)), local=torch.zeros(9)
    ),
    r"strides \(2,\); it must be contiguous": lambda: on_rank(RaggedShard((0,), (1, 2)), local=torch.zeros(16)[::2]),
    "Partial.*redistribute it": lambda: on_rank(
        RaggedShard((0,), (1, 2)), Partial(), mesh=(2, 2), coordinate=(0, 0), local=torch.zeros(8)
    ),
    "cuts 2 blocks at once": lambda: on_rank(
        RaggedShard((0,), (1, 1)),
        _StridedShard(0, split_factor=2),
        shape=(8, 4),
        mesh=(2, 2),
        coordinate=(0, 0),
        local=torch.zeros(8),
    ),
    "on the meta device": lambda: on_rank(RaggedShard((0,), (1, 1)), local=torch.zeros(12, device="meta")),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_name_the_tensor_the_rank_and_the_fields(message):
    for method in (VESCALE.local_shards, lambda states: VESCALE.load_targets(states, saved_by())):
        with pytest.raises(StateError, match=rf"model tensor 'layer\.w' on rank 0.*{message}"):
            method({"model": {"layer": {"w": REFUSED[message]()}}})


# -- planning --------------------------------------------------------------------------------------


def test_ranks_without_elements_state_the_same_block():
    for tensor in on_every_rank(*LAYOUTS[3][0]):
        table = VESCALE.local_shards({"model": {"t": tensor}}).table
        assert (table.offset.tolist(), table.length.tolist()) == ([[0, 0]], [[6, 8]])
        assert table.tensors[0].shape == (6, 8)


def test_a_rank_outside_of_the_mesh_has_nothing():
    tensor = on_rank(RaggedShard((0,), (1, 1)), coordinate=None, local=torch.zeros(0))
    assert len(VESCALE.local_shards({"model": {"t": tensor}}).tensors) == 0


def test_local_tensors_of_more_dimensions_are_read_in_place():
    local = torch.arange(8.0).view(2, 4)
    tensor = on_rank(RaggedShard((0,), (1, 2)), local=local)
    (view,) = VESCALE.load_targets({"model": {"t": tensor}}, saved_by()).shards.tensors
    assert view.tolist() == list(range(8))
    view.fill_(5)
    assert local.eq(5).all()


def test_ragged_tensors_are_found_wherever_they_are():
    net = nn.Linear(4, 6, bias=False)
    net.weight = nn.Parameter(on_rank(RaggedShard((0,), (1, 2))))
    for states in ({"model": net}, {"model": [net]}, {"model": net.state_dict()}, {"optimizer": net.state_dict()}):
        assert planner(None, states).name == "vescale"
    assert planner(None, {"model": nn.Linear(1, 1)}).name == "plain"
    assert not is_ragged(SimpleNamespace(placements=[RaggedShard((0,), (1, 2))]))
    assert "RaggedShard" not in VESCALE.probe()


def test_tied_parameters_are_one():
    net = nn.Module()
    net.tok, net.head = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
    net.tok.weight = net.head.weight = nn.Parameter(on_rank(RaggedShard((0,), (1, 2))))
    for states in ({"model": net}, {"model": net.state_dict()}):
        shards = VESCALE.local_shards(states)
        assert names(shards) == {"head.weight": "", "tok.weight": "head.weight"}
        assert len(shards.tensors) == 1


def ragged_net(units, fill_with=1.0):
    net = nn.Linear(4, 6, bias=False)
    net.weight = nn.Parameter(on_rank(RaggedShard((0,), units)))
    with torch.no_grad():
        net.weight._local_tensor.fill_(fill_with)
    return net


def stepped(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    net.weight.grad = torch.ones_like(net.weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("plain", [False, True])
def test_states_lie_where_the_parameter_does(plain):
    net = ragged_net((1, 2))
    optimizer = stepped(net)
    if plain:
        optimizer.state[net.weight] = {
            name: getattr(value, "_local_tensor", value) for name, value in optimizer.state[net.weight].items()
        }
    shards = VESCALE.local_shards({"model": net, "optimizer": optimizer})
    for row in range(len(shards.tensors)):
        meta = shards.table.meta(row)
        if meta.fqn != "state.weight.step":
            assert (meta.shape, int(shards.table.start[row]), int(shards.table.stop[row])) == ((6, 4), 0, 8)


def test_states_of_another_layout_say_so_themselves():
    net = nn.Module()
    net.weight = nn.Parameter(on_rank(RaggedShard((0,), (1, 1, 1)), mesh=(3,), coordinate=(1,)))
    optimizer = stepped(net)
    other = on_rank(RaggedShard((0,), (0, 1, 2)), mesh=(3,), coordinate=(1,))
    optimizer.state[net.weight]["exp_avg"] = other
    table = VESCALE.local_shards({"model": net, "optimizer": optimizer}).table
    starts = {table.meta(row).fqn: int(table.start[row]) for row in range(len(table))}
    assert starts == {"weight": 8, "state.weight.exp_avg": 0, "state.weight.exp_avg_sq": 8, "state.weight.step": 0}


def test_states_that_do_not_exist_yet_are_made_like_the_parameter():
    net = ragged_net((1, 2))
    optimizer = stepped(net)
    saved = saved_by(VESCALE.local_shards({"model": net, "optimizer": optimizer}))
    whole = {
        ("model", "weight"): torch.full((6, 4), 3.0),
        ("optimizer", "state.weight.step"): torch.tensor(7.0),
        ("optimizer", "state.weight.exp_avg"): torch.arange(24.0).view(6, 4),
        ("optimizer", "state.weight.exp_avg_sq"): torch.full((6, 4), 2.0),
    }
    target = ragged_net((2, 1), fill_with=0.0)
    fresh = torch.optim.AdamW(target.parameters(), lr=0.5)
    targets = VESCALE.load_targets({"model": target, "optimizer": fresh}, saved)
    assert target.weight._local_tensor.eq(0).all()
    filled = {name: value.reshape(-1) if value.dim() else value for name, value in whole.items()}
    for row, view in enumerate(targets.shards.tensors):
        table = targets.shards.table
        values = filled[table.meta(row).kind, table.meta(row).fqn]
        view.copy_(values[int(table.start[row]) : int(table.stop[row])] if values.dim() else values)
    targets.finish({("optimizer", "param_groups.weight.lr"): 0.25})
    state = fresh.state[target.weight]
    assert is_ragged(state["exp_avg"])
    assert state["exp_avg"]._local_tensor.tolist() == list(range(16))
    assert (state["step"].item(), fresh.param_groups[0]["lr"]) == (7.0, 0.25)
    assert target.weight._local_tensor.eq(3).all()


def test_states_of_another_shape_are_refused():
    net = ragged_net((1, 2))
    optimizer = stepped(net)
    optimizer.state[net.weight]["exp_avg"] = torch.zeros(3)
    with pytest.raises(StateError, match=r"the state 'exp_avg' of 'weight' has the shape \[3\], its parameter \[8\]"):
        VESCALE.local_shards({"model": net, "optimizer": optimizer})
