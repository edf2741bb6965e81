from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import mesh_of
from planning import Name, assembled, fill, names, pieces, saved_by
from samples import sample
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from bcp.errors import StateError
from bcp.planners import Fsdp2Planner, planner
from bcp.protocols import LocalShards
from bcp.state.dtensor import DimensionCut, _order, chunk, decoded, runs_of, stated_orders

FSDP2 = Fsdp2Planner()
dist_test = pytest.mark.dist


# -- the arithmetic, without processes -------------------------------------------------------------


def indices(runs):
    return [index for first, count in runs for index in range(first, first + count)]


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_chunk_is_torch_chunk(length, parts, others):
    runs = [(length * 3, length), (0, others)]
    whole = torch.tensor(indices(runs))
    expected = [part.tolist() for part in torch.chunk(whole, parts)]
    expected += [[]] * (parts - len(expected))
    assert [indices(chunk(runs, parts, mine)) for mine in range(parts)] == expected


@given(st.integers(0, 40), st.integers(1, 5), st.integers(2, 5))
def test_fsdp2_after_tp_is_exact_for_every_size(length, dp, tp):
    after_tp = [list(part) for part in torch.arange(length).chunk(tp)] if length else []
    for row in range(dp):
        for column in range(tp):
            local = torch.tensor(after_tp[column]) if column < len(after_tp) else torch.zeros(0)
            parts = local.chunk(dp)
            expected = parts[row].tolist() if row < len(parts) else []
            cuts = [DimensionCut(dp, row, tp), DimensionCut(tp, column)]
            assert indices(runs_of(length, cuts, decoded(cuts))) == expected


@given(st.integers(1, 40), st.integers(1, 5), st.integers(2, 4))
def test_lone_strided_shards_are_as_torch_splits_them(length, parts, factor):
    placement = _StridedShard(0, split_factor=factor)
    expected, _ = placement._split_tensor(torch.arange(length), parts, with_padding=False, contiguous=True)
    got = [runs_of(length, [DimensionCut(parts, mine, factor)], None) for mine in range(parts)]
    assert [indices(runs) for runs in got] == [part.tolist() for part in expected]
    assert all(sum(a) != b[0] for runs in got for a, b in pairwise(runs))  # merged


def test_a_stated_shard_order_counts():
    entry = SimpleNamespace(tensor_dim=0, mesh_dims=(1, 0))
    spec = SimpleNamespace(shard_order=(entry,))
    orders = stated_orders(SimpleNamespace(_spec=spec, placements=(Shard(0), Shard(0))))
    assert _order(orders, 0, [0, 1]) == (1, 0)
    assert _order(orders, 1, [0]) == ()
    assert stated_orders(SimpleNamespace(_spec=SimpleNamespace(), placements=())) == ()
    strided = (_StridedShard(0, split_factor=2), Shard(0))  # torch 2.10 states the order that the factors say, too
    assert stated_orders(SimpleNamespace(_spec=spec, placements=strided)) == ()
    spec.use_strided_shard_as_shard_order = False
    assert stated_orders(SimpleNamespace(_spec=spec, placements=strided)) == orders


# -- on four ranks ---------------------------------------------------------------------------------


def gathered(shards):
    """All ranks' pieces, put together; checks cover and replicas."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces(shards))
    return assembled(piece for rank in everyone for piece in rank)


def layout_of_all(shards):
    """The layout of all ranks' shards."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, shards.table)
    return saved_by(*(LocalShards(table, []) for table in everyone))


def quietly(method, *args: object):
    """Call a planner's method; it must not communicate."""
    with CommDebugMode() as comm:
        result = method(*args)
    assert comm.get_total_counts() == 0
    return result


