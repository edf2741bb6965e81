"""The order of copies between host and devices: bcp's own streams, and the work that they wait for.

Everything here is torch's abstraction of accelerators, so that it holds for CUDA and for others alike. Without an
accelerator every function does nothing. Whatever may block or call a driver runs in worker threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from bcp.errors import InputError
from bcp.runtime.accelerator import devices_in_use, enter_thread, kind, new_stream, sleeping_event
from bcp.runtime.process import process_lock
from bcp.runtime.threads import in_thread, in_thread_even_if_cancelled

__all__ = ["SMALL_BYTES", "Caller", "Fence", "Lanes", "Mark", "accelerators", "on_side_stream", "stream_count"]

SMALL_BYTES = 1 << 18
"""Below this a tensor on a device is copied together with its neighbours: each call costs some us on its own."""

Fence = Mapping[int, torch.Event]
"""For each device, the point in the caller's stream after which the tensors are as the caller sees them."""

_streams: dict[int, torch.Stream | None] = {}
_streams_lock = process_lock()


@dataclass(frozen=True, slots=True)
class Caller:
    """The current device of the calling thread, and its current stream on every device in use.

    Both are the thread's own in torch. A worker thread that asked for them would get device 0, and streams that nothing
    orders with the caller's.

    Attributes:
        device: index; None without an accelerator.
        streams: by device.
    """

    device: int | None = None
    streams: Mapping[int, torch.Stream] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Caller:
        """Return the calling thread."""
        devices = devices_in_use()
        if not devices:
            return cls()
        streams = {device: torch.accelerator.current_stream(device) for device in devices}
        return cls(torch.accelerator.current_device_index(), streams)

    def enter(self) -> None:
        """Let the calling thread, a worker, have the caller's current device."""
        if self.device is not None:
            enter_thread(self.device)

    @contextmanager
    def streams_in_use(self) -> Iterator[None]:
        """Let the calling thread queue work on the caller's streams: behind earlier work of the caller, before later.

        Memory that is allocated meanwhile belongs to the caller's streams too. For the time that the caller waits.
        """
        with _in_use(list(self.streams.values())):
            yield

    def fence(self, devices: Sequence[int]) -> Fence:
        """Mark the work that is queued by now on the caller's streams of these devices."""
        return {device: self.streams[device].record_event() for device in devices if device in self.streams}

    def wait(self) -> None:
        """Wait until all is done that is queued by now on the caller's streams."""
        Mark([sleeping_event(stream) for stream in self.streams.values()]).wait()

    def wait_for_copies_to(self, tensors: Sequence[torch.Tensor]) -> None:
        """Wait for the caller's streams if they may copy to or from some of the tensors, which lie in host memory.

        Copies from and to pinned memory need not be over when the call that queues them returns.
        """
        if any(map(_is_pinned, tensors)):
            self.wait()


def accelerators(tensors: Sequence[torch.Tensor], address: npt.NDArray[np.int64] | None = None) -> list[int]:
    """Return the indices of the devices that hold any of the tensors, without the CPU.

    Args:
        tensors: live memory, on any device.
        address: int64[n], their addresses in host memory, or 0; None if unknown. Tensors with an address need no call
            of torch, which takes 0.3 us each.

    Raises:
        InputError: some are on a device that is not the accelerator that torch was built for.

    """
    if address is not None:
        tensors = [tensors[row] for row in np.flatnonzero(address == 0).tolist()]
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    for device in devices:
        if device.type != kind():
            raise InputError(f"tensors on {device} cannot be copied: it is no {kind()}; move them to the CPU first")
    return sorted(device.index or 0 for device in devices)


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested and tensor.is_pinned()


def stream_count() -> int:
    """Return how many streams of its own bcp has in this process: one for each device that it copied from or to."""
    return sum(stream is not None for stream in _streams.values())


@contextmanager
def on_side_stream(devices: Sequence[int], fence: Fence) -> Iterator[None]:
    """Queue copies on bcp's streams, after the fence; at the end wait, without the GIL, until they are done.

    The wait is for an event of these copies, not for the stream, on which another worker may queue the next ones. An
    error waits too: queued copies write to a buffer that somebody else gets next.
    """
    if not devices:
        yield
        return
    for device in devices:
        _follow(device, fence)
    with _in_use(_side_streams(devices)):
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the device's own error; the first one says more
                _mark(devices).wait()
            raise
        _mark(devices).wait()


def _follow(device: int, fence: Fence) -> None:
    """Let bcp's stream of a device wait for the fence; without a stream or a fence there, wait for the whole device."""
    stream = _side_stream(device)
    if stream is None or device not in fence:
        torch.accelerator.synchronize(device)
    else:
        stream.wait_event(fence[device])


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in the work that was queued on devices; without any event in it, it is reached already."""

    events: Sequence[torch.Event] = ()

    def wait(self) -> None:
        """Wait for it, without the GIL."""
        for event in self.events:
            event.synchronize()


class Lanes:
    """bcp's streams on some devices, for one load: worker threads queue copies on them.

    When it is left, in whatever way, no copy is under way any more, and every stream sees the copied data.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = tuple(devices)

    async def __aenter__(self) -> Self:
        """Wait for all that anybody has queued on the devices so far.

        The caller may still compute with the tensors that are to be overwritten, on streams that only it knows.
        """
        if self.devices:
            await in_thread(self._settle)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.devices and error is not None:
            with suppress(RuntimeError):  # as above
                await in_thread_even_if_cancelled(self._wait)

    def _settle(self) -> None:
        for device in self.devices:
            torch.accelerator.synchronize(device)

    def _wait(self) -> None:
        self.mark().wait()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Queue the calling thread's copies on the side streams."""
        with _in_use(_side_streams(self.devices)):
            yield

    def mark(self) -> Mark:
        """Mark the work that is queued by now."""
        return _mark(self.devices)


@contextmanager
def _in_use(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """Let these be the calling thread's current streams; its current device stays."""
    if not streams:
        yield
        return
    current_device = torch.accelerator.current_device_index()
    before = [torch.accelerator.current_stream(stream.device_index) for stream in streams]
    try:
        _use(streams, current_device)
        yield
    finally:
        _use(before, current_device)


def _use(streams: Sequence[torch.Stream], device: int) -> None:
    for stream in streams:
        torch.accelerator.set_stream(stream)  # and with it the current device
    torch.accelerator.set_device_index(device)


def _mark(devices: Sequence[int]) -> Mark:
    """Mark the work that is queued on bcp's streams by now; wait for devices without streams."""
    for device in devices:
        if _side_stream(device) is None:
            torch.accelerator.synchronize(device)
    return Mark([sleeping_event(stream) for stream in _side_streams(devices)])


def _side_streams(devices: Sequence[int]) -> list[torch.Stream]:
    return [stream for stream in map(_side_stream, devices) if stream is not None]


def _side_stream(device: int) -> torch.Stream | None:
    """Return bcp's own stream on a device: one, whichever thread asks first."""
    with _streams_lock:
        if device not in _streams:
            _streams[device] = new_stream(device)
        return _streams[device]
