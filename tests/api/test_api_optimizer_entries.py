"""State that an optimizer keeps outside of ``state[parameter]`` and ``param_groups`` is saved, or refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import alike_in_any_order, exactly_alike
from torch import nn, optim

import bcp


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(closure) if isinstance(optimizer, optim.LBFGS) else optimizer.step()


class Container(optim.Optimizer):
    """One optimizer object in front of one inner optimizer for each model part."""

    def __init__(self, parts: Any) -> None:
        self.inner = [optim.AdamW(part.parameters(), lr=1e-2) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {"lr": 1e-2})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for part in self.inner:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        for part in self.inner:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[Any, Any]:
        return {number: part.state_dict() for number, part in enumerate(self.inner)}

    def load_state_dict(self, state: Any) -> None:
        for number, part in enumerate(self.inner):
            part.load_state_dict(state[number])


class Flat(Container):
    """The same with names in the place of numbers, as torchtitan's container flattens its state dict."""

    def state_dict(self) -> dict[Any, Any]:
        flat = {}
        for number, part in enumerate(self.inner):
            for parameter, values in enumerate(part.state.values()):
                flat |= {f"state.{number}.{parameter}.{key}": value for key, value in values.items()}
            flat[f"lr.{number}"] = part.param_groups[0]["lr"]
        return flat

    def load_state_dict(self, state: Any) -> None:
        for number, part in enumerate(self.inner):
            part.param_groups[0]["lr"] = state[f"lr.{number}"]
            for parameter, values in enumerate(part.state.values()):
                for key in values:
                    values[key] = state[f"state.{number}.{parameter}.{key}"]


class TwoPass(optim.Optimizer):
    """A wrapper that shares its groups with the optimizer inside, and has states of the same parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = optim.Adam(self.param_groups, lr=1e-2)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.5)
                parameter.grad.copy_(mean)
        self.base.step()

    def state_dict(self) -> dict[Any, Any]:
        return {"own": super().state_dict()["state"], **self.base.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        rest = dict(state)
        own = rest.pop("own")
        self.base.load_state_dict(rest)
        self.param_groups = self.base.param_groups
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.update({parameters[number]: values for number, values in own.items()})


class Counted(optim.AdamW):
    """A counter and a tensor on the object decide the learning rate, and are in ``state_dict()``."""

    calls, scale = 0, torch.ones(3)

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.scale = self.scale * 0.9
        for group in self.param_groups:
            group["lr"] = 1e-2 * float(self.scale[0]) / self.calls
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls, "more": {"scale": [self.scale, "x"]}}

    def load_state_dict(self, state: Any) -> None:
        rest = dict(state)
        self.calls, self.scale = rest.pop("calls"), rest.pop("more")["scale"][0]
        super().load_state_dict(rest)


class Global(optim.Optimizer):
    """State that belongs to no parameter, under a string key."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.state["all"] = {"count": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self.state["all"]["count"] += 1
        self.state["all"]["norm"] = torch.full((2,), float(self.state["all"]["count"]))
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / float(self.state["all"]["norm"][0]))