LAYOUTS = [
    ((4,), lambda: [Shard(0)]),
    ((4,), lambda: [Shard(1)]),
    ((4,), lambda: [Shard(-1)]),
    ((2, 2), lambda: [Shard(0), Shard(0)]),
    ((2, 2), lambda: [Shard(0), Shard(1)]),
    ((2, 2), lambda: [Replicate(), Shard(0)]),
    ((2, 2), lambda: [Shard(1), Replicate()]),
    ((2, 2), lambda: [Replicate(), Replicate()]),
    ((2, 2), lambda: [_StridedShard(0, split_factor=2), Replicate()]),
    ((2, 2), lambda: [Shard(0), _StridedShard(0, split_factor=2)]),
    ((2, 2), lambda: [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]),
    ((2, 2), lambda: [_StridedShard(1, split_factor=2), Shard(1)]),
]


def boxes_are_right(mesh_shape, sizes, layout):
    """Count the boxes of this rank, after comparing every element with what it must be."""
    placements = LAYOUTS[layout][1]()
    mesh = mesh_of(mesh_shape)
    counts = []
    for rows, columns in sizes:
        whole = torch.arange(float(rows * columns)).view(rows, columns)
        tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        shards = quietly(FSDP2.local_shards, {"model": {"t": tensor}})
        assert torch.equal(gathered(shards)["model", "t"], whole), (rows, columns)
        assert sum(map(torch.Tensor.numel, shards.tensors)) == tensor._local_tensor.numel()
        memory = tensor._local_tensor.untyped_storage().data_ptr()
        assert all(view.untyped_storage().data_ptr() == memory for view in shards.tensors)
        counts.append(len(shards.tensors))
    return counts


@dist_test
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_boxes_hold_what_they_say(ranks4, layout):
    uneven = [(8, 12), (5, 7), (9, 3), (13, 2), (1, 9), (3, 1)]
    strided_and_sharded = layout == len(LAYOUTS) - 1
    sizes = [(3, 8), (2, 12)] if strided_and_sharded else uneven  # uneven, only FSDP2 itself makes this layout
    ranks4.run(boxes_are_right, LAYOUTS[layout][0], sizes, layout)


def odd_dtensors():
    mesh = mesh_of((4,))
    half = DeviceMesh("cpu", [0, 1])
    outside = dist.get_rank() > 1
    scalar = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
    state = {
        "empty": distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)]),
        "half": distribute_tensor(torch.arange(4.0), half, [Shard(0)]),
        "scalar": scalar,
        "strides": distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [Shard(1)]).t(),
    }
    shards = quietly(FSDP2.local_shards, {"model": state})
    table = shards.table.tensors
    assert table[table.fqn.index("empty")].shape == (0, 3)
    assert table[table.fqn.index("strides")].stride == state["strides"].stride()
    assert ("half" in table.fqn) is not outside
    whole = gathered(shards)
    assert {fqn: value.tolist() for (_, fqn), value in whole.items()} == {
        "half": [0.0, 1.0, 2.0, 3.0],
        "scalar": 3.0,
        "strides": torch.arange(8.0).view(2, 4).t().tolist(),
    }
    for bad, message in (
        (DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False), "Partial.*redistribute it"),
        (DTensor.from_local(torch.ones(()), mesh, [Partial()], run_check=False), "Partial.*redistribute it"),
        (
            DTensor.from_local(
                torch.ones(dist.get_rank()), mesh, [Shard(0)], run_check=False, shape=(20,), stride=(1,)
            ),
            r"its local tensor is \(\d,\); build it with distribute_tensor",
        ),
        (distribute_tensor(torch.empty(4, device="meta"), mesh, [Shard(0)]), "on the meta device"),
    ):
        with pytest.raises(StateError, match=rf"model tensor 'b' on rank {dist.get_rank()}.*{message}"):
            FSDP2.local_shards({"model": {"b": bad}})


@dist_test
def test_odd_dtensors(ranks4):
    ranks4.run(odd_dtensors)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, 14), nn.Linear(14, 10, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 10), Block(), Block(), nn.Linear(10, 3))


