"""A table that was worked out before is used again exactly where a new one would be the same."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planning import names, saved_by
from torch import nn, optim

from bcp._save.local_state import collect_local_state
from bcp.errors import StateError
from bcp.options import SaveOptions
from bcp.plan.write.survey import digest
from bcp.planners import PlainPlanner
from bcp.protocols import LocalShards, States
from bcp.runtime.device import Caller
from bcp.stages.memcpy import bytes_at
from bcp.state import shard_table as stock
from bcp.state import tensor_specs as forms

PLAIN = PlainPlanner()


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_stocks", [])
    monkeypatch.setattr(forms, "_forms", {})


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(3, width)
        self.down = nn.Linear(width, 3)
        self.norm = nn.BatchNorm1d(3)
        self.scale = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x).relu()))

    def get_extra_state(self) -> object:
        return {"scale": self.scale}

    def set_extra_state(self, state: object) -> None:
        """Nothing is loaded here."""


def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
    model(torch.arange(12.0).view(4, 3)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def states() -> dict[str, object]:
    torch.manual_seed(0)
    model = Net()
    optimizer = optim.AdamW([{"params": model.up.parameters()}, {"params": model.down.parameters(), "lr": 0.5}])
    step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def anew(states: States) -> LocalShards:
    """What a process finds that has remembered nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock, "_stocks", [])
        patch.setattr(forms, "_forms", {})
        return PLAIN.local_shards(states)