class Integers(optim.Optimizer):
    """Step counts are ints, and some names of states are too."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", 0)
                state.setdefault("nothing", None)
                state.setdefault(3, torch.zeros_like(p)).add_(p.grad)
                state.setdefault("nested", {0.5: [torch.zeros_like(p), None]})[0.5][0].add_(p.grad)
                assert type(state["step"]) is int
                state["step"] += 1
                p.sub_(state[3] + state["nested"][0.5][0], alpha=group["lr"] / state["step"])


def hooked(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    count = [0]

    def after(optimizer: optim.Optimizer, *_: object) -> None:
        count[0] += 1
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + count[0])

    optimizer.register_step_post_hook(after)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "count": count[0]})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: count.__setitem__(0, state["count"]))
    return optimizer


def copying(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_state_dict_post_hook(lambda _, state: copy.deepcopy({**state, "version": 2}))
    return optimizer


MAKES = {
    "container": lambda model: Container(list(model)),
    "flattened container": lambda model: Flat(list(model)),
    "wrapper": lambda model: TwoPass(model.parameters()),
    "attributes": lambda model: Counted(model.parameters(), lr=1e-2),
    "string key": lambda model: Global(model.parameters()),
    "hooks": hooked,
    "hook that copies": copying,
    "ints": lambda model: Integers(model.parameters()),
    "LBFGS": lambda model: optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    "LBFGS, strong Wolfe": lambda model: optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_an_optimizer_goes_on_as_the_saved_one(make: Any, used: bool, tmp_path: Path) -> None:  # noqa: FBT001
    model, other = net(), net()
    optimizer, fresh = make(model), make(other)
    train(model, optimizer, 3)
    train(other, fresh, 1 if used else 0)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": other, "optimizer": fresh})
    assert alike_in_any_order(fresh.state_dict(), optimizer.state_dict())
    train(model, optimizer, 2)
    train(other, fresh, 2)
    assert alike_in_any_order(fresh.state_dict(), optimizer.state_dict())
    assert exactly_alike(dict(other.state_dict()), dict(model.state_dict()))


def test_a_wrapped_optimizer_has_the_names_of_a_bare_one(tmp_path: Path) -> None:
    model, other = net(), net()
    wrapped, bare = Container(list(model)), optim.AdamW(other.parameters())
    train(model, wrapped, 2)
    bcp.save(tmp_path, {"model": model, "optimizer": wrapped})
    bcp.load(tmp_path, {"model": other, "optimizer": bare}, options=bcp.LoadOptions(strict=False))
    for part in range(2):
        for theirs, mine in zip(model[part].parameters(), other[part].parameters(), strict=True):
            assert alike_in_any_order(bare.state[mine], wrapped.inner[part].state[theirs])


def test_entries_of_a_wrapper_are_not_lost_in_a_bare_optimizer_without_a_word(tmp_path: Path) -> None:
    model, other = net(), net()
    optimizer = Counted(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    with pytest.raises(bcp.BcpError, match=r"own\.0\.calls"):
        bcp.load(tmp_path, {"model": other, "optimizer": optim.AdamW(other.parameters())})


class Unreadable(optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "lock": object()}


class Stranger(optim.SGD):
    def state_dict(self) -> dict[Any, Any]:
        return {**super().state_dict(), object(): 1}


@pytest.mark.parametrize(
    ("make", "words"),
    [(Unreadable, r"own\.0\.lock"), (Stranger, "object as a key")],
    ids=["value", "key"],
)
def test_entries_that_cannot_be_stored_are_refused_by_name(make: Any, words: str, tmp_path: Path) -> None:
    model = net()
    with pytest.raises(bcp.StateError, match=words):
        bcp.save(tmp_path / "ckpt", {"model": model, "optimizer": make(model.parameters(), lr=0.1)})
    assert not [*tmp_path.rglob("*.safetensors")]


def test_states_of_a_tensor_in_no_group_are_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(bcp.StateError, match="in none of its param_groups"):
        bcp.save(tmp_path / "ckpt", {"model": model, "optimizer": optimizer})


def test_an_optimizer_that_does_not_take_its_state_is_named(tmp_path: Path) -> None:
    class Picky(Counted):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError(*state)

    model, other = net(), net()
    bcp.save(tmp_path, {"model": model, "optimizer": Counted(model.parameters(), lr=1e-2)})
    with pytest.raises(bcp.StateError, match=r"load_state_dict\(\) of the Picky .* raised KeyError"):
        bcp.load(tmp_path, {"model": other, "optimizer": Picky(other.parameters(), lr=1e-2)})


def test_entries_that_the_checkpoint_lacks_are_missing_names(tmp_path: Path) -> None:
    model, other = net(), net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    states = {"model": other, "optimizer": Counted(other.parameters(), lr=1e-2)}
    before = other[0].weight.detach().clone()
    with pytest.raises(bcp.FqnMismatchError, match=r"checkpoint lacks: optimizer: own\.0\.calls"):
        bcp.load(tmp_path, states)
    assert torch.equal(other[0].weight, before)
    report = bcp.load(tmp_path, states, strict=False)
    assert report.missing == ("optimizer: own.0.calls:tree", "optimizer: own.0.more:tree")
    assert torch.equal(other[0].weight, model[0].weight)
