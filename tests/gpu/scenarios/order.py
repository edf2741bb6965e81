"""A save has all work that was queued before it, and nothing later; a load is over when it returns."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu.scenarios.scale import (
    MIB,
    Scale,
    alike,
    assert_alike,
    assert_loads,
    backward,
    busy,
    busy_pool,
    copied,
    cycles_per_second,
    loaded,
    once,
    stream_of,
    train,
    trained,
)
from torch import nn

import bcp


class Negated(nn.Module):
    """A module whose buffers torch conjugates and negates when they are read; the reader's stream is busy then."""

    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.numbers = [torch.zeros(numel, dtype=torch.complex64, device="cuda") for _ in range(2)]
        self.register_buffer("conj", torch.conj(self.numbers[0]))
        self.register_buffer("neg", torch.conj(self.numbers[1]).imag)
        self.register_state_dict_pre_hook(lambda *_: busy(seconds))

    def write(self, value: float) -> None:
        for numbers in self.numbers:
            numbers.fill_(complex(value, value))


class Scaler:
    """A Stateful that reads a tensor of the device, as a GradScaler does."""

    def __init__(self) -> None:
        self.scale = torch.zeros(1, device="cuda")
        self.read = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale.item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.read = state["scale"]


class Written:
    """States of one kind on a device, which a scenario overwrites."""

    def __init__(self, kind: str, scale: Scale) -> None:
        self.kind = kind
        self.plain = torch.zeros(scale.numel, device="cuda")
        self.scaler = Scaler()
        self.module = Negated(scale.numel // 4, 2 * scale.seconds)
        self.states: dict[str, Any] = {
            "model": {"model": {"w": self.plain}},
            "extra": {"model": {"w": torch.zeros(3)}, "extra_states": {"e": self.plain}},
            "stateful": {"model": {"w": torch.zeros(3, device="cuda")}, "extra_states": {"s": self.scaler}},
            "conjugate": {"model": self.module},
        }[kind]

    def write(self, value: float) -> None:
        self.plain.fill_(value)
        self.scaler.scale.fill_(value)
        self.module.write(value)

    def assert_saved(self, path: Path, value: float) -> None:
        """Compare the checkpoint with the value."""
        plain = torch.full(self.plain.shape, value)
        if self.kind == "model":
            assert_alike(loaded(path, {"w": plain}), {"w": plain})
        elif self.kind == "extra":
            found = {"e": torch.zeros(plain.shape)}
            bcp.load(path, {"model": {"w": torch.zeros(3)}, "extra_states": found})
            assert alike(found["e"], plain)
        elif self.kind == "stateful":
            bcp.load(path, self.states)
            assert self.scaler.read == value
        else:
            numbers = torch.full(self.module.numbers[0].shape, complex(value, value))
            wanted = {"conj": torch.conj(numbers), "neg": torch.conj(numbers).imag}
            assert_alike(loaded(path, wanted), wanted)


def written_before_and_after(path: Path, scale: Scale, *, kind: str, own: bool) -> None:
    """The stream is busy, then writes; the save follows, and the caller overwrites everything at once."""
    written = Written(kind, scale)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream_of(own=own)):
        for value in (5.0, 6.0):  # the second save has its plan already
            busy(scale.seconds)
            written.write(value)
            pending = bcp.save(path / str(value), written.states, async_checkpoint=True)
            written.write(99.0)
            pending.wait()
            torch.cuda.synchronize()
    for value in (5.0, 6.0):
        written.assert_saved(path / str(value), value)


def trained_before_and_after(path: Path, scale: Scale, *, own: bool) -> None:
    states = trained(scale)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream_of(own=own)):
        for _ in range(2):
            busy(3 * scale.seconds)  # longer than it takes to queue the steps
            train(states, scale, 2)
            pending = bcp.save(path, states, async_checkpoint=True, overwrite=True)
            wanted = copied(states)  # on the same stream: the values at the save
            train(states, scale, 2)
            pending.wait()
            assert_loads(path, wanted, scale)


# -- lazy snapshots


def lazy_beside_forward_and_backward(path: Path, scale: Scale) -> None:
    states = trained(scale)
    bcp.prepare(states).wait()
    for number in range(3):
        wanted = copied(states)
        busy(scale.seconds)  # the copies wait for the fence behind it
        pending = bcp.save(path / str(number), states, async_checkpoint=True, snapshot="lazy")
        train(states, scale, 3)
        pending.wait()
        assert_loads(path / str(number), wanted, scale)


def a_step_waits_for_late_copies(path: Path, scale: Scale) -> None:
    """The streams of the copies are busy, those of training are not."""
    states = trained(scale)
    wanted = copied(states)
    backward(states["model"], scale)
    cycles_per_second()
    torch.cuda.synchronize()
    go_on = threading.Event()

    def late() -> None:
        assert go_on.wait(30)
        busy_pool(3 * scale.seconds)

    options = bcp.SaveOptions(edit=once("d2h", late), part_bytes=MIB)
    pending = bcp.save(path, states, async_checkpoint=True, snapshot="lazy", options=options)
    go_on.set()
    states["optimizer"].step()
    report = pending.wait()
    assert report.step_wait_seconds > 0
    assert_loads(path, wanted, scale)


