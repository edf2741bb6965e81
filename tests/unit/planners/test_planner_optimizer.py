from __future__ import annotations

import copy

import pytest
import torch
from planning import assembled, fill, names, pieces, saved_by
from torch import nn, optim

from bcp.errors import MismatchError, StateError
from bcp.plan.box import Box
from bcp.planners import PlainPlanner
from bcp.protocols import LoadTargets
from bcp.state.inventory import Leaves
from bcp.state.optimizer_restore import slot_targets
from bcp.state.optimizer_states import scalar_device
from bcp.state.optimizers import Slot
from bcp.state.placement import LocalInterval, Placement

PLAIN = PlainPlanner()

OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "adamw_amsgrad_fused": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True, fused=True),
    "adam_tensor_lr": lambda p: optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "sgd_momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "asgd": lambda p: optim.ASGD(p, lr=0.1),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def step(model, *optimizers: optim.Optimizer, seed=0):
    torch.manual_seed(seed)
    model(torch.randn(5, 3)).pow(2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def transfer(source, target):
    shards = PLAIN.local_shards(source)
    layout = saved_by(shards)
    objects = copy.deepcopy(dict(shards.objects))
    fill(PLAIN.load_targets(target, layout), assembled(pieces(shards)), layout, objects)


def same_state(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key
            assert (value.dtype, value.stride()) == (other[key].dtype, other[key].stride()), key
        else:
            assert value == other[key], key


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_fresh_optimizer_continues_as_the_saved_one(make):
    source = net()
    optimizer = make(source.parameters())
    step(source, optimizer, seed=1)
    step(source, optimizer, seed=2)
    optimizer.param_groups[0]["lr"] *= 0.5
    target = net(seed=9)
    fresh = make(target.parameters())
    transfer({"model": source, "optimizer": optimizer}, {"model": target, "optimizer": fresh})
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        same_state(optimizer.state.get(theirs, {}), fresh.state.get(mine, {}))
    for mine, theirs in zip(fresh.param_groups, optimizer.param_groups, strict=True):
        assert {**mine, "params": 0} == {**theirs, "params": 0}
    step(source, optimizer, seed=3)
    step(target, fresh, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), source.parameters(), strict=True))


def test_materialising_changes_no_parameter_and_no_hyper_parameter():
    source, target = net(), net(seed=9)
    optimizer = optim.AdamW(source.parameters(), lr=0.3, weight_decay=0.5)
    step(source, optimizer)
    layout = saved_by(PLAIN.local_shards({"model": source, "optimizer": optimizer}))
    fresh = optim.AdamW(target.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in target.parameters()]
    targets = PLAIN.load_targets({"model": target, "optimizer": fresh}, layout)
    assert all(torch.equal(a, b) for a, b in zip(before, target.parameters(), strict=True))
    assert fresh.param_groups[0]["lr"] == 0.1
    assert all(not value.any() for state in fresh.state.values() for value in state.values())
    assert set(names(targets.shards, "optimizer")) == {
        f"state.{fqn}.{name}" for fqn, _ in target.named_parameters() for name in ("step", "exp_avg", "exp_avg_sq")
    }


def test_materialised_states_have_the_saved_dtype():
    source, target = net(), net().bfloat16()
    optimizer, fresh = optim.AdamW(source.parameters()), optim.AdamW(target.parameters())
    step(source, optimizer)
    shards = PLAIN.local_shards({"model": source, "optimizer": optimizer})
    targets = PLAIN.load_targets({"model": target, "optimizer": fresh}, saved_by(shards))
    assert not fresh.state  # not before all is in place: a load that is refused leaves the optimizer as it was
    targets.finish(shards.objects)
    assert {value.dtype for state in fresh.state.values() for value in state.values()} == {torch.float32}


def test_existing_states_are_loaded_in_place():
    source, target = net(), net(seed=9)
    optimizers = optim.AdamW(source.parameters()), optim.AdamW(target.parameters())
    step(source, optimizers[0])
    step(target, optimizers[1], seed=5)
    moment = optimizers[1].state[target[0].weight]["exp_avg"]
    transfer({"model": source, "optimizer": optimizers[0]}, {"model": target, "optimizer": optimizers[1]})
    assert optimizers[1].state[target[0].weight]["exp_avg"] is moment
    assert torch.equal(moment, optimizers[0].state[source[0].weight]["exp_avg"])