def looks(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def check_same(one: LocalShards, other: LocalShards) -> None:
    assert digest(one.table) == digest(other.table)
    assert list(map(looks, one.tensors)) == list(map(looks, other.tensors))
    assert one.objects.keys() == other.objects.keys()
    for key, value in one.objects.items():
        assert value is other.objects[key] or value == other.objects[key]


def found(states: States) -> LocalShards:
    """What is found now, checked against what is found without remembering anything."""
    shards = PLAIN.local_shards(states)
    check_same(shards, anew(states))
    return shards


def is_hit(before: LocalShards, after: LocalShards) -> bool:
    """The same object, or another table: that of equal content would be no reason to make it anew."""
    if before.table is not after.table:
        assert digest(before.table) != digest(after.table)
    return before.table is after.table


# -- what changes nothing ---------------------------------------------------------------------------


def test_a_step_changes_values_only_and_these_are_seen(states):
    before = found(states)
    with torch.no_grad():
        states["model"].up.weight.fill_(7.0)
    step(states["model"], states["optimizer"])
    after = found(states)
    assert is_hit(before, after)
    row = after.table.tensor.tolist().index(after.table.tensors.fqn.index("up.weight"))
    assert torch.equal(after.tensors[row], states["model"].up.weight)
    assert after.tensors[row] is not before.tensors[row]


def test_values_that_are_no_tensors_are_read_each_time(states):
    before = found(states)
    states["optimizer"].param_groups[0]["lr"] = 0.125
    states["optimizer"].param_groups[1]["betas"] = (0.1, 0.2)
    states["model"].scale = 2
    after = found(states)
    assert is_hit(before, after)
    assert after.objects["optimizer", "param_groups.up.weight.lr"] == 0.125
    assert after.objects["optimizer", "param_groups.down.weight.lr"] == 0.5
    assert after.objects["optimizer", "param_groups.down.bias.betas"] == (0.1, 0.2)
    assert after.objects["model", "_extra_state"] == {"scale": 2}


def test_new_memory_of_the_same_form_is_seen(states):
    before, weight = found(states), states["model"].up.weight
    weight.data = torch.full((4, 3), 5.0)
    after = found(states)
    assert is_hit(before, after)
    assert weight.data_ptr() in {tensor.data_ptr() for tensor in after.tensors}
    assert weight.data_ptr() not in {tensor.data_ptr() for tensor in before.tensors}


def test_tensors_that_were_replaced_by_their_like_are_seen(states):
    model, optimizer = states["model"], states["optimizer"]
    before = found(states)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.norm.running_mean = torch.full((3,), 9.0)
    after = found(states)
    assert is_hit(before, after)
    pointers = {tensor.data_ptr() for tensor in after.tensors}
    assert optimizer.state[model.up.weight]["exp_avg"].data_ptr() in pointers
    assert model.norm.running_mean.data_ptr() in pointers


def test_a_memory_that_was_given_back_and_taken_again_is_seen(states):
    before, weight = found(states), states["model"].up.weight
    storage = weight.untyped_storage()
    size, values = storage.nbytes(), weight.detach().clone()
    storage.resize_(0)
    held = torch.empty(4096)
    storage.resize_(size)
    with torch.no_grad():
        weight.copy_(values)
    after = found(states)
    assert is_hit(before, after)
    assert held.data_ptr() not in {tensor.data_ptr() for tensor in after.tensors}


def test_a_model_of_the_same_form_has_the_same_table(states):
    before = found(states)
    model = Net()
    optimizer = optim.AdamW([{"params": model.up.parameters()}, {"params": model.down.parameters()}])
    step(model, optimizer)
    after = found({"model": model, "optimizer": optimizer})
    assert is_hit(before, after)
    assert not {tensor.data_ptr() for tensor in before.tensors} & {tensor.data_ptr() for tensor in after.tensors}


def test_models_that_take_turns_are_both_remembered(states):
    other = {"model": Net(width=5)}
    first, second = found(states), found(other)
    assert not is_hit(first, second)
    for _ in range(3):
        assert is_hit(first, found(states))
        assert is_hit(second, found(other))


def test_of_too_many_the_one_that_was_needed_longest_ago_is_forgotten():
    many = [{"model": {"w": torch.zeros(n)}} for n in range(1, stock.MOST + 2)]
    tables = [PLAIN.local_shards(each).table for each in many[:-1]]
    assert PLAIN.local_shards(many[0]).table is tables[0]
    PLAIN.local_shards(many[-1])
    assert PLAIN.local_shards(many[0]).table is tables[0]
    assert PLAIN.local_shards(many[1]).table is not tables[1]


# -- what changes the table -------------------------------------------------------------------------


def other_shape(model: Net, _: optim.Optimizer) -> None:
    model.down.weight.data = torch.ones(5, 4)


def other_strides(model: Net, _: optim.Optimizer) -> None:
    model.up.weight.data = torch.ones(3, 4).t()


def other_dtype(model: Net, _: optim.Optimizer) -> None:
    model.to(torch.bfloat16)


def buffer_of_another_dtype(model: Net, _: optim.Optimizer) -> None:
    model.norm.running_var = torch.ones(3, dtype=torch.float64)


def frozen(model: Net, _: optim.Optimizer) -> None:
    model.up.weight.requires_grad_(requires_grad=False)


def resized(model: Net, _: optim.Optimizer) -> None:
    model.norm.running_mean.resize_(2)


def emptied(model: Net, _: optim.Optimizer) -> None:
    model.norm.running_mean = torch.zeros(0)


def parameter_added(model: Net, _: optim.Optimizer) -> None:
    model.extra = nn.Parameter(torch.ones(2))


def parameter_removed(model: Net, optimizer: optim.Optimizer) -> None:
    del optimizer.param_groups[0]["params"][1], optimizer.state[model.up.bias]
    model.up.bias = None


def module_renamed(model: Net, _: optim.Optimizer) -> None:
    model.upwards = model._modules.pop("up")


def names_swapped(model: Net, _: optim.Optimizer) -> None:
    model.up.weight, model.up.other = nn.Parameter(torch.ones(2)), model.up.weight


def buffer_replaced(model: Net, _: optim.Optimizer) -> None:
    model.norm.running_mean = torch.zeros(1, 3)


def buffer_no_longer_saved(model: Net, _: optim.Optimizer) -> None:
    model.norm._non_persistent_buffers_set.add("running_mean")


def tied(model: Net, _: optim.Optimizer) -> None:
    model.norm.running_var = model.norm.running_mean


def states_gone(_: Net, optimizer: optim.Optimizer) -> None:
    optimizer.state.clear()


def state_added(model: Net, optimizer: optim.Optimizer) -> None:
    optimizer.state[model.up.weight]["ema"] = torch.zeros(2)


def state_no_tensor_any_more(model: Net, optimizer: optim.Optimizer) -> None:
    optimizer.state[model.up.weight]["exp_avg"] = "gone"


def group_added(model: Net, optimizer: optim.Optimizer) -> None:
    optimizer.add_param_group({"params": model.norm.parameters()})


def parameter_left_a_group(_: Net, optimizer: optim.Optimizer) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop(), None)


def hyper_parameter_added(_: Net, optimizer: optim.Optimizer) -> None:
    optimizer.param_groups[1]["warmup"] = 10


def hyper_parameter_removed(_: Net, optimizer: optim.Optimizer) -> None:
    del optimizer.param_groups[0]["foreach"]


def hyper_parameter_became_a_tensor(_: Net, optimizer: optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)


def hook_registered(model: Net, _: optim.Optimizer) -> None:
    def shortened(_: nn.Module, state: dict[str, torch.Tensor], prefix: str, __: object) -> None:
        state[prefix + "weight"] = state[prefix + "weight"][:1]

    model.up.register_state_dict_post_hook(shortened)


def method_overridden(model: Net, _: optim.Optimizer) -> None:
    state = model.down.state_dict

    def renamed(*args: object, prefix: str = "", **how: object) -> object:
        made = state(*args, prefix=prefix, **how)
        made[f"{prefix}heavy"] = made.pop(f"{prefix}weight")
        return made

    model.down.state_dict = renamed


