"""Where copies between host and device run: on a side stream, in a thread that set its device.

Only CUDA needs any of this; on the CPU every function here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import torch

__all__ = ["Fence", "cuda_devices", "on_side_stream", "record_fence"]

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


def cuda_devices(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the indices of the CUDA devices that hold any of the tensors."""
    return sorted({tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"})


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