def test_only_parameters_with_saved_state_get_one():
    source, target = net(), net()
    source[1].requires_grad_(requires_grad=False)
    optimizers = optim.AdamW(source.parameters()), optim.AdamW(target.parameters())
    step(source, optimizers[0])
    transfer({"model": source, "optimizer": optimizers[0]}, {"model": target, "optimizer": optimizers[1]})
    assert set(optimizers[1].state) == {target[0].weight, target[0].bias}


@pytest.mark.parametrize("order", [1, -1])
def test_beside_others_in_one_local_tensor_a_parameter_that_was_never_stepped_has_zeros(order):
    source = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(3)})
    optimizer = optim.Adam(source.parameters())
    source["a"].sum().backward()
    optimizer.step()
    shards = PLAIN.local_shards({"model": source, "optimizer": optimizer})
    layout, flat = saved_by(shards), nn.Parameter(torch.zeros(5))
    target = optim.Adam([flat])
    places = {"a": LocalInterval.whole(Box.whole((2,))), "b": LocalInterval.whole(Box.whole((3,)), 2)}
    slots = [
        Slot(fqn, flat, target.param_groups[0], target.state, placement=Placement(span.box.lengths, (5,), (span,)))
        for fqn, span in places.items()
    ]
    leaves = Leaves()
    check, finish = slot_targets(leaves, slots[::order], layout)
    targets = LoadTargets(leaves.to_load(layout.rows), check, finish)
    fill(targets, assembled(pieces(shards)), layout, dict(shards.objects))
    moment = optimizer.state[source["a"]]["exp_avg"]
    assert torch.equal(target.state[flat]["exp_avg"], torch.cat([moment, torch.zeros(3)]))
    assert target.state[flat]["step"] == 1


def test_names_follow_the_flattened_convention():
    model = net()
    optimizer = optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    shards = PLAIN.local_shards({"model": model, "optimizer": optimizer})
    assert set(names(shards, "optimizer")) == {f"state.{fqn}.momentum_buffer" for fqn in model.state_dict()}
    keys = {path for kind, path in shards.objects if kind == "optimizer"}
    expected = set(optimizer.param_groups[0]) - {"params", "param_names"}
    assert keys == {f"param_groups.{fqn}.{key}" for fqn in model.state_dict() for key in expected}


def groups(model, *, reverse=False, **hypers: object):
    parts = [{"params": model[0].parameters(), **hypers}, {"params": model[1].parameters()}]
    return optim.AdamW(parts[::-1] if reverse else parts, lr=0.1)


def test_groups_may_be_ordered_and_cut_in_another_way():
    source, target = net(), net()
    optimizer, fresh = groups(source, lr=0.7, betas=(0.5, 0.6)), groups(target, reverse=True)
    transfer({"model": source, "optimizer": optimizer}, {"model": target, "optimizer": fresh})
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.7]
    assert fresh.param_groups[1]["betas"] == (0.5, 0.6)
    one, many = optim.AdamW(source.parameters(), lr=0.3), groups(target, lr=0.2)
    transfer({"model": source, "optimizer": one}, {"model": target, "optimizer": many})
    assert [group["lr"] for group in many.param_groups] == [0.3, 0.3]


@pytest.mark.parametrize("tensor", [False, True])
def test_groups_that_cannot_be_joined_are_a_mismatch_and_nothing_is_set(tensor):
    source, target = net(), net()
    lr = (torch.tensor(0.7), torch.tensor(0.1)) if tensor else (0.7, 0.1)
    parts = [{"params": part.parameters(), "lr": value} for part, value in zip(source, lr, strict=True)]
    optimizer, fresh = optim.AdamW(parts, foreach=False), optim.AdamW(target.parameters(), lr=0.2, eps=1e-3)
    with pytest.raises(MismatchError, match=r"'0\.weight', saved with lr=.*0\.7.*'1\.weight', saved with lr=.*0\.1"):
        transfer({"model": source, "optimizer": optimizer}, {"model": target, "optimizer": fresh})
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["eps"]) == (0.2, 1e-3)