# -- loads


def kernel_after_a_load(path: Path, scale: Scale) -> None:
    """The side streams are busy during the load; a kernel of the caller reads at once."""
    target = torch.zeros(scale.numel, device="cuda")
    bcp.save(path, {"model": {"w": torch.full((scale.numel,), 5.0)}})
    busy(scale.seconds)
    options = bcp.LoadOptions(edit=once("h2d", lambda: busy_pool(scale.seconds)))
    bcp.load(path, {"model": {"w": target}}, options=options)
    assert alike(target.add(0), torch.full((scale.numel,), 5.0))


class Hooked(nn.Module):
    """A module whose state_dict hook makes its tensors anew."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((numel,), 5.0).to("cuda"))
        self.register_state_dict_post_hook(lambda _, state, prefix, __: self._anew(state, prefix))

    def _anew(self, state: dict[str, Any], prefix: str) -> None:
        state[f"{prefix}w"] = state[f"{prefix}w"].detach().clone()


def _load_on_an_own_stream(path: Path, scale: Scale, states: dict[str, Any]) -> torch.cuda.Stream:
    """Load while the default stream is busy; return the caller's stream, which does not wait for it."""
    stream = torch.cuda.Stream()
    busy(scale.seconds)
    edit = once("h2d", lambda: busy(scale.seconds, torch.cuda.default_stream()))
    with torch.cuda.stream(stream):
        bcp.load(path, states, options=bcp.LoadOptions(edit=edit))
    return stream


def kernel_after_a_load_with_hooks(path: Path, scale: Scale) -> None:
    module = Hooked(scale.numel)
    torch.cuda.synchronize()
    bcp.save(path, {"model": module})
    module.w.data.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(_load_on_an_own_stream(path, scale, {"model": module})):
        found = module.w.detach().add(0).cpu()
    assert alike(found, torch.full((scale.numel,), 5.0))


def kernel_after_a_load_of_a_learning_rate(path: Path, scale: Scale) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(scale.numel, device="cuda"))
    optimizer = torch.optim.AdamW([model.w], lr=torch.tensor(0.5, device="cuda"), capturable=True, foreach=False)
    model.w.grad = torch.ones_like(model.w)
    optimizer.step()
    torch.cuda.synchronize()
    states = {"model": model, "optimizer": optimizer}
    bcp.save(path, states)
    optimizer.param_groups[0]["lr"].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(_load_on_an_own_stream(path, scale, states)):
        found = optimizer.param_groups[0]["lr"].add(0).item()
    assert found == 0.5


@contextmanager
def late_streams(seconds: float) -> Iterator[list[torch.cuda.Stream]]:
    """Let two threads that make a stream do so at once. The stream that is ready first is busy, the other is not."""
    made: list[torch.cuda.Stream] = []
    meet, passed = threading.Barrier(2), threading.Event()

    def make(real: Any, *args: Any, **kwargs: Any) -> Any:
        stream = real(*args, **kwargs)
        if "stream_id" in kwargs:  # an existing one, by its id
            return stream
        try:
            first = meet.wait(seconds / 4) == 0
        except threading.BrokenBarrierError:  # nobody else makes one
            first = True
        made.append(stream)
        if first:
            busy(seconds, stream)
            passed.set()
        else:
            passed.wait(10)
            time.sleep(1e-4)  # the first one returns meanwhile, and queues copies
        return stream

    generic, of_cuda, interval = torch.Stream, torch.cuda.Stream, sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # the second thread goes on before the first one has queued its copies
    with (
        mock.patch.object(torch, "Stream", lambda *args, **kwargs: make(generic, *args, **kwargs)),
        mock.patch.object(torch.cuda, "Stream", lambda *args, **kwargs: make(of_cuda, *args, **kwargs)),
    ):
        try:
            yield made
        finally:
            sys.setswitchinterval(interval)


def first_load(path: Path, scale: Scale) -> None:
    """All workers of the first load come to the device at once; no side stream exists yet. Needs a fresh process."""
    rows = scale.numel // 4 // 8
    wanted = {f"w{n:02}": torch.full((8, rows), float(n + 1)) for n in range(64)}
    bcp.save(path, {"model": wanted})
    found = {name: torch.zeros(rows, 8, device="cuda").t() for name in wanted}  # transposed: a worker takes longer
    cycles_per_second()
    torch.cuda.synchronize()
    options = bcp.LoadOptions(copy_workers=8, read_bytes=MIB)
    with late_streams(5 * scale.seconds) as made:  # longer than the load takes
        bcp.load(path, {"model": found}, options=options)
        found = {name: tensor.add(0) for name, tensor in found.items()}
    assert made, "the load made no stream: this scenario shows nothing"
    assert_alike(found, wanted)


FRESH = """
from pathlib import Path
from gpu.scenarios import order, scale
order.first_load(Path({path!r}), scale.GPU)
"""


def first_load_of_a_process(path: Path, scale: Scale) -> None:
    """Do the same in a new interpreter."""
    assert scale.real
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", FRESH.format(path=str(path))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)  # noqa: S603 -- this interpreter
    assert run.returncode == 0, run.stderr