CHANGES = [
    *(other_shape, other_strides, other_dtype, buffer_of_another_dtype, frozen, resized, emptied, parameter_added),
    *(parameter_removed, module_renamed, names_swapped, buffer_replaced, buffer_no_longer_saved, tied, states_gone),
    *(state_added, state_no_tensor_any_more, group_added, parameter_left_a_group, hyper_parameter_added),
    *(hyper_parameter_removed, hyper_parameter_became_a_tensor, hook_registered, method_overridden),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_the_table_is_seen(states, change):
    before = found(states)
    change(states["model"], states["optimizer"])
    after = found(states)
    assert not is_hit(before, after)
    assert is_hit(after, found(states))


def test_states_that_come_later_are_seen():
    model = Net()
    states = {"model": model, "optimizer": optim.AdamW(model.parameters())}
    before = found(states)
    step(model, states["optimizer"])
    after = found(states)
    assert not is_hit(before, after)
    assert "state.up.weight.exp_avg" in names(after, "optimizer")


def test_other_names_are_seen():
    before = found({"model": {"a": torch.zeros(2), "n": 1}})
    for state in ({"b": torch.zeros(2), "n": 1}, {"a": torch.zeros(2), "m": 1}, {"n": 1, "x": {"a": torch.zeros(2)}}):
        assert not is_hit(before, found({"model": state}))
        assert not is_hit(before, found({"optimizer": state}))


def test_tied_tensors_that_are_parted_are_seen():
    memory = torch.zeros(6)
    states = {"model": {"a": memory[:3], "b": memory[:3], "c": memory[3:]}}
    before = found(states)
    assert names(before) == {"a": "", "b": "a", "c": ""}
    states["model"]["b"] = memory[3:]
    after = found(states)
    assert not is_hit(before, after)
    assert names(after) == {"a": "", "b": "", "c": "b"}


def test_tensors_that_begin_at_one_address_are_no_ties():
    memory = torch.arange(6.0)
    states = {"model": {"all": memory, "head": memory[:2], "bits": memory.view(torch.int32), "none": memory[:0]}}
    assert set(names(found(states)).values()) == {""}
    states["model"]["none"] = memory[:6]
    assert names(found(states))["none"] == "all"


def test_lazy_tensors_are_not_taken_for_what_they_look_like():
    value = torch.tensor([1 + 2j, 3 - 1j])
    states = {"model": {"w": torch.tensor([2.0, -1.0]), "c": value}}
    first = found(states)
    states["model"] = {"w": value.conj().imag, "c": value.conj()}
    assert states["model"]["w"].is_neg()
    for _ in range(2):
        shards = PLAIN.local_shards(states)
        assert digest(shards.table) != digest(first.table)  # the strides of the imaginary part
        assert shards.tensors[0].tolist() == [-2.0, 1.0]
        assert shards.tensors[1].tolist() == [1 - 2j, 3 + 1j]
        assert not shards.tensors[0].is_neg()
        assert not shards.tensors[1].is_conj()


def test_lazy_tensors_that_look_like_others_are_not_taken_for_these():
    value = torch.tensor([1 + 2j, 3 - 1j])
    before = found({"model": {"w": torch.tensor([2.0, -1.0]), "c": value}})
    after = PLAIN.local_shards({"model": {"w": torch._neg_view(torch.tensor([2.0, -1.0])), "c": value.conj()}})
    assert digest(before.table) == digest(after.table)
    assert [view.tolist() for view in after.tensors] == [[-2.0, 1.0], [1 - 2j, 3 + 1j]]
    assert not any(view.is_neg() or view.is_conj() for view in after.tensors)


def test_what_cannot_be_saved_is_refused_although_its_like_was_saved():
    PLAIN.local_shards({"model": {"w": torch.zeros(1).expand(3, 3), "v": torch.zeros(3, 3)}})
    sparse = torch.zeros(3, 3).to_sparse()
    assert (sparse.shape, sparse.dtype) == ((3, 3), torch.float32)
    for refused, reason in ((sparse, "torch.sparse_coo"), (torch.zeros(3, 3, device="meta"), "meta device")):
        for _ in range(2):
            with pytest.raises(StateError, match=rf"model tensor 'w' on rank 0 .*{reason}"):
                PLAIN.local_shards({"model": {"w": refused}})


def test_a_parameter_that_fsdp1_took_is_refused_although_it_was_saved_before():
    model = nn.Linear(2, 2)
    PLAIN.local_shards({"model": model})
    model.weight._fsdp_flattened = True
    with pytest.raises(StateError, match=r"'weight' on rank 0 is a part of an FSDP1 unit"):
        PLAIN.local_shards({"model": model})


def test_extras_do_not_make_a_table_anew(states):
    mine = {**states, "extra_states": {"step": 1}}
    job = SimpleNamespace(planner=lambda: PLAIN, states=mine, options=SaveOptions(), caller=Caller())
    first, again = collect_local_state(job), collect_local_state(job)
    assert first.shards.table.extras == ["extra_states"]
    assert again.shards.table is first.shards.table
    job.states["dataloader"] = {"at": 2}
    both = collect_local_state(job)
    assert both.shards.table.extras == ["dataloader", "extra_states"]
    assert digest(both.shards.table) != digest(first.shards.table)
    del job.states["dataloader"], job.states["extra_states"]
    assert collect_local_state(job).shards.table.extras == []


# -- what is kept -----------------------------------------------------------------------------------


def watched(*shape: int) -> tuple[torch.Tensor, weakref.ref[np.ndarray]]:
    """A tensor, and what is there as long as its memory is."""
    array = np.ones(shape, dtype=np.float32)
    return torch.from_numpy(array), weakref.ref(array)


def test_nothing_of_a_model_is_kept_alive():
    model = nn.Linear(3, 4)
    model.weight.data, memory = watched(4, 3)
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    PLAIN.local_shards({"model": model, "optimizer": optimizer})
    there = [model, optimizer, *model.parameters()]
    there += [value for state in optimizer.state.values() for value in state.values()]
    gone = [memory, *map(weakref.ref, there)]
    assert stock._stocks
    assert all(ref() is not None for ref in gone)
    del model, optimizer, there
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_memory_that_a_parameter_has_left_is_given_back():
    model = nn.Linear(2, 2)
    model.weight.data, memory = watched(2, 2)
    shards = PLAIN.local_shards({"model": model})
    model.weight.data = torch.ones(2, 2)
    assert memory() is not None  # the shards of a save that is still running
    del shards
    assert memory() is None


def test_the_columns_of_a_table_that_others_get_as_well_cannot_be_changed(states):
    table = PLAIN.local_shards(states).table
    for column in (table.start, table.offset, table.tensors.kind, table.tensors.shape):
        with pytest.raises(ValueError, match="read-only"):
            column[...] = 1


def test_a_load_wants_what_a_save_would_hold(states):
    held = PLAIN.local_shards(states)
    targets = PLAIN.load_targets(states, saved_by(held)).shards
    assert targets.table is held.table
    assert list(targets.objects) == list(held.objects)
    assert [one.data_ptr() for one in targets.tensors] == [one.data_ptr() for one in held.tensors]


def test_a_load_into_tied_tensors_has_a_table_of_its_own():
    weight = torch.ones(3)
    state = {"model": {"a": weight, "b": weight}}
    held = PLAIN.local_shards(state)
    targets = PLAIN.load_targets(state, saved_by(PLAIN.local_shards({"model": {"b": weight}}))).shards
    assert targets.table is not held.table
    assert list(targets.table.tensors.fqn) == ["b"]


def test_threads_find_what_is_theirs():
    mine = [{"model": Net(width=n)} for n in range(1, 2 * stock.MOST)]
    right = [anew(states) for states in mine]
    begin = threading.Barrier(4)

    def look(number: int) -> None:
        begin.wait()
        for turn in range(50):
            at = (turn * 7 + number * 3) % len(mine)
            check_same(PLAIN.local_shards(mine[at]), right[at])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(look, range(4)))
    assert len(stock._stocks) == stock.MOST


