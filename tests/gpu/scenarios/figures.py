"""What copies between a device and storage take, against plain copies of pinned memory in the same run."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from gpu.scenarios.scale import MIB, Scale, alike, assert_alike
from torch import nn

import bcp

GB = 1e9
MOST = 4_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much a figure may write.

    Attributes:
        runs: how often a figure is measured; the first run plans and pins memory, and is not counted.
        nbytes: of the state that is saved.
        raw_nbytes: of the pinned buffer of a plain copy.
    """

    runs: int
    nbytes: int
    raw_nbytes: int = 256 * MIB


def disk_speed(path: Path, nbytes: int = 256 * MIB) -> float:
    """Return the bytes a second that reach the disk."""
    data = os.urandom(MIB)
    began = time.perf_counter()
    with (path / "speed").open("wb") as file:
        for _ in range(max(nbytes // MIB, 1)):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    (path / "speed").unlink()
    return nbytes / seconds


def room(path: Path, *, seconds: float, runs: int, speed: float) -> Room:
    """Return a state that fits: into memory, into free space, and into some seconds of writing all runs."""
    limits = {
        "disk speed": seconds * speed / (runs + 1),
        "disk space": shutil.disk_usage(path).free / 4,  # the old checkpoint is there until the new one is
        "host memory": psutil.virtual_memory().available / 4,
        "device memory": torch.cuda.mem_get_info()[0] / 4,
        "most": MOST,
    }
    return Room(runs=runs, nbytes=int(min(limits.values())))


def state_of(nbytes: int) -> dict[str, torch.Tensor]:
    """Return large matrices and many small tensors on the device."""
    small, side = (1000, 4096) if nbytes > 256 * MIB else (50, 256)
    few = {f"small{n}": torch.randn(1024 + n).to("cuda") for n in range(small)}
    count = max((nbytes - size(few)) // (8 * side * side), 1)
    return {f"large{n}": torch.randn(2 * side, side, device="cuda") for n in range(count)} | few


def size(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def median(work: Callable[[], float], runs: int) -> float:
    work()  # the first one plans, and pins memory
    return statistics.median(work() for _ in range(runs))


def plain_copy(nbytes: int, room: Room, *, to_device: bool) -> float:
    """Return the seconds of plain copies of that many bytes between pinned and device memory."""
    host = torch.empty(room.raw_nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(room.raw_nbytes, dtype=torch.uint8, device="cuda")
    target, source = (device, host) if to_device else (host, device)

    def work() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * nbytes / (8 * room.raw_nbytes)

    return median(work, room.runs)


def blocking_time_of_a_snapshot(path: Path, room: Room) -> None:
    """Save in the background again and again; the last checkpoint has the state."""
    state = state_of(room.nbytes)
    nbytes, durable = size(state), []
    plain = plain_copy(nbytes, room, to_device=False)

    def work() -> float:
        torch.cuda.synchronize()
        report = bcp.save(path, {"model": state}, async_checkpoint=True, overwrite=True).wait()
        durable.append(report.seconds)
        return report.blocking_seconds

    blocking = median(work, room.runs)
    print(
        f"\nD2H of {nbytes / GB:.2f} GB: plain copy {nbytes / plain / GB:.1f} GB/s; blocking {blocking * 1e3:.0f} ms, "
        f"{nbytes / blocking / GB:.1f} GB/s, {plain / blocking:.2f} of the plain copy; durable after "
        f"{statistics.median(durable):.2f} s"
    )
    found = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    bcp.load(path, {"model": found})
    different = [name for name, tensor in state.items() if not torch.equal(found[name], tensor)]
    assert not different, different[:5]


def load_time(path: Path, room: Room) -> None:
    state = state_of(room.nbytes)
    nbytes = size(state)
    plain = plain_copy(nbytes, room, to_device=True)
    bcp.save(path, {"model": state})
    for file in path.rglob("*"):  # a save leaves nothing in the page cache
        if file.is_file():
            file.read_bytes()
    first = {name: tensor.cpu() for name, tensor in state.items()}

    def work() -> float:
        for tensor in state.values():
            tensor.zero_()
        torch.cuda.synchronize()
        began = time.perf_counter()
        bcp.load(path, {"model": state})
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds = median(work, room.runs)
    print(
        f"\nH2D of {nbytes / GB:.2f} GB: plain copy {nbytes / plain / GB:.1f} GB/s; load from the page cache "
        f"{nbytes / seconds / GB:.1f} GB/s, {plain / seconds:.2f} of the plain copy"
    )
    assert_alike(state, first)


def many_small_tensors(path: Path, scale: Scale, room: Room, *, most: float) -> None:
    """Save many small tensors; ``most`` is the bound of the blocking time in seconds a tensor."""
    values = torch.arange(1000 * scale.small, dtype=torch.float32).to("cuda").split(1000)
    state = {f"s{n}": tensor.clone() for n, tensor in enumerate(values)}
    host = torch.empty(1000 * scale.small, pin_memory=True)

    def timed(copy: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def together() -> object:
        return host.copy_(torch.cat([*state.values()]), non_blocking=True)

    def one_by_one() -> None:
        for target, source in zip(host.split(1000), state.values(), strict=True):
            target.copy_(source, non_blocking=True)

    def work() -> float:
        torch.cuda.synchronize()
        return bcp.save(path, {"model": state}, async_checkpoint=True, overwrite=True).wait().blocking_seconds

    plain, single = (median(lambda copy=copy: timed(copy), room.runs) for copy in (together, one_by_one))
    blocking = median(work, room.runs)
    print(
        f"\n{scale.small} tensors of 4 kB: cat and one copy {plain * 1e3:.1f} ms; one by one {single * 1e3:.1f} ms; "
        f"blocking {blocking * 1e3:.1f} ms, {blocking / scale.small * 1e6:.1f} us a tensor"
    )
    found = {name: torch.zeros(1000) for name in state}
    bcp.load(path, {"model": found})
    assert alike(torch.cat([*found.values()]), torch.arange(1000 * scale.small, dtype=torch.float32))
    assert blocking <= most * scale.small, (
        f"{blocking:.3f} s; more than {most * 1e6:.0f} us a tensor, so they are not batched"
    )


# -- training beside a save


class Training:
    """A model, its optimizer, and steps that take some milliseconds each."""

    def __init__(self, scale: Scale, nbytes: int) -> None:
        self.real = scale.real
        width = 4096 if scale.real else 256
        depth = max(nbytes // (6 * width * width), 1)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))).to("cuda", torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True if scale.real else None)
        self.data = torch.randn(2048 if scale.real else 4, width).to("cuda", torch.bfloat16)
        self.states = {"model": self.model, "optimizer": self.optimizer}
        self.nbytes = 6 * sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> float:
        began = time.perf_counter()
        if self.real:
            self.model(self.data).float().square().mean().backward()
        else:
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - began


def worst_step(steps: Sequence[float], seconds: float, alone: float) -> float:
    """Return the longest step of those that ran beside a save."""
    assert steps, (
        f"no training step ran beside a save of {seconds:.3f} s; a step takes {alone:.3f} s alone. Save more bytes, or "
        "make the steps shorter"
    )
    return max(steps)


def training_beside_a_save(
    path: Path, scale: Scale, room: Room, *, snapshot: Any, edit: Callable[[Any], Any] = lambda graph: graph
) -> None:
    """Train while saves run; ``edit`` is that of the saves."""
    options = bcp.SaveOptions(overwrite=True, snapshot=snapshot, edit=edit)
    training = Training(scale, room.nbytes)
    for _ in range(5 * room.runs):
        training.step()
    alone = statistics.median(training.step() for _ in range(10 * room.runs))
    bcp.prepare(training.states).wait()
    found = []
    for _ in range(room.runs):
        torch.cuda.synchronize()
        began, steps = time.perf_counter(), []
        pending = bcp.save(path, training.states, async_checkpoint=True, options=options)
        blocking = time.perf_counter() - began
        while not pending.done():
            steps.append(training.step())
        seconds = time.perf_counter() - began
        report = pending.wait()
        lost = seconds - len(steps) * alone
        found.append((lost, blocking, report.step_wait_seconds, worst_step(steps, seconds, alone), seconds))
    lost, blocking, waited, worst, seconds = map(statistics.median, zip(*found, strict=True))
    print(
        f"\n{snapshot} snapshot of {training.nbytes / GB:.2f} GB beside steps of {alone * 1e3:.1f} ms: blocking "
        f"{blocking * 1e3:.1f} ms, step held back {waited * 1e3:.1f} ms, worst step {worst * 1e3:.1f} ms; "
        f"{lost * 1e3:.0f} ms of training lost in the {seconds:.2f} s until it was durable"
    )
    assert_trained_state_comes_back(path, training)


def assert_trained_state_comes_back(path: Path, training: Training) -> None:
    before = {name: tensor.detach().cpu() for name, tensor in training.model.state_dict().items()}
    bcp.save(path, training.states, overwrite=True)
    training.step()
    bcp.load(path, training.states)
    assert_alike(dict(training.model.state_dict()), before)