def sharded(how, model):
    """Shard a model in one of the ways."""
    if how == "tp_fsdp2":
        mesh = mesh_of((2, 2), ("dp", "tp"))
        for block in (model[1], model[2]):
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["dp"]
    elif how == "hsdp":
        mesh = mesh_of((2, 2), ("replicate", "shard"))
    else:
        mesh = mesh_of((4,), ("dp",))
    place = {"shard_placement_fn": lambda p: Shard(p.ndim - 1 if p.shape[-1] % 4 == 0 else 0)} if how == "dim1" else {}
    for block in (model[1], model[2]):
        fully_shard(block, mesh=mesh, **place)
    return fully_shard(model, mesh=mesh, **place)


def train(model, optimizer, steps=2):
    for seed in range(steps):
        torch.manual_seed(100 + seed)
        model(torch.randn(4, 7)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def truth():
    """What training without sharding gives, by (kind, name)."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    whole: dict[Name, torch.Tensor] = {("model", fqn): p.detach() for fqn, p in model.named_parameters()}
    for fqn, parameter in model.named_parameters():
        for name, value in optimizer.state[parameter].items():
            whole["optimizer", f"state.{fqn}.{name}"] = value
    return whole


def fsdp2_saves_and_loads(how, other):
    model = sharded(how, net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    states = {"model": model, "optimizer": optimizer}
    assert planner(None, states).name == "fsdp2"
    shards = quietly(FSDP2.local_shards, states)
    whole, expected = gathered(shards), truth()
    assert whole.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(whole[name], value, rtol=1e-3, atol=1e-5), name

    target = sharded(other, net(seed=5))
    fresh = torch.optim.AdamW(target.parameters(), lr=0.5)
    before = [parameter.to_local().clone() for parameter in target.parameters()]
    layout = layout_of_all(shards)
    targets = quietly(FSDP2.load_targets, {"model": target, "optimizer": fresh}, layout)
    assert all(torch.equal(a, b.to_local()) for a, b in zip(before, target.parameters(), strict=True))
    fill(targets, whole, layout, shards.objects)
    for parameter, state in fresh.state.items():
        assert state["exp_avg"].placements == parameter.placements
        assert state["exp_avg"].device_mesh == parameter.device_mesh
        assert type(state["step"]) is torch.Tensor
    again = gathered(FSDP2.local_shards({"model": target, "optimizer": fresh}))
    assert again.keys() == whole.keys()
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    assert fresh.param_groups[0]["lr"] == 0.01
    train(target, fresh, steps=1)
    return len(shards.tensors)


MOVES = [("fsdp2", "tp_fsdp2"), ("tp_fsdp2", "hsdp"), ("hsdp", "dim1"), ("dim1", "fsdp2")]


@dist_test
@pytest.mark.parametrize(("how", "other"), sample(MOVES, *MOVES[::2]))
def test_fsdp2_saves_what_it_trained_and_loads_it_resharded(ranks4, how, other):
    ranks4.run(fsdp2_saves_and_loads, how, other)


def uneven_tp():
    """The sizes of which torch's own metadata is wrong need more ranks; these need several boxes or none."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    for size in (1, 2, 3, 5, 8, 9):
        model = nn.Linear(3, size, bias=False)
        whole = torch.arange(size * 3.0).view(size, 3)
        with torch.no_grad():
            model.weight.copy_(whole)
        parallelize_module(model, mesh["tp"], ColwiseParallel())
        fully_shard(model, mesh=mesh["dp"])
        shards = quietly(FSDP2.local_shards, {"model": model})
        assert torch.equal(gathered(shards)["model", "weight"], whole), size


@dist_test
def test_uneven_fsdp2_after_tp(ranks4):
    ranks4.run(uneven_tp)


def between_forward_and_backward():
    model = sharded("fsdp2", net())
    loss = model(torch.ones(1, 7)).sum()
    assert not isinstance(model[0].weight, DTensor)  # the root stays gathered for the backward pass
    shards = quietly(FSDP2.local_shards, {"model": model})
    expected = {("model", fqn): p.detach() for fqn, p in net().named_parameters()}
    whole = gathered(shards)
    assert all(torch.equal(whole[name], value) for name, value in expected.items())
    loss.backward()


@dist_test
def test_gathered_parameters_are_saved_as_shards(ranks4):
    ranks4.run(between_forward_and_backward)


def tied_with_empty_shards():
    model = nn.Module()
    model.tok, model.head = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    model.head.weight = model.tok.weight
    fully_shard(model, mesh=mesh_of((4,)))
    for states in ({"model": model}, {"model": model.state_dict()}):
        shards = FSDP2.local_shards(states)
        tied = names(shards)
        assert tied.pop("tok.weight") == "head.weight"
        assert len(shards.tensors) == (0 if dist.get_rank() == 3 else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = FSDP2.local_shards({"model": model, "optimizer": optimizer}).objects
    assert ("optimizer", "param_groups.head.weight.lr") in objects


@dist_test
def test_ranks_with_empty_shards_agree_on_ties(ranks4):
    ranks4.run(tied_with_empty_shards)


def materialised_dtype():
    model = sharded("tp_fsdp2", net().bfloat16())
    source = net()
    optimizer = torch.optim.Adafactor(source.parameters())
    train(source, optimizer, steps=1)
    shards = FSDP2.local_shards({"model": source, "optimizer": optimizer})
    fresh = torch.optim.Adafactor(model.parameters())
    quietly(FSDP2.load_targets, {"model": model, "optimizer": fresh}, saved_by(shards)).finish(shards.objects)
    bias = fresh.state[model[1].up.bias]["variance"]
    assert (bias.dtype, bias.placements) == (torch.float32, model[1].up.bias.placements)
    assert fresh.state[model[1].up.weight]["row_var"].shape == (14, 1)


@dist_test
def test_materialised_dtensors_keep_their_placements_when_the_dtype_changes(ranks4):
    ranks4.run(materialised_dtype)


def ddp():
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    states = {"model": model, "optimizer": optimizer}
    assert planner(None, states).name == "ddp"
    shards = quietly(planner("ddp", states).local_shards, states)
    expected = truth()
    whole = gathered(shards)
    assert whole.keys() == expected.keys()
    assert all(torch.allclose(whole[name], value, rtol=1e-3, atol=1e-5) for name, value in expected.items())
    target = {"model": net(seed=3)}
    fill(FSDP2.load_targets(target, saved_by(shards)), whole, saved_by(shards), shards.objects)
    assert torch.equal(target["model"][0].weight, model.module[0].weight)


@dist_test
def test_ddp(ranks4):
    ranks4.run(ddp)


def zero1():
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 -- its import warns, on some versions

    model = net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(model, optimizer)
    shards = quietly(FSDP2.local_shards, {"model": model, "optimizer": optimizer})
    assert len(names(shards, "optimizer")) < 3 * len(list(model.parameters()))
    expected, whole = truth(), gathered(shards)
    assert whole.keys() == expected.keys()
    assert all(torch.allclose(whole[name], value, rtol=1e-3, atol=1e-5) for name, value in expected.items())

    target = net(seed=3)
    fresh = torch.optim.AdamW(target.parameters())
    layout = layout_of_all(shards)
    fill(FSDP2.load_targets({"model": target, "optimizer": fresh}, layout), whole, layout, shards.objects)
    assert torch.equal(fresh.state[target[3].bias]["exp_avg"], whole["optimizer", "state.3.bias.exp_avg"])
    back = ZeroRedundancyOptimizer(target.parameters(), torch.optim.AdamW, lr=0.5)
    fill(FSDP2.load_targets({"model": target, "optimizer": back}, layout), whole, layout, shards.objects)
    assert back.param_groups[0]["lr"] == 0.01
    again = gathered(FSDP2.local_shards({"model": target, "optimizer": back}))
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    train(target, back, steps=1)


@dist_test
def test_zero_redundancy_optimizer(ranks4):
    ranks4.run(zero1)


def communicates():
    tensor = distribute_tensor(torch.arange(math.prod((4, 2))), mesh_of((4,)), [Shard(0)])
    with pytest.raises(AssertionError):
        quietly(tensor.full_tensor)


@dist_test
def test_communication_would_be_noticed(ranks4):
    ranks4.run(communicates)
