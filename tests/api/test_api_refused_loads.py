"""A load that is refused, or fails, leaves behind what it promises to, and nothing else."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from checkpoints import SECONDS, equal, flip, tensors, training
from torch import nn

import bcp

NOTE = "The target of rank 0 is half loaded"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    bcp.save(tmp_path / "c", {**training(), "extra_states": {"step": 1}})
    return tmp_path / "c"


@pytest.fixture
def collected_by_hand() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


# -- optimizers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Rprop, torch.optim.ASGD])
def test_a_refused_load_makes_no_optimizer_states(tmp_path: Path, kind: Callable[..., torch.optim.Optimizer]) -> None:
    model, target = nn.Linear(3, 4), nn.Linear(3, 5)
    optimizer, fresh = kind(model.parameters()), kind(target.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    with pytest.raises(bcp.ShapeMismatchError):
        bcp.load(tmp_path, {"model": target, "optimizer": fresh})
    assert not fresh.state
    target(torch.ones(2, 3)).sum().backward()
    fresh.step()  # with states of its own making


def test_a_load_that_fails_half_way_makes_no_optimizer_states(checkpoint: Path) -> None:
    (file,) = (checkpoint / "model").iterdir()
    flip(file, -1)
    states = training(seed=1)
    fresh = torch.optim.AdamW(states["model"].parameters())
    with pytest.raises(bcp.CorruptError):
        bcp.load(checkpoint, {"model": states["model"], "optimizer": fresh})
    assert not fresh.state


@pytest.mark.parametrize("states", ["none yet", "there"])
def test_an_optimizer_that_was_never_saved(tmp_path: Path, states: str) -> None:
    target = training(seed=1)
    bcp.save(tmp_path, {"model": training()["model"]})
    if states == "none yet":
        target["optimizer"] = torch.optim.AdamW(target["model"].parameters())
    before = tensors(target)
    with pytest.raises(bcp.FqnMismatchError, match="the optimizer, all of it"):
        bcp.load(tmp_path, target)
    assert equal(tensors(target), before)
    with pytest.warns(bcp.NothingLoadedWarning, match="nothing of 'optimizer'"):
        report = bcp.load(tmp_path, target, strict=False)
    assert "the optimizer, all of it" in report.missing


def test_an_optimizer_of_which_nothing_was_there_to_save(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(2)}, "optimizer": {}})
    assert bcp.load(tmp_path, {"model": {"w": torch.zeros(2)}, "optimizer": {}}).missing == ()


# -- values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [5, None, "text", (1, 2), MappingProxyType({"step": 0})])
def test_extra_states_that_cannot_change_are_noticed_first(checkpoint: Path, extra: object) -> None:
    target = training(seed=1)
    before = tensors(target)
    with pytest.raises(bcp.StateError, match="extra_states is a") as caught:
        bcp.load(checkpoint, {**target, "extra_states": extra})
    assert equal(tensors(target), before)
    assert NOTE not in notes(caught.value)


def test_values_that_do_not_fit_are_said_to_leave_it_half_loaded(checkpoint: Path) -> None:
    with pytest.raises(bcp.StateError, match="cannot take a loaded dict in place") as caught:
        bcp.load(checkpoint, {**training(seed=1), "extra_states": [1, 2]})
    assert NOTE in notes(caught.value)


# -- memory ------------------------------------------------------------------------------------------


def tried(checkpoint: Path, what: str, gone: threading.Semaphore) -> list[weakref.ref[torch.Tensor]]:
    """Load into a network that nobody holds when this returns; every parameter that is no more releases ``gone``."""
    model = training(seed=1)["model"]
    if what == "too wide":
        model.register_parameter("more", nn.Parameter(torch.zeros(3)))
    if what == "corrupt":
        (file,) = (checkpoint / "model").iterdir()
        flip(file, -1)
    try:
        bcp.load(checkpoint / "absent" if what == "absent" else checkpoint, {"model": model})
    except bcp.BcpError:
        assert what != "fine"
    return [weakref.ref(parameter, lambda _: gone.release()) for parameter in model.parameters()]


@pytest.mark.usefixtures("collected_by_hand")
@pytest.mark.parametrize("what", ["absent", "too wide", "corrupt", "fine"])
def test_the_target_lives_no_longer_than_its_owner_wants(checkpoint: Path, what: str) -> None:
    gone = threading.Semaphore(0)
    refs = tried(checkpoint, what, gone)
    assert all(gone.acquire(timeout=SECONDS) for _ in refs)  # bcp's own thread may let go of it a little later
