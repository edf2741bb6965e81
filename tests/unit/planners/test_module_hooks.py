"""Hooks and overrides of ``state_dict`` and ``load_state_dict``, beside torch's own strict load."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hooked_modules import (
    REFUSED,
    TAKEN,
    Cached,
    Delegating,
    Exported,
    Fused,
    Legacy,
    Merged,
    OwnTake,
    Packed,
    PackedBelowHook,
    Unmerging,
)
from samples import sample
from torch import distributed as dist
from torch import nn

import bcp
from bcp.errors import BcpError, FqnMismatchError, MismatchError, StateError

Make = Callable[[], nn.Module]


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    """Make this process a group of one rank."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state_of(module: nn.Module) -> dict[str, Any]:
    """Copy all that a module has: tensors, and plain attributes, at every level."""
    tensors = {name: tensor.detach().clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    plain = (bool, int, float, str, list, dict, torch.Tensor)
    attributes = {
        f"{path}:{name}": value
        for path, part in module.named_modules()
        for name, value in part.__dict__.items()
        if not name.startswith("_") and isinstance(value, plain)
    }
    return {**tensors, **attributes}


def differing(state: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert state.keys() == other.keys()
    return [
        name
        for name, value in state.items()
        if not (torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name])
    ]


def twins(make: Make) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Make a source, and two equal targets with other values."""
    torch.manual_seed(1)
    source = make()
    torch.manual_seed(2)
    target = make()
    torch.manual_seed(2)
    return source, target, make()


def strict_load(source: nn.Module, target: nn.Module) -> None:
    target.load_state_dict(torch_state(source))


def torch_state(source: nn.Module) -> dict[str, Any]:
    state = source.state_dict()
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


@pytest.mark.parametrize("make", TAKEN)
def test_a_load_does_what_torchs_strict_load_does(tmp_path: Path, make: Make) -> None:
    source, target, control = twins(make)
    before = state_of(target)
    bcp.save(tmp_path / "c", {"model": source})
    report = bcp.load(tmp_path / "c", {"model": target})
    strict_load(source, control)
    assert differing(before, state_of(control))
    assert differing(state_of(target), state_of(control)) == []
    assert (report.missing, report.unexpected) == ((), ())
    torch.testing.assert_close(target(torch.ones(2, 4)), control(torch.ones(2, 4)), rtol=0, atol=0)


@pytest.mark.parametrize("make", TAKEN)
@pytest.mark.parametrize("wrap", [lambda module: {"a": [module]}, partial(torch.compile, backend="eager")])
def test_a_module_may_stand_anywhere(tmp_path: Path, make: Make, wrap: Callable[[nn.Module], Any]) -> None:
    source, target, control = twins(make)
    bcp.save(tmp_path / "c", {"model": wrap(source)})
    bcp.load(tmp_path / "c", {"model": wrap(target)})
    strict_load(source, control)
    assert differing(state_of(target), state_of(control)) == []


@pytest.mark.parametrize("make", [make for make in TAKEN if make is not Delegating])
def test_overrides_of_inner_modules_run_where_torch_runs_them(tmp_path: Path, make: Make) -> None:
    source, target, control = twins(lambda: nn.Sequential(make(), make()))
    bcp.save(tmp_path / "c", {"model": source})
    bcp.load(tmp_path / "c", {"model": target})
    strict_load(source, control)
    assert differing(state_of(target), state_of(control)) == []


@pytest.mark.parametrize("place", [lambda module: module, lambda module: {"a": [module]}])
@pytest.mark.parametrize("make", sample(TAKEN, *TAKEN[::2]))
def test_training_goes_on_as_with_torch(tmp_path: Path, make: Make, place: Callable[[nn.Module], Any]) -> None:
    source, target, control = twins(make)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (source, target, control)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if parameters:
            sum((parameter**2).sum() for parameter in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(source, optimizers[0])
    bcp.save(tmp_path / "c", {"model": place(source), "optimizer": optimizers[0]})
    bcp.load(tmp_path / "c", {"model": place(target), "optimizer": optimizers[1]})
    strict_load(source, control)
    optimizers[2].load_state_dict(optimizers[0].state_dict())
    for model, optimizer in zip((target, control), optimizers[1:], strict=True):
        step(model, optimizer)
    assert differing(state_of(target), state_of(control)) == []


def check_refused(path: Path, source: nn.Module, target: nn.Module, error: type[BcpError], words: str) -> None:
    """Check that a load raises the error, and leaves the target as it was."""
    before = state_of(target)
    bcp.save(path / "c", {"model": source})
    with pytest.raises(error, match=words) as raised:
        bcp.load(path / "c", {"model": target})
    assert not hasattr(raised.value, "__notes__")
    assert differing(before, state_of(target)) == []


@pytest.mark.parametrize("make", REFUSED)
def test_entries_that_the_module_does_not_take_are_refused_before_anything_is_written(
    tmp_path: Path, make: Make
) -> None:
    source, target, control = twins(lambda: nn.ModuleDict({"a": make(), "b": nn.Linear(2, 2)}))
    with pytest.raises(RuntimeError, match="Error"):
        strict_load(source, control)
    check_refused(tmp_path, source, target, FqnMismatchError, r"model: a\.")


@pytest.mark.parametrize("make", REFUSED)
def test_a_load_that_is_not_strict_reports_them(tmp_path: Path, make: Make) -> None:
    source, target, control = twins(make)
    bcp.save(tmp_path / "c", {"model": source})
    report = bcp.load(tmp_path / "c", {"model": target}, options=bcp.LoadOptions(strict=False))
    keys = control.load_state_dict(torch_state(source), strict=False)
    assert report.missing == tuple(f"model: {name}" for name in keys.missing_keys)
    assert report.unexpected == tuple(f"model: {name}" for name in keys.unexpected_keys)
    assert differing(state_of(target), state_of(control)) == []


def test_a_state_dict_as_the_target_gets_every_entry(tmp_path: Path) -> None:
    source, target, _ = twins(Exported)
    bcp.save(tmp_path / "c", {"model": source})
    state = target.state_dict()
    bcp.load(tmp_path / "c", {"model": state})
    assert torch.equal(state["w_t"], source.state_dict()["w_t"])


def test_hooks_get_live_entries_where_the_checkpoint_lacks_some(tmp_path: Path) -> None:
    source, target, _ = twins(Fused)
    state = torch_state(source)
    del state["out.b"]
    bcp.save(tmp_path / "c", {"model": state})
    kept = target.b.detach().clone()
    report = bcp.load(tmp_path / "c", {"model": target}, options=bcp.LoadOptions(strict=False))
    assert report.missing == ("model: out.b",)
    assert torch.equal(target.q, source.q)
    assert torch.equal(target.k, source.k)
    assert torch.equal(target.b, kept)


def test_names_may_change_on_the_way_to_a_hook(tmp_path: Path) -> None:
    source, target, control = twins(Legacy)
    bcp.save(tmp_path / "c", {"model": nn.ModuleDict({"net": source})})
    bcp.load(tmp_path / "c", {"model": target}, options=bcp.LoadOptions(rename=[("^net.", "")]))
    strict_load(source, control)
    assert differing(state_of(target), state_of(control)) == []


class Faulty(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.fails = True
        self.register_load_state_dict_pre_hook(self.fail)

    @staticmethod
    def fail(module: Any, _: dict[str, Any], prefix: str, *__: Any) -> None:
        if module.fails:
            raise KeyError(prefix + "scale")


def test_an_error_of_a_hook_names_the_module_and_says_what_is_half_loaded(tmp_path: Path) -> None:
    source, target, _ = twins(lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": Faulty()}))
    bcp.save(tmp_path / "c", {"model": source})
    with pytest.raises(MismatchError, match=r"at 'b' inside it, raised KeyError: 'b\.scale'") as raised:
        bcp.load(tmp_path / "c", {"model": target})
    assert isinstance(raised.value.__cause__, KeyError)
    assert any("half loaded" in note for note in raised.value.__notes__)


class FaultyTake(OwnTake):
    def _load_from_state_dict(self, _: Any, prefix: str, *__: Any) -> None:
        raise ArithmeticError(prefix)


def test_an_error_that_a_trial_shows_comes_before_anything_is_written(tmp_path: Path) -> None:
    source, target, _ = twins(lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": FaultyTake()}))
    check_refused(tmp_path, source, target, MismatchError, r"at 'b' inside it, raised ArithmeticError")


def test_a_trial_leaves_no_trace(tmp_path: Path) -> None:
    source, target, _ = twins(PackedBelowHook)
    bcp.save(tmp_path / "c", {"model": source})
    with pytest.raises(FqnMismatchError, match=r"inner\.codes\.scale"):
        bcp.load(tmp_path / "c", {"model": target})
    assert target.calls == 0


class LateRefusal(nn.Linear):
    """Refuses a value, which no trial shows."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.kind = int(torch.randint(0, 9999, ()))

    def get_extra_state(self) -> int:
        return self.kind

    def set_extra_state(self, state: int) -> None:
        if state != self.kind:
            raise ValueError(f"kind {state}")


def test_a_value_that_the_module_refuses_is_an_error_that_says_half_loaded(tmp_path: Path) -> None:
    source, target, _ = twins(LateRefusal)
    bcp.save(tmp_path / "c", {"model": source})
    with pytest.raises(BcpError, match="ValueError: kind") as raised:
        bcp.load(tmp_path / "c", {"model": target})
    assert any("half loaded" in note for note in raised.value.__notes__)


class Odd(nn.Linear):
    def __init__(self, state: Any) -> None:
        super().__init__(2, 2)
        self.state = state

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return self.state


@pytest.mark.parametrize("state", [[1], {3: torch.ones(1)}, None])
def test_a_state_dict_without_names_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(StateError, match=r"state_dict\(\) of the Odd"):
        bcp.save(tmp_path / "c", {"model": Odd(state)})


def test_plain_modules_are_filled_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, _ = twins(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 3)))
    bcp.save(tmp_path / "c", {"model": source})
    places = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError

    refuse.__module__ = nn.Module.__module__
    monkeypatch.setattr(nn.Module, "_load_from_state_dict", refuse)
    bcp.load(tmp_path / "c", {"model": target})
    assert places == {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("make", [Cached, Merged, Unmerging])
def test_a_module_inside_of_ddps_wrapper_takes_its_state(tmp_path: Path, make: Make) -> None:
    source, target, control = twins(make)
    bcp.save(tmp_path / "c", {"model": nn.parallel.DistributedDataParallel(source)})
    bcp.load(tmp_path / "c", {"model": nn.parallel.DistributedDataParallel(target)})
    strict_load(source, control)
    assert differing(state_of(target), state_of(control)) == []


def test_quantize_dynamic(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import quantize_dynamic  # noqa: PLC0415 -- warns when it is imported

        source, target, _ = twins(lambda: quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}))
        bcp.save(tmp_path / "c", {"model": source})
        bcp.load(tmp_path / "c", {"model": target})
        assert torch.equal(source(torch.ones(2, 4)), target(torch.ones(2, 4)))


def test_packed_scales_of_a_fresh_target(tmp_path: Path) -> None:
    source, target, _ = twins(Packed)
    bcp.save(tmp_path / "c", {"model": source})
    with pytest.raises(FqnMismatchError, match=r"codes\.scale"):
        bcp.load(tmp_path / "c", {"model": target})
