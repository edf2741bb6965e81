"""The accelerator of this machine, as ``torch.accelerator`` knows it. All calls that only CUDA has are here.

torch is built for one kind of accelerator: CUDA (ROCm goes by that name too), XPU, MPS, or one that a package brings.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch

__all__ = [
    "capturing",
    "devices_in_use",
    "enter_thread",
    "kind",
    "lock_pages",
    "locks_pages",
    "new_stream",
    "sleeping_event",
    "unlock_pages",
]

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def kind() -> str | None:
    """Return the type of the accelerator that torch was built for, as in ``"cuda"``. Nothing is initialised by it."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises, and does not return None
        return None
    return None if accelerator is None else accelerator.type


def devices_in_use() -> list[int]:
    """Return the devices that this process may have work on; none in a forked child.

    A CUDA device without a context is left out: to record an event on it would make one, which takes 500 MiB.
    """
    name = kind()
    if name is None:
        return []
    initialized = getattr(getattr(torch, name, None), "is_initialized", torch.accelerator.is_available)
    if not initialized():
        return []
    devices = range(torch.accelerator.device_count())
    if name != "cuda":
        return list(devices)
    return [device for device in devices if _has_context(device)]


def _has_context(device: int) -> bool:
    """Whether this process has a CUDA context on a device; there is no public name for it, and none in CPU builds."""
    exists: bool = torch._C._cuda_hasPrimaryContext(device)  # type: ignore[attr-defined]  # noqa: SLF001 -- see above
    return exists


def new_stream(device: int) -> torch.Stream | None:
    """Return a side stream of a device; None if the accelerator has one stream only, which MPS returns every time."""
    where = torch.device(kind() or "", device)
    try:
        stream, other = torch.Stream(device=where), torch.Stream(device=where)
    except RuntimeError:  # NotImplementedError is one
        return None
    return None if stream == other else stream


def sleeping_event(stream: torch.Stream) -> torch.Event:
    """Record an event on a stream, and return it. Who waits for it sleeps.

    A ``torch.Event`` of CUDA spins on a core, which training needs; that of ``torch.cuda`` can sleep. The latter works
    with streams of ``torch.cuda`` only, so it is for the host to wait, and not for other streams.
    """
    if kind() != "cuda":
        return stream.record_event()
    event = torch.cuda.Event(blocking=True)
    names = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
    event.record(torch.cuda.Stream(**names))
    return event


def enter_thread(device: int) -> None:
    """Let the calling thread, one of bcp's, work for a thread whose current device this is.

    torch captures CUDA graphs in CUDA's global mode. Meanwhile all threads are kept from calls that copies need, and
    such a call ends the capture. A thread in the thread-local mode is not kept from them. The mode is the thread's own.
    """
    torch.accelerator.set_device_index(device)
    if kind() == "cuda" and (exchange := _exchange_capture_mode()) is not None:
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


@cache
def _exchange_capture_mode() -> Callable[[object], object] | None:
    """Return the driver's function, or None where the driver is another one: ROCm, Windows."""
    try:
        function: Callable[[object], object] = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    return function


def capturing() -> bool:
    """Whether the calling thread's current stream captures a graph; torch.compile knows both calls."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def locks_pages() -> bool:
    """Whether memory that is there already can be locked for copies by the devices: CUDA's driver does so."""
    return kind() == "cuda"


def lock_pages(address: int, nbytes: int) -> bool:
    """Lock host memory for copies by the devices; False if the driver refuses. Takes about as long as writing to it.

    torch's own pinned memory is rounded up to a power of two bytes, and stays with its allocator for good. A forked
    child frees it, and CUDA aborts the child for that.
    """
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # CUDA keeps the error for the next launch of this thread, which it has no part in
        torch.zeros(1, device="cuda")
    return False


def unlock_pages(address: int) -> None:
    """Unlock memory before it goes; no copy may be under way. Its errors are those of a device that failed before."""
    torch.cuda.cudart().cudaHostUnregister(address)
