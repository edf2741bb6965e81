"""How large a scenario is, and ways to make a device late."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import bcp
from bcp.runtime.staging import shared_pool
from bcp.runtime.threads import in_thread

MIB = 1 << 20
POOL = 32
"""Side streams of a device: torch hands them out in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a scenario is.

    Attributes:
        numel: elements of a large float32 tensor; bcp copies it on its own, not with its neighbours.
        small: how many small tensors there are.
        width: of the layers of a model.
        depth: how many layers a model has.
        seconds: how long a stream is kept busy.
        real: whether autograd and fused optimizers run on the device.
    """

    numel: int
    small: int
    width: int
    depth: int
    seconds: float
    real: bool


GPU = Scale(numel=4 << 20, small=20_000, width=2048, depth=4, seconds=0.4, real=True)
EMULATED = Scale(numel=80_000, small=200, width=32, depth=2, seconds=0.03, real=False)


@functools.cache
def cycles_per_second() -> float:
    """Return the speed of ``torch.cuda._sleep``. The first sleep lets an idle device raise its clock."""
    for cycles in (200_000_000, 50_000_000):
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
    return 50_000_000 / (time.perf_counter() - began)


def busy(seconds: float, stream: torch.cuda.Stream | None = None) -> None:
    """Keep a stream busy, by default the current one."""
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        torch.cuda._sleep(int(seconds * cycles_per_second()))


def busy_pool(seconds: float, device: int = 0) -> None:
    """Keep every side stream of a device busy, so that bcp's own is busy too."""
    for _ in range(POOL):
        busy(seconds, torch.cuda.Stream(device))


def stream_of(*, own: bool) -> torch.cuda.Stream:
    """Return a new stream, or the default one."""
    return torch.cuda.Stream() if own else torch.cuda.default_stream()


def once(stage: str, work: Callable[[], object]) -> Callable[[Any], Any]:
    """Return an edit of a graph: a worker thread does the work before the stage, for the first item."""
    waiting = [work]

    async def run(item: Any) -> Any:
        if waiting:
            await in_thread(waiting.pop())
        return item

    return lambda graph: graph.before(stage, bcp.extend.Stage("test", run))


def paused(go_on: threading.Event, begun: threading.Event | None = None) -> Callable[[Any], Any]:
    """Return an edit of a graph: the first item waits for an event before it is copied to the host."""

    def work() -> None:
        if begun is not None:
            begun.set()
        assert go_on.wait(30)

    return once("d2h", work)


@contextmanager
def no_room(device: int = 0) -> Iterator[None]:
    """Let a device refuse to allocate more memory than the process has reserved."""
    used, total = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(used / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def pinned_nbytes() -> int:
    """Return the bytes of page-locked memory that torch's allocator has, or bcp's pool if that is more.

    They are the same memory if bcp allocates by torch. torch 2.13 calls them allocated, earlier versions reserved.
    """
    stats = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    owned = stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0))
    return max(owned, shared_pool(pinned=True).free_nbytes)


def forget_pinned() -> None:
    """Give all free page-locked memory back: that of bcp's pool, and of torch's allocator."""
    shared_pool(pinned=True).clear()
    gc.collect()
    torch._C._host_emptyCache()


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare the bits of two tensors on the host."""
    one, other = one.detach().cpu(), other.detach().cpu()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    plain = [each.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8) for each in (one, other)]
    return torch.equal(*plain)


def assert_alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Name the tensors that differ."""
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not alike(found[name], wanted[name])]
    assert not different, f"{len(different)} of {len(wanted)} tensors differ: {different[:5]}"


def loaded(path: Any, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Load a model into tensors of the host that are like the wanted ones."""
    found = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in wanted.items()}
    bcp.load(path, {"model": found})
    return found


# -- training


def trained(scale: Scale, steps: int = 1) -> dict[str, Any]:
    """Return a model and its optimizer after some steps."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(scale.width, scale.width), nn.LayerNorm(scale.width)) for _ in range(scale.depth)]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True if scale.real else None)
    states = {"model": model, "optimizer": optimizer}
    train(states, scale, steps)
    return states


def train(states: dict[str, Any], scale: Scale, steps: int = 1) -> None:
    for _ in range(steps):
        backward(states["model"], scale)
        states["optimizer"].step()
        states["optimizer"].zero_grad()


def backward(model: nn.Module, scale: Scale) -> None:
    """Fill the gradients; autograd does not run on the emulation."""
    if scale.real:
        data = torch.randn(64, scale.width, device="cuda", dtype=torch.bfloat16)
        model(data).float().square().mean().backward()
        return
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def copied(states: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copy parameters and optimizer states to the host."""
    tensors = dict(states["model"].state_dict())
    for number, state in enumerate(states["optimizer"].state.values()):
        tensors |= {f"{number}.{name}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: tensor.detach().clone().cpu() for name, tensor in tensors.items()}


def assert_loads(path: Any, wanted: dict[str, torch.Tensor], scale: Scale) -> None:
    """Load into a model that was trained otherwise, and compare."""
    fresh = trained(scale, steps=3)
    bcp.load(path, fresh)
    assert_alike(copied(fresh), wanted)
