"""The registry of scenarios on the real accelerator, and helpers that they share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from real_backend import Backend

import bcp

__all__ = [
    "LARGE",
    "MIB",
    "SCENARIOS",
    "WAYS",
    "all_are",
    "busy",
    "each",
    "later",
    "like",
    "loaded",
    "mixed",
    "own_streams",
    "patched",
    "same",
    "save",
    "scenario",
    "synchronize",
]

Scenario = Callable[[Backend, Path], None]
SCENARIOS: dict[str, Scenario] = {}
MIB = 1 << 20
LARGE = 300_000  # elements of a tensor that no other is copied with
WAYS = ("save", "background", "asave")


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def each(*values: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a scenario of each value, which is the last argument."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for value in values:
            SCENARIOS[f"{function.__name__}[{value}]"] = lambda late, path, value=value: function(late, path, value)
        return function

    return register


def synchronize() -> None:
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


@contextmanager
def own_streams() -> Iterator[list[torch.Stream]]:
    """Let the caller work on a stream of its own on each device; its current device is 0."""
    synchronize()
    with ExitStack() as stack:
        streams = [torch.Stream(device=f"late:{index}") for index in range(torch.accelerator.device_count())]
        for stream in streams:
            stack.enter_context(stream)
        torch.accelerator.set_device_index(0)
        yield streams


def busy(late: Backend) -> None:
    """Keep the caller's streams busy until bcp's copies are queued, and could have run if they waited for nothing."""
    here = torch.accelerator.current_device_index()
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.set_device_index(index)
        late.busy()
    torch.accelerator.set_device_index(here)


def save(path: Path, states: Any, how: str = "save", after: Callable[[], object] = int, **options: Any) -> Any:
    """Save in one of the ways, and call ``after`` as soon as the caller may go on."""
    if how == "asave":
        report = asyncio.run(bcp.asave(path, states, **options))
        after()
        return report
    pending = bcp.save(path, states, async_checkpoint=how == "background", **options)
    after()
    return pending.wait() if how == "background" else pending


def mixed() -> dict[str, torch.Tensor]:
    """Return tensors of two devices: large ones, small ones that are copied together, and one with other strides."""
    model = {f"large{n}": torch.zeros(LARGE, device=f"late:{n % 2}") for n in range(4)}
    model |= {f"small{n}": torch.zeros(n % 7 + 1, device=f"late:{n % 2}") for n in range(40)}
    return model | {"odd": torch.zeros(500, 300, device="late:0").t()}


def like(tensors: dict[str, torch.Tensor], where: str | None = None) -> dict[str, torch.Tensor]:
    """Return zeros of the same shapes, in host memory or on one device."""
    return {name: torch.zeros(t.shape, dtype=t.dtype, device=where or "cpu") for name, t in tensors.items()}


def loaded(path: Path, tensors: dict[str, torch.Tensor], kind: str = "model") -> dict[str, torch.Tensor]:
    found = like(tensors)
    bcp.load(path, {kind: found})
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors are equal, bit by bit, wherever they are."""
    rows = [tensor.cpu().resolve_conj().resolve_neg().contiguous().view(-1) for tensor in (one, other)]
    return one.shape == other.shape and torch.equal(*(row.view(torch.uint8) for row in rows))


def all_are(tensors: dict[str, torch.Tensor], value: float) -> bool:
    wrong = [name for name, tensor in tensors.items() if not bool((tensor.cpu() == value).all())]
    assert not wrong, f"not {value}: {wrong}"
    return True


def later(seconds: float, function: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, function)
    timer.start()
    return timer


@contextmanager
def patched(owner: Any, name: str, value: object) -> Iterator[None]:
    """Put a value in the place of an attribute."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