def test_keys_that_only_the_source_knows_are_no_reason_to_keep_groups_apart():
    source, target = net(), net()
    parts = [{"params": part.parameters(), "wd_mult": mult} for part, mult in zip(source, (0.0, 1.0), strict=True)]
    optimizer, fresh = optim.AdamW(parts, lr=0.7), optim.AdamW(target.parameters(), lr=0.2)
    transfer({"model": source, "optimizer": optimizer}, {"model": target, "optimizer": fresh})
    assert fresh.param_groups[0]["lr"] == 0.7
    assert "wd_mult" not in fresh.param_groups[0]


def test_groups_that_cannot_be_joined_are_found_before_anything_is_loaded():
    source, target = net(), net(seed=9)
    optimizer, fresh = groups(source, lr=0.7), optim.AdamW(target.parameters(), lr=0.2)
    shards = PLAIN.local_shards({"model": source, "optimizer": optimizer})
    targets = PLAIN.load_targets({"model": target, "optimizer": fresh}, saved_by(shards))
    with pytest.raises(MismatchError, match="put them into different groups before loading"):
        targets.check(shards.objects)
    targets.check({name: value for name, value in shards.objects.items() if not name[1].endswith(".lr")})
    assert fresh.param_groups[0]["lr"] == 0.2


def test_hyper_parameters_of_other_versions_are_no_mismatch():
    source, target = net(), net()
    optimizer, fresh = optim.AdamW(source.parameters()), optim.AdamW(target.parameters())
    optimizer.param_groups[0]["initial_lr"] = 0.4
    fresh.param_groups[0]["newer"] = True
    states = {"model": target, "optimizer": fresh}
    layout = saved_by(PLAIN.local_shards({"model": source, "optimizer": optimizer}))
    wanted = PLAIN.load_targets(states, layout).shards.objects
    assert set(wanted) == set(layout.objects)
    transfer({"model": source, "optimizer": optimizer}, states)
    assert fresh.param_groups[0]["initial_lr"] == 0.4
    assert fresh.param_groups[0]["newer"] is True


def test_a_parameter_that_the_checkpoint_lacks_is_wanted():
    source, target = net(), net()
    half = optim.AdamW(source[0].parameters())
    layout = saved_by(PLAIN.local_shards({"model": source, "optimizer": half}))
    wanted = PLAIN.load_targets({"model": target, "optimizer": optim.AdamW(target.parameters())}, layout)
    missing = set(wanted.shards.objects) - {tuple(name) for name in layout.objects}
    assert ("optimizer", "param_groups.1.weight.lr") in missing


def test_tensor_and_number_learning_rates_keep_the_targets_form():
    source, target = net(), net()
    number = optim.AdamW(source.parameters(), lr=0.25)
    lr = torch.tensor(0.1)
    tensor = optim.AdamW(target.parameters(), lr=lr, foreach=False)
    transfer({"model": source, "optimizer": number}, {"model": target, "optimizer": tensor})
    assert tensor.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
    lr.fill_(0.5)
    transfer({"model": target, "optimizer": tensor}, {"model": source, "optimizer": number})
    assert number.param_groups[0]["lr"] == 0.5
    shards = PLAIN.local_shards({"model": target, "optimizer": tensor})
    assert len([fqn for fqn in names(shards, "optimizer") if fqn.endswith(".lr")]) == 4
    assert len([row for row in range(len(shards.tensors)) if shards.table.meta(row).fqn.endswith(".lr")]) == 1


