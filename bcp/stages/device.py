"""Where copies between host and device run: on a side stream, in a thread that set its device.

Only CUDA needs any of this; on the CPU every function here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import torch

from bcp.plan.columns import Ints

__all__ = ["SMALL_BYTES", "Fence", "Lanes", "Mark", "cuda_devices", "on_side_stream", "record_fence"]

SMALL_BYTES = 1 << 18
"""Below this a tensor on a device is copied together with its neighbours: each call costs some us on its own."""

Fence = Mapping[int, "torch.cuda.Event"]
"""For each CUDA device, the point in the caller's stream after which the tensors are what the caller sees."""


def record_fence() -> Fence:
    """Mark the work that the calling thread has queued so far; call it in the thread that trains."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    device = torch.cuda.current_device()
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return {device: event}


def cuda_devices(tensors: Sequence[torch.Tensor], address: Ints | None = None) -> list[int]:
    """Return the indices of the CUDA devices that hold any of the tensors.

    Args:
        tensors: live memory, on any device.
        address: int64[n], where they lie in host memory, or 0; None where that is not known. Of thousands of tensors,
            those that have one need not be asked: 0.3 us each.

    """
    if address is not None:
        tensors = [tensors[row] for row in np.flatnonzero(address == 0).tolist()]
    return sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return bcp's own stream on a device."""
    return torch.cuda.Stream(device)


@contextmanager
def on_side_stream(devices: Sequence[int], fence: Fence) -> Iterator[None]:
    """Queue copies on bcp's streams, after the fence; at the end wait, without the GIL, until they are done.

    The current device is thread-local in torch, so it is set here, in the worker thread. The wait is for an event of
    these copies, not for the stream, on which another worker may queue the next ones; and it sleeps, where CUDA's
    default would spin on a core that training needs.
    """
    if not devices:
        yield
        return
    streams = [_side_stream(device) for device in devices]
    current = [torch.cuda.current_stream(device) for device in devices]
    for device, stream in zip(devices, streams, strict=True):
        if device in fence:
            stream.wait_event(fence[device])
        else:
            torch.cuda.synchronize(device)
        torch.cuda.set_stream(stream)
    try:
        yield
        for stream in streams:
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
            event.synchronize()
    finally:
        for stream in current:
            torch.cuda.set_stream(stream)


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in the work that was queued on devices; without any event in it, it is reached already."""

    events: Sequence[torch.cuda.Event] = ()

    @property
    def reached(self) -> bool:
        """Whether all that was queued before is done."""
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        """Wait for it, without the GIL."""
        for event in self.events:
            event.synchronize()


class Lanes:
    """bcp's side streams on some devices, for one load: worker threads queue copies on them.

    When it is left, in whatever way, no copy is under way any more, and what was copied is there for every stream.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        """Take the devices' indices; none at all, on the CPU, and every method does nothing."""
        self.devices = tuple(devices)

    def __enter__(self) -> Self:
        """Begin with nothing queued."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is still queued: nothing, unless the load failed."""
        for device in self.devices:
            _side_stream(device).synchronize()

    def settle(self) -> None:
        """Wait for all that anybody has queued on the devices so far; call it once, before the first copy.

        The caller may still compute with the tensors that are to be overwritten, on streams that only it knows.
        """
        for device in self.devices:
            torch.cuda.synchronize(device)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Queue what the calling thread copies on the side streams; torch's current stream is thread-local."""
        before = [torch.cuda.current_stream(device) for device in self.devices]
        try:
            for device in self.devices:
                torch.cuda.set_stream(_side_stream(device))
            yield
        finally:
            for stream in before:
                torch.cuda.set_stream(stream)

    def mark(self) -> Mark:
        """Mark what is queued by now."""
        events = [torch.cuda.Event(blocking=True) for _ in self.devices]  # sleep, do not spin
        for device, event in zip(self.devices, events, strict=True):
            event.record(_side_stream(device))
        return Mark(tuple(events))
