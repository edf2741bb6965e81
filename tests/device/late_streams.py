"""Streams and events of the emulation, as torch's generic classes and those of CUDA have them."""

from __future__ import annotations

from typing import Self

import torch
from late_machine import Lane, Point, machine


def device_index(given: object) -> int:
    """Return the index that a device, a number or a name means; None is the current one."""
    if given is None:
        return machine().device
    if isinstance(given, int):
        return machine().device if given < 0 else given
    device = torch.device(given)  # type: ignore[call-overload]
    if device.type != machine().kind:
        raise ValueError(f"expected a {machine().kind} device, got {device}")
    return machine().device if device.index is None else device.index


class Stream:
    """Stands for ``torch.Stream`` and ``torch.cuda.Stream``."""

    def __init__(
        self,
        device: object = None,
        priority: int = 0,
        *,
        lane: Lane | None = None,
        stream_id: int | None = None,
        **_: object,
    ) -> None:
        self.priority = priority
        if stream_id is not None:  # another name of a stream that is there
            lane = next(each for each in machine().lanes if each.number == stream_id)
        if lane is None:
            machine().on_stream()
            lane = machine().side_lane(device_index(device))
        self.lane = lane
        self.device_index = lane.device
        self.device = torch.device(machine().kind, lane.device)
        self.device_type = 1  # CUDA's
        self.stream_id = self.cuda_stream = self.native_handle = lane.number
        self._before: list[tuple[int, Lane]] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.lane is self.lane

    def __hash__(self) -> int:
        return hash(self.lane)

    def __repr__(self) -> str:
        return f"<late stream {self.stream_id} of {self.device}>"

    def __enter__(self) -> Self:
        self._before.append((machine().device, machine().current(self.device_index)))
        machine().choose(self.lane)
        return self

    def __exit__(self, *_: object) -> None:
        device, lane = self._before.pop()
        machine().choose(lane)
        machine().device = device

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.lane.follow(other.lane.mark())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        machine().query()
        if end := self.lane.idle():
            machine().know(end)
        return end is not None

    def is_capturing(self) -> bool:
        return self.lane.captured is not None

    def synchronize(self) -> None:
        machine().wait(self.lane.mark(), "stream synchronize")


class Event:
    """Stands for ``torch.Event`` and ``torch.cuda.Event``."""

    def __init__(self, device: object = None, *, blocking: bool = False, **_: object) -> None:
        self.blocking = blocking
        self.wanted = device
        self.point: Point | None = None

    def record(self, stream: Stream | None = None) -> None:
        lane = machine().current(device_index(self.wanted)) if stream is None else stream.lane
        self.point = lane.mark()

    def wait(self, stream: Stream | None = None) -> None:
        if self.point is not None:
            (machine().current() if stream is None else stream.lane).follow(self.point)

    def query(self) -> bool:
        machine().query()
        if self.point is None:
            return True
        if reached := self.point.flag.is_set():
            machine().know(self.point)
        return reached

    def synchronize(self) -> None:
        machine().require_parent()
        if self.point is not None:
            machine().wait(self.point, "event synchronize")
