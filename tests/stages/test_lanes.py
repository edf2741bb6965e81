"""What is said to CUDA, on a machine that need not have any: streams and events are stand-ins that write a log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bcp.stages import device
from bcp.stages.device import Lanes, Mark, cuda_devices


class Stream:
    """A stream of a device."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __repr__(self) -> str:
        return self.name

    def synchronize(self) -> None:
        self.log.append(f"wait for {self.name}")


class Event:
    """An event that is done once somebody has waited for it."""

    log: list[str]

    def __init__(self, *, blocking: bool) -> None:
        assert blocking
        self.done = False

    def record(self, stream: Stream) -> None:
        self.stream = stream
        self.log.append(f"mark {stream}")

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True
        self.log.append(f"reach {self.stream}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    log: list[str] = []
    current: dict[int, Any] = {number: Stream(f"caller {number}", log) for number in range(2)}
    sides = [Stream(f"side {number}", log) for number in range(2)]

    def use(stream: Stream) -> None:
        current[int(stream.name[-1])] = stream
        log.append(f"use {stream}")

    monkeypatch.setattr(Event, "log", log, raising=False)
    monkeypatch.setattr(device, "_side_stream", lambda number: sides[number])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda number: current[number])
    monkeypatch.setattr(torch.cuda, "set_stream", use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda number: log.append(f"wait for device {number}"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return log


def test_copies_are_queued_on_side_streams_and_marked_there(log: list[str]) -> None:
    with Lanes([0, 1]) as lanes:
        lanes.settle()
        with lanes.opened():
            mark = lanes.mark()
        assert not mark.reached
        mark.wait()
        assert mark.reached
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
        "wait for side 0",
        "wait for side 1",
    ]


def test_the_thread_gets_its_streams_back_when_a_copy_fails(log: list[str]) -> None:
    lanes = Lanes([1])
    with pytest.raises(RuntimeError, match="out of memory"), lanes.opened():
        raise RuntimeError("out of memory")
    assert log == ["use side 1", "use caller 1"]


def test_a_load_that_fails_leaves_no_copy_under_way(log: list[str]) -> None:
    def fail(lanes: Lanes) -> None:
        with lanes.opened():
            lanes.mark()
            raise RuntimeError("corrupt")

    with pytest.raises(RuntimeError, match="corrupt"), Lanes([0]) as lanes:
        fail(lanes)
    assert log[-1] == "wait for side 0"


def test_without_devices_there_is_nothing_to_wait_for(log: list[str]) -> None:
    with Lanes([]) as lanes:
        lanes.settle()
        with lanes.opened():
            mark = lanes.mark()
    assert mark == Mark()
    assert mark.reached
    assert log == []


class Placed:
    """A tensor that notes when it is asked where it is."""

    def __init__(self, where: str) -> None:
        self.device, self.asked = torch.device(where), False

    @property
    def is_cuda(self) -> bool:
        self.asked = True
        return self.device.type == "cuda"


def test_devices_of_tensors_without_an_address_in_host_memory() -> None:
    tensors: list[Any] = [Placed("cuda:3"), Placed("cpu"), Placed("cuda"), Placed("cuda:3"), Placed("cpu")]
    assert cuda_devices(tensors, np.array([0, 4096, 0, 0, 0])) == [0, 3]
    assert [tensor.asked for tensor in tensors] == [True, False, True, True, True]
    assert cuda_devices(tensors) == [0, 3]
    assert tensors[1].asked
    assert cuda_devices(tensors[1:2], np.array([0])) == []