def test_shared_parameters_go_by_the_first_name():
    model = nn.ModuleDict({"tok": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3, bias=False)})
    model["head"].weight = model["tok"].weight
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model["head"](model["tok"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    shards = PLAIN.local_shards({"model": model, "optimizer": optimizer})
    assert set(names(shards, "optimizer")) == {"state.head.weight.momentum_buffer"}


def test_parameters_are_found_by_memory_in_a_plain_state_dict():
    model = net()
    optimizer = optim.AdamW(model.parameters())
    step(model, optimizer)
    shards = PLAIN.local_shards({"model": {"net": model.state_dict()}, "optimizer": optimizer})
    assert "state.net.0.weight.exp_avg" in names(shards, "optimizer")


def test_the_model_is_needed_for_names():
    model = net()
    optimizer = optim.SGD(model.parameters())
    for states in ({"optimizer": optimizer}, {"model": net(), "optimizer": optimizer}):
        with pytest.raises(StateError, match=r"of shape \(4, 3\) that is not in states\['model'\]; pass the model"):
            PLAIN.local_shards(states)


def test_several_optimizers():
    model = net()
    parts = [optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), optim.AdamW(model[1].parameters())]
    step(model, *parts)
    shards = PLAIN.local_shards({"model": model, "optimizer": parts})
    assert {"state.0.weight.momentum_buffer", "state.1.weight.exp_avg"} <= set(names(shards, "optimizer"))
    target = net(seed=4)
    fresh = {"a": optim.SGD(target[0].parameters(), lr=0.2, momentum=0.1), "b": optim.AdamW(target[1].parameters())}
    transfer({"model": model, "optimizer": parts}, {"model": target, "optimizer": fresh})
    same_state(parts[0].state[model[0].weight], fresh["a"].state[target[0].weight])
    assert fresh["a"].param_groups[0]["momentum"] == 0.9
    twice = {"model": model, "optimizer": [parts[0], optim.SGD(model.parameters())]}
    with pytest.raises(StateError, match="two leaves of optimizer are named"):
        PLAIN.local_shards(twice)
    with pytest.raises(StateError, match=r"'0\.weight' is in two optimizers"):
        PLAIN.load_targets(twice, saved_by())
    with pytest.raises(StateError, match="has an optimizer at 'opt'"):
        PLAIN.local_shards({"model": model, "optimizer": {"opt": parts[0], "step": 1}})


def test_plain_optimizer_state_dicts():
    models = net(), net(seed=3)
    optimizers = [optim.AdamW(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, seed=id(model) % 7)
    states = [optimizer.state_dict() for optimizer in optimizers]
    source, target = ({"model": model, "optimizer": state} for model, state in zip(models, states, strict=True))
    transfer(source, target)
    for index, state in states[0]["state"].items():
        same_state(state, states[1]["state"][index])


class Sketchy(optim.Optimizer):
    """Keeps states of every shape: nested tensors, numbers, strings."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.update(count=state.get("count", 0) + 1, mode="warm", history=[1, 2])
            state["factors"] = [torch.full((2,), state["count"]), {"n": state["count"]}]


def test_nested_and_other_states():
    source, target = net(), net()
    optimizer, other = Sketchy(source.parameters()), Sketchy(target.parameters())
    optimizer.step()
    optimizer.step()
    states = {"model": source, "optimizer": optimizer}
    shards = PLAIN.local_shards(states)
    assert shards.objects["optimizer", "state.0.bias.history"] == [1, 2]
    assert "state.0.bias.factors.0" in names(shards, "optimizer")
    for steps in (0, 1):
        other = Sketchy(target.parameters())
        for _ in range(steps):
            other.step()
        transfer(states, {"model": target, "optimizer": other})
        state = other.state[target[0].bias]
        assert (state["count"], state["factors"][0].tolist(), state["factors"][1]) == (2, [2, 2], {"n": 2})


def test_states_that_are_no_tensors_are_made_up_in_finish():
    class Counting(Sketchy):
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].update(count=7, ema=torch.ones(3))

    source, target = net(), net()
    optimizer, fresh = Counting(source.parameters()), Counting(target.parameters())
    optimizer.step()
    transfer({"model": source, "optimizer": optimizer}, {"model": target, "optimizer": fresh})
    same_state(optimizer.state[source[0].weight], fresh.state[target[0].weight])


def test_steps_belong_on_the_cpu_unless_kernels_read_them():
    parameter = torch.empty(2, device="meta")
    assert scalar_device(Slot("w", parameter, {}, {}), "step").type == "cpu"
    assert scalar_device(Slot("w", parameter, {}, {}), "eta").type == "meta"
    assert scalar_device(Slot("w", parameter, {"fused": True}, {}), "step").type == "meta"
    assert scalar_device(Slot("w", parameter, {"capturable": True}, {}), "step").type == "meta"
