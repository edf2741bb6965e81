"""Prints how fast state crosses the bus, against a plain copy; `make test ARGS='-m gpu -s'`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import bcp

pytestmark = pytest.mark.gpu
GB = 1e9
RUNS = 5


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """Have 4 GB on the device: large matrices and many small tensors."""
    assert torch.cuda.is_available(), "these tests need a CUDA device; leave out `-m gpu` where there is none"
    large = {f"large{n}": torch.randn(8192, 4096, device="cuda") for n in range(28)}
    return large | {f"small{n}": torch.randn(1024 + n, device="cuda") for n in range(1000)}


def size(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def median(work: Callable[[], float]) -> float:
    work()  # the first one plans, and pins memory
    return statistics.median(work() for _ in range(RUNS))


def raw(nbytes: int, *, to_device: bool) -> float:
    """Return the seconds of one plain copy of that many bytes between pinned and device memory."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    target, source = (device, host) if to_device else (host, device)

    def work() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * nbytes / (8 * host.numel())

    return median(work)


def test_blocking_time_of_a_snapshot_against_a_plain_copy(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    nbytes, plain = size(state), raw(size(state), to_device=False)
    durable: list[float] = []

    def work() -> float:
        torch.cuda.synchronize()
        report = bcp.save(tmp_path, {"model": state}, async_checkpoint=True, overwrite=True).wait()
        durable.append(report.seconds)
        return report.blocking_seconds

    blocking = median(work)
    print(
        f"\nD2H of {nbytes / GB:.2f} GB: plain copy {nbytes / plain / GB:.1f} GB/s; blocking {blocking * 1e3:.0f} ms, "
        f"{nbytes / blocking / GB:.1f} GB/s, {plain / blocking:.2f} of the plain copy; durable after "
        f"{statistics.median(durable):.2f} s"
    )
    bcp.load(tmp_path, {"model": {name: torch.empty_like(tensor) for name, tensor in state.items()}})


def test_load_against_a_plain_copy(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    nbytes, plain = size(state), raw(size(state), to_device=True)
    bcp.save(tmp_path, {"model": state})
    first = {name: state[name].clone() for name in ("large0", "small7")}

    def work() -> float:
        for name in first:
            state[name].zero_()
        torch.cuda.synchronize()
        began = time.perf_counter()
        bcp.load(tmp_path, {"model": state})
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds = median(work)
    assert all(state[name].equal(tensor) for name, tensor in first.items())
    print(
        f"\nH2D of {nbytes / GB:.2f} GB: plain copy {nbytes / plain / GB:.1f} GB/s; load from the page cache "
        f"{nbytes / seconds / GB:.1f} GB/s, {plain / seconds:.2f} of the plain copy"
    )


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
def test_training_beside_a_save(tmp_path: Path, snapshot: str) -> None:
    width = 4096
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(24))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randn(2048, width, device="cuda", dtype=torch.bfloat16)

    def step() -> float:
        began = time.perf_counter()
        model(data).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(20):
        step()
    alone = statistics.median(step() for _ in range(50))
    states = {"model": model, "optimizer": optimizer}
    bcp.prepare(states).wait()
    found = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        began, steps = time.perf_counter(), []
        pending = bcp.save(tmp_path, states, async_checkpoint=True, overwrite=True, snapshot=snapshot)  # type: ignore[arg-type]  # one of the two
        blocking = time.perf_counter() - began
        while not pending.done():
            steps.append(step())
        seconds = time.perf_counter() - began
        report = pending.wait()
        lost = seconds - len(steps) * alone
        found.append((lost, blocking, report.step_wait_seconds, max(steps), seconds))
    lost, blocking, waited, worst, seconds = map(statistics.median, zip(*found, strict=True))
    print(
        f"\n{snapshot} snapshot of {sum(p.numel() for p in model.parameters()) * 6 / GB:.2f} GB beside steps of "
        f"{alone * 1e3:.1f} ms: blocking {blocking * 1e3:.1f} ms, step held back {waited * 1e3:.1f} ms, worst step "
        f"{worst * 1e3:.1f} ms; {lost * 1e3:.0f} ms of training lost in the {seconds:.2f} s until it was durable"
    )
    before = model[3].weight.detach().clone()
    report = bcp.save(tmp_path, states, overwrite=True)
    step()
    bcp.load(tmp_path, states)
    assert model[3].weight.equal(before), report