def test_memory_that_a_parameter_leaves_stays_as_long_as_its_address_is_used():
    weight = nn.Parameter(torch.full((1 << 18,), 3.0))
    shards = PLAIN.local_shards({"model": {"w": weight}})
    assert shards.address.tolist() == [weight.data_ptr()]
    weight.data = torch.zeros(1)
    others = [torch.zeros(1 << 18) for _ in range(8)]  # these would take it if it were free
    assert shards.address[0] not in [other.data_ptr() for other in others]
    assert set(bytes_at(int(shards.address[0]), 1 << 20).cast("f")) == {3.0}


@pytest.mark.parametrize("state", [{}, {"w": torch.ones(2), "1": torch.ones(2)}, {"w": nn.Parameter(torch.ones(2))}])
def test_flat_states_need_not_be_walked_through(state):
    assert forms.is_flat(state)


@pytest.mark.parametrize(
    "state",
    [
        None,
        torch.ones(2),
        [torch.ones(2)],
        {1: torch.ones(2)},
        {"w": 1},
        {"w": {"x": torch.ones(2)}},
        {"w": nn.Linear(1, 1)},
        {"w": torch.ones(2).as_subclass(type("Marked", (torch.Tensor,), {}))},
    ],
    ids=lambda state: type(state).__name__,
)
def test_other_states_have_to_be(state):
    assert not forms.is_flat(state)
