"""Scenarios of torch's own accelerator API, as bcp uses it."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import torch
from real_backend import Backend
from real_support import LARGE, busy, later, own_streams, scenario, synchronize

from bcp.runtime import accelerator as _accelerator
from bcp.runtime import device

POISON = 0xCC


@scenario
def names_of_torch(_: Backend, __: Path) -> None:
    assert _accelerator.kind() == "late"
    assert _accelerator.devices_in_use() == [0, 1]
    assert not _accelerator.locks_pages()
    assert not _accelerator.capturing()
    stream = _accelerator.new_stream(1)
    assert type(stream) is torch.Stream
    assert (stream.device_index, stream.device) == (1, torch.device("late", 1))
    assert stream != torch.accelerator.current_stream(1)
    event = _accelerator.sleeping_event(stream)
    assert type(event) is torch.Event
    event.synchronize()
    assert event.query()
    caller = device.Caller.here()
    assert caller.device == 0
    assert caller.streams == {index: torch.accelerator.current_stream(index) for index in (0, 1)}
    assert [event.device for event in caller.fence([0, 1]).values()] == [torch.device("late", n) for n in (0, 1)]


@scenario
def devices_and_streams_belong_to_threads(_: Backend, __: Path) -> None:
    side = torch.Stream(device="late:1")
    torch.accelerator.set_stream(side)
    assert torch.accelerator.current_device_index() == 1
    assert torch.accelerator.current_stream(1) == side
    found: list[object] = []

    def look() -> None:
        found.append(torch.accelerator.current_device_index())
        found.append(torch.accelerator.current_stream(1) == side)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [0, False]


@scenario
def streams_in_use_are_given_back(_: Backend, __: Path) -> None:
    mine = [torch.Stream(device="late:0"), torch.Stream(device="late:1")]
    for stream in mine:
        torch.accelerator.set_stream(stream)
    bcps = [device._side_stream(0), device._side_stream(1)]
    torch.accelerator.set_device_index(0)
    with suppress(KeyError), device._in_use(bcps):
        assert torch.accelerator.current_device_index() == 0
        assert [torch.accelerator.current_stream(index) for index in (0, 1)] == bcps
        raise KeyError
    assert torch.accelerator.current_device_index() == 0
    assert [torch.accelerator.current_stream(index) for index in (0, 1)] == mine


@scenario
def waits_leave_the_gil(late: Backend, _: Path) -> None:
    data, host = torch.zeros(9, device="late:0"), torch.zeros(9)
    stream = torch.accelerator.current_stream(0)
    waits = {
        "event": lambda: _accelerator.sleeping_event(stream).synchronize(),
        "stream": stream.synchronize,
        "device": lambda: torch.accelerator.synchronize(0),
        "copy": lambda: host.copy_(data),
        "mark": lambda: device.Mark([_accelerator.sleeping_event(stream)]).wait(),
    }
    for wait in waits.values():  # a wait that kept the lock would keep the timer from its turn for ever
        late.hold()
        data.fill_(1)
        timer = later(0.01, late.release)
        wait()
        assert late.pending == 0
        timer.join()


@scenario
def a_fence_orders_streams_of_other_threads(late: Backend, _: Path) -> None:
    data, host = torch.zeros(LARGE, device="late:1"), torch.zeros(LARGE)
    with own_streams():
        busy(late)
        data.fill_(5)
        fence = device.Caller.here().fence([1])

        def copy() -> None:
            with device.on_side_stream([1], fence):
                host.copy_(data, non_blocking=True)

        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
        assert bool((host == 5).all())


@scenario
def the_backend_runs_late(late: Backend, _: Path) -> None:
    """The tests can fail: copies do not wait by themselves, and freed memory is poisoned."""
    data, host = torch.zeros(9, device="late"), torch.zeros(9)
    side = torch.Stream(device="late")
    synchronize()
    late.hold()
    data.fill_(5)
    host.copy_(data, non_blocking=True)
    assert host.tolist() == [0] * 9
    data.fill_(6)
    late.release()
    torch.accelerator.synchronize()
    assert host.tolist() == [5] * 9
    with side:
        late.busy(10, 10)  # until the next copy on the other stream is done
        host.copy_(data, non_blocking=True)
    del data
    torch.zeros(99, device="late").copy_(torch.ones(99))  # of another size: it does not get the same memory
    side.synchronize()
    assert host.view(torch.uint8).tolist() == [POISON] * 36
    late.busy(10, 10)
    data = torch.ones(9, device="late")
    with side:
        host.copy_(data, non_blocking=True)
    synchronize()
    assert host.tolist() != [1] * 9
    late.hold()
    torch.zeros(9, device="late").copy_(torch.ones(9), non_blocking=True)
    late.release()
    torch.accelerator.synchronize()
    assert "freed before it was copied" in late.defects()
