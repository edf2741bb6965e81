"""What the order of copies is made of, on a machine that need not have a device: stand-ins write a log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bcp.errors import InputError
from bcp.runtime import device
from bcp.runtime.device import Caller, Lanes, Mark, accelerators, on_side_stream, stream_count

pytestmark = pytest.mark.anyio


class Stream:
    """A stream of a device."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.device_index = int(name[-1])

    def record_event(self) -> Event:
        self.log.append(f"mark {self.name}")
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.stream.name}")


class Event:
    """A mark on a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.log.append(f"reach {self.stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pose as a machine with three devices; the last of them has no streams but one."""
    log: list[str] = []
    current: dict[int, Any] = {number: Stream(f"caller {number}", log) for number in range(3)}
    made: dict[int, Any] = {number: Stream(f"side {number}", log) for number in range(2)}

    def use(stream: Stream) -> None:
        current[stream.device_index] = stream
        log.append(f"use {stream.name}")

    posing = SimpleNamespace(
        current_device_index=lambda: 0,
        set_device_index=lambda _: None,
        current_stream=lambda number: current[number],
        set_stream=use,
        synchronize=lambda number: log.append(f"wait for device {number}"),
    )
    monkeypatch.setattr(torch, "accelerator", posing)
    monkeypatch.setattr(device, "_streams", {})
    monkeypatch.setattr(device, "kind", lambda: "cuda")
    monkeypatch.setattr(device, "new_stream", made.get)
    monkeypatch.setattr(device, "sleeping_event", Stream.record_event)
    return log


async def test_copies_are_queued_on_side_streams_and_marked_there(log: list[str]) -> None:
    async with Lanes([0, 1]) as lanes:
        with lanes.opened():
            mark = lanes.mark()
        mark.wait()
    assert log == [
        "wait for device 0",
        "wait for device 1",
        "use side 0",
        "use side 1",
        "mark side 0",
        "mark side 1",
        "use caller 0",
        "use caller 1",
        "reach side 0",
        "reach side 1",
    ]
    assert stream_count() == 2


def test_the_thread_gets_its_streams_back_when_a_copy_fails(log: list[str]) -> None:
    lanes = Lanes([1])
    with pytest.raises(RuntimeError, match="out of memory"), lanes.opened():
        raise RuntimeError("out of memory")
    assert log == ["use side 1", "use caller 1"]


async def test_a_load_that_fails_leaves_no_copy_under_way(log: list[str]) -> None:
    def fail(lanes: Lanes) -> None:
        with lanes.opened():
            lanes.mark()
            raise RuntimeError("corrupt")

    with pytest.raises(RuntimeError, match="corrupt"):
        async with Lanes([0]) as lanes:
            fail(lanes)
    assert log[-2:] == ["mark side 0", "reach side 0"]


def test_copies_of_a_save_wait_for_the_fence_and_are_waited_for(log: list[str]) -> None:
    caller = Caller(0, {number: torch.accelerator.current_stream(number) for number in range(2)})
    fence = caller.fence([1])
    assert log == ["mark caller 1"]
    with pytest.raises(RuntimeError, match="corrupt"), on_side_stream([0, 1], fence):
        raise RuntimeError("corrupt")
    assert log[1:] == [
        "wait for device 0",  # it has no fence
        "side 1 waits for caller 1",
        "use side 0",
        "use side 1",
        "mark side 0",
        "mark side 1",
        "reach side 0",
        "reach side 1",
        "use caller 0",
        "use caller 1",
    ]


def test_a_device_without_side_streams_is_waited_for_before_and_after(log: list[str]) -> None:
    with on_side_stream([2], {}):
        log.append("copy")
    assert log == ["wait for device 2", "copy", "wait for device 2"]
    assert stream_count() == 0


async def test_without_devices_there_is_nothing_to_wait_for(log: list[str]) -> None:
    async with Lanes([]) as lanes:
        with lanes.opened():
            mark = lanes.mark()
    assert mark == Mark([])
    with on_side_stream([], {}):
        pass
    assert log == []


class Placed:
    """A tensor that notes when it is asked where it is."""

    def __init__(self, where: str) -> None:
        self.device, self.asked = torch.device(where), False

    @property
    def is_cpu(self) -> bool:
        self.asked = True
        return self.device.type == "cpu"


@pytest.mark.usefixtures("log")
def test_devices_of_tensors_without_an_address_in_host_memory() -> None:
    tensors: list[Any] = [Placed("cuda:3"), Placed("cpu"), Placed("cuda"), Placed("cuda:3"), Placed("cpu")]
    assert accelerators(tensors, np.array([0, 4096, 0, 0, 0])) == [0, 3]
    assert [tensor.asked for tensor in tensors] == [True, False, True, True, True]
    assert accelerators(tensors) == [0, 3]
    assert tensors[1].asked
    assert accelerators(tensors[1:2], np.array([0])) == []
    with pytest.raises(InputError, match=r"tensors on xla:1 cannot be copied"):
        accelerators([*tensors, Placed("xla:1")])
