"""Scenarios of loads, of objects that are asked for their state, and of devices with one stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from real_backend import Backend
from real_support import LARGE, WAYS, all_are, busy, each, like, loaded, mixed, own_streams, same, save, scenario
from torch import nn

import bcp
from bcp.runtime import device


@scenario
def a_load_waits_for_the_caller_and_for_its_copies(late: Backend, path: Path) -> None:
    model = {name: tensor for name, tensor in mixed().items() if tensor.get_device() == 1}
    model |= {"converted": torch.zeros(1000, dtype=torch.float64, device="late:1")}
    bcp.save(path, {"model": {name: torch.full(tensor.shape, 7.0) for name, tensor in model.items()}})
    before = like(model)
    with own_streams() as streams, streams[1]:
        late.busy(0.1, 0.5)
        for name, tensor in model.items():
            tensor.fill_(5)
            before[name].copy_(tensor, non_blocking=True)
    assert torch.accelerator.current_stream(1) != streams[1]  # the work is on a stream that is not current any more
    late.delay(0.002)
    bcp.load(path, {"model": model}, options=bcp.LoadOptions(cast=True))
    assert late.pending == 0
    late.delay(0)
    assert all_are(before, 5)
    assert all_are(model, 7)


@scenario
def states_that_a_load_makes_belong_to_the_caller(late: Backend, path: Path) -> None:
    def trained(steps: int) -> dict[str, Any]:
        model = nn.Module()
        model.w = nn.Parameter(torch.ones(LARGE, device="late:1"))
        model.v = nn.Parameter(torch.ones(5, device="late:0"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, foreach=False)
        for _ in range(steps):
            for weight in model.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    old = trained(2)
    bcp.save(path, old)
    with own_streams():
        new = trained(0)
        late.delay(0.002)
        bcp.load(path, new)
        assert late.pending == 0
        late.delay(0)
        for one, other in zip(old["model"].parameters(), new["model"].parameters(), strict=True):
            assert same(one.detach(), other.detach())
            states = old["optimizer"].state[one], new["optimizer"].state[other]
            assert all(same(states[0][name], states[1][name]) for name in ("step", "exp_avg", "exp_avg_sq"))
            assert states[1]["exp_avg"].device == other.device


class Asked:
    """A Stateful that notes where it is asked, and whose ``load_state_dict`` queues a kernel."""

    def __init__(self) -> None:
        self.value = torch.zeros(9, device="late:1")
        self.seen: list[object] = []

    def state_dict(self) -> dict[str, object]:
        self._look()
        return {"value": self.value.sum().item(), "rng": torch.late.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._look()
        torch.late.set_rng_state(state["rng"])
        self.value.fill_(state["value"])

    def _look(self) -> None:
        streams = [torch.accelerator.current_stream(index) for index in (0, 1)]
        self.seen.append((torch.accelerator.current_device_index(), torch.empty(1, device="late").device, streams))


@each(*WAYS)
def objects_are_asked_where_the_caller_works(late: Backend, path: Path, how: str) -> None:
    asked = Asked()
    with own_streams() as streams:
        torch.accelerator.set_device_index(1)
        states = {"model": {"w": torch.ones(10, device="late")}, "extra_states": {"asked": asked}}
        busy(late)
        asked.value.fill_(1)
        save(path, states, how)
        assert torch.accelerator.current_device_index() == 1
        torch.late.set_rng_state(torch.zeros(16, dtype=torch.uint8), 1)
        late.delay(0.02)
        bcp.load(path, states)
        assert late.pending == 0  # the kernel that was queued is over
        assert torch.accelerator.current_device_index() == 1
        assert len(asked.seen) >= 2
        assert all(found == (1, torch.device("late", 1), streams) for found in asked.seen), asked.seen
        assert [torch.accelerator.current_stream(index) for index in (0, 1)] == streams
    assert asked.value.tolist() == [9.0] * 9
    assert [int(state[0]) for state in torch.late.get_rng_state_all()] == [1, 2]


@scenario
def random_states_of_all_devices(late: Backend, path: Path) -> None:
    bcp.save(path, {"extra_states": {"rng": bcp.RngState()}})
    late.random = [torch.zeros(16, dtype=torch.uint8) for _ in late.random]
    bcp.load(path, {"extra_states": {"rng": bcp.RngState()}})
    assert [int(state[0]) for state in late.random] == [1, 2]


# -- devices with one stream


@each("default", "refused")
def a_device_without_side_streams(late: Backend, path: Path, kind: str) -> None:
    late.side_streams(kind)
    streams, device._streams = device._streams, {}
    try:
        model = mixed()
        late.delay(0.002)
        for tensor in model.values():
            tensor.fill_(5)
        late.busy(0.1, 0.1)
        report = bcp.save(path, {"model": model})
        assert (report.streams, late.pending) == (0, 0)
        for tensor in model.values():
            tensor.fill_(9)
        report = bcp.load(path, {"model": model})
        assert (report.streams, late.pending) == (0, 0)
        assert all_are(model, 5)
        pending = bcp.save(path, {"model": model}, async_checkpoint=True, overwrite=True)
        for tensor in model.values():
            tensor.fill_(9)
        pending.wait()
        assert all_are(loaded(path, model), 5)
    finally:
        device._streams = streams
