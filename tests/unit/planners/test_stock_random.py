"""Whatever happens to a model and its optimizer, what is found is what a process finds that has remembered nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn, optim

from bcp.plan.write.survey import digest
from bcp.planners import PlainPlanner
from bcp.protocols import LocalShards, States
from bcp.state import shard_table as stock
from bcp.state import tensor_specs as forms

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]
SHAPES = [(), (0,), (3,), (2, 3), (3, 2), (2, 0)]


def find(states: States, *, remembering: bool) -> LocalShards:
    with pytest.MonkeyPatch.context() as patch:
        if not remembering:
            patch.setattr(stock, "_stocks", [])
            patch.setattr(forms, "_forms", {})
        return PlainPlanner().local_shards(states)


class Lives(RuleBasedStateMachine):
    """Two models whose lives take turns; both are looked at after everything that happens to one."""

    def __init__(self) -> None:
        super().__init__()
        self.models: list[nn.Module] = []
        self.optimizers: list[optim.Optimizer] = []
        self.hooks: list[Callable[[], None]] = []
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def make(self) -> tuple[nn.Module, optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.ModuleDict({"deep": nn.Linear(2, 2, bias=False)}))
        return model, optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)

    @initialize()
    def begin(self) -> None:
        for _ in range(2):
            model, optimizer = self.make()
            self.models.append(model)
            self.optimizers.append(optimizer)

    def parameters(self, which: int) -> list[tuple[nn.Module, str]]:
        return [
            (part, key) for part in self.models[which].modules() for key, p in part._parameters.items() if p is not None
        ]

    # -- tensors ------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), at=st.integers(0, 9), shape=st.sampled_from(SHAPES), dtype=st.sampled_from(DTYPES))
    def parameter_gets_other_data(self, which, at, shape, dtype):
        part, key = self.parameters(which)[at % len(self.parameters(which))]
        part._parameters[key].data = torch.ones(shape, dtype=dtype)

    @rule(
        which=st.integers(0, 1),
        at=st.integers(0, 9),
        how=st.sampled_from(["flip", "expand", "conj", "neg", "cut", "half"]),
    )
    def parameter_is_seen_otherwise(self, which, at, how):
        part, key = self.parameters(which)[at % len(self.parameters(which))]
        data = part._parameters[key].data
        views = {
            "flip": lambda: data.t() if data.dim() < 3 else data,
            "expand": lambda: data.flatten()[:1].expand(3) if data.numel() else data,
            "conj": lambda: data.conj() if data.is_complex() else data,
            "neg": lambda: torch._neg_view(data) if data.numel() else data,
            "cut": lambda: data.flatten()[1:],
            "half": lambda: (
                data.resolve_conj().resolve_neg().view(torch.uint8) if data.dim() and data.is_contiguous() else data
            ),
        }
        part._parameters[key].requires_grad_(requires_grad=False)
        part._parameters[key].data = views[how]()

    @rule(which=st.integers(0, 1), at=st.integers(0, 9))
    def parameter_is_frozen_or_thawed(self, which, at):
        part, key = self.parameters(which)[at % len(self.parameters(which))]
        parameter = part._parameters[key]
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(not parameter.requires_grad)

    @rule(which=st.integers(0, 1), at=st.integers(0, 9), other=st.integers(0, 9), memory=st.booleans())
    def two_are_tied(self, which, at, other, memory):
        (part, key), (owner, name) = (self.parameters(which)[n % len(self.parameters(which))] for n in (at, other))
        if memory:
            part.register_buffer(self.name(), owner._parameters[name].detach())
        else:
            part.register_parameter(self.name(), owner._parameters[name])
        del key

    @rule(which=st.integers(0, 1), shape=st.sampled_from(SHAPES), persistent=st.booleans())
    def buffer_is_added(self, which, shape, persistent):
        self.models[which][1].register_buffer(self.name(), torch.zeros(shape), persistent=persistent)

    @rule(which=st.integers(0, 1), dtype=st.sampled_from(DTYPES[:3]))
    def module_is_converted(self, which, dtype):
        self.models[which].to(dtype)

    @rule(which=st.integers(0, 1), at=st.integers(0, 9))
    def values_change_in_place(self, which, at):
        part, key = self.parameters(which)[at % len(self.parameters(which))]
        parameter = part._parameters[key]
        if not any(stride == 0 for stride in parameter.stride()):
            parameter.data.resolve_conj().zero_()

    # -- modules ------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1))
    def module_is_added(self, which):
        added = nn.Linear(1, 2)
        self.models[which].add_module(self.name(), added)
        self.optimizers[which].add_param_group({"params": list(added.parameters()), "lr": 0.5})

    @rule(which=st.integers(0, 1))
    def module_is_renamed(self, which):
        modules = self.models[which][2]._modules
        modules[self.name()] = modules.pop(next(iter(modules)))

    @rule(which=st.integers(0, 1), what=st.sampled_from(["more", "less", "object"]))
    def hook_is_registered(self, which, what):
        def hook(_: nn.Module, state: dict[str, object], prefix: str, __: object) -> None:
            first = next(iter(state))
            if what == "more":
                state[f"{prefix}{first}_twice"] = torch.ones(2)
            elif what == "less":
                state.pop(f"{prefix}running_mean", None)
            else:
                state[f"{prefix}note"] = len(state)

        self.hooks.append(self.models[which][1].register_state_dict_post_hook(hook).remove)

    @precondition(lambda self: self.hooks)
    @rule()
    def hook_is_removed(self):
        self.hooks.pop()()

    @rule(which=st.integers(0, 1))
    def both_are_new(self, which):
        self.models[which], self.optimizers[which] = self.make()

    @rule()
    def they_take_turns(self):
        self.models.reverse()
        self.optimizers.reverse()

    # -- optimizers ---------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1))
    def states_are_made(self, which):
        for group in self.optimizers[which].param_groups:
            for parameter in group["params"]:
                state = self.optimizers[which].state[parameter]
                state.update(step=torch.tensor(1.0), exp_avg=torch.zeros_like(parameter.detach()))

    @rule(
        which=st.integers(0, 1), value=st.sampled_from([1, 2.0, "text", None, [1], torch.ones(3), {"a": torch.ones(1)}])
    )
    def state_gets_a_value(self, which, value):
        self.optimizers[which].state[self.optimizers[which].param_groups[0]["params"][0]]["odd"] = copy.deepcopy(value)

    @rule(which=st.integers(0, 1))
    def states_are_replaced(self, which):
        optimizer = self.optimizers[which]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    @rule(which=st.integers(0, 1))
    def states_are_dropped(self, which):
        self.optimizers[which].state.clear()

    @rule(
        which=st.integers(0, 1),
        key=st.sampled_from(["lr", "betas", "more", "other"]),
        value=st.sampled_from([0.1, 0.0, -0.0, 1, True, "text", None, (0.9, 0.95), torch.tensor(0.5)]),
    )
    def hyper_parameter_changes(self, which, key, value):
        group = self.optimizers[which].param_groups[-1]
        group[key] = value

    @rule(which=st.integers(0, 1))
    def hyper_parameter_goes(self, which):
        self.optimizers[which].param_groups[0].pop("foreach", None)

    # -- what has to hold ---------------------------------------------------------------------------------

    @invariant()
    def what_is_found_is_what_is_there(self) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            states = {"model": model, "optimizer": optimizer}
            mine, right = (find(states, remembering=remembering) for remembering in (True, False))
            assert digest(mine.table) == digest(right.table)
            assert mine.objects.keys() == right.objects.keys()
            for key, value in mine.objects.items():  # a tree of a nested state is made anew
                assert value is right.objects[key] or (key[1].endswith(":tree") and value == right.objects[key])
            assert len(mine.tensors) == len(right.tensors)
            for row, (one, other) in enumerate(zip(mine.tensors, right.tensors, strict=True)):
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
                assert one.data_ptr() == other.data_ptr() or torch.equal(one, other)  # a copy where it was lazy
                assert tuple(one.shape) == mine.table.box(row).lengths
                assert not one.is_neg()
                assert not one.is_conj()


TestLives = pytest.mark.filterwarnings("ignore:Casting complex values to real")(Lives.TestCase)
TestLives.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
