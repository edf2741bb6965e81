"""The names of torch's modules that the emulation takes the place of, while it runs."""

from __future__ import annotations

import enum
import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import late_ops as ops
import torch
from late_cuda import of_cuda
from late_machine import Machine, emulated, machine, raw
from late_memory import Memory, address_of, memory
from late_slots import Slots
from late_streams import Event, Stream, device_index
from late_tensors import Patches, of_tensors

from bcp.runtime import accelerator as _accelerator


class _Error(enum.IntEnum):
    """Stands for ``cudaError_t``."""

    success = 0
    invalid = 1
    initialization = 3
    alreadyRegistered = 712  # noqa: N815 -- CUDA's
    notRegistered = 713  # noqa: N815 -- CUDA's


def exchange(pointer: Any) -> int:
    """Stand for the driver's ``cuThreadExchangeStreamCaptureMode``.

    In any mode but 0 the calling thread may do, while others capture, what a global capture forbids.
    """
    me, mode = threading.get_ident(), pointer._obj
    before = 1 if me in machine().relaxed else 0
    (machine().relaxed.add if mode.value else machine().relaxed.discard)(me)
    mode.value = before
    return 0


def _set_stream(stream: Stream | None) -> None:
    if stream is not None:
        machine().choose(stream.lane)


def _current(device: object = None) -> Stream:
    return Stream(lane=machine().current(device_index(device)))


def _default(device: object = None) -> Stream:
    return Stream(lane=machine().defaults[device_index(device)])


@contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


@contextmanager
def _device(device: object) -> Iterator[None]:
    before = machine().device
    machine().device = device_index(device)
    try:
        yield
    finally:
        machine().device = before


def _use(device: object) -> None:
    machine().device = device_index(device)


class _Random:
    """Random states of devices: tensors on the CPU, all different at first."""

    def __init__(self, devices: int) -> None:
        self.states = [torch.full((16,), index + 1, dtype=torch.uint8) for index in range(devices)]

    def get(self, device: object = None) -> torch.Tensor:
        return self.states[device_index(device)].clone()

    def set(self, state: torch.Tensor, device: object = None) -> None:
        self.states[device_index(device)] = state.clone()

    def get_all(self) -> list[torch.Tensor]:
        return [state.clone() for state in self.states]

    def set_all(self, states: Sequence[torch.Tensor]) -> None:
        self.states = [state.clone() for state in states]


def _of_module(this: Machine, module: ModuleType) -> Patches:
    """Return what the module of the accelerators' kind has: ``torch.cuda`` for CUDA."""
    random = _Random(this.devices)
    found = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": _current,
        "default_stream": _default,
        "set_stream": _set_stream,
        "stream": _on,
        "synchronize": lambda device=None: this.synchronize(device_index(device)),
        "current_device": lambda: this.device,
        "set_device": _use,
        "device": _device,
        "is_available": lambda: True,
        "is_initialized": lambda: not this.forked,
        "init": this.require_parent,
        "_is_in_bad_fork": lambda: this.forked,
        "device_count": lambda: this.devices,
        "get_rng_state": random.get,
        "set_rng_state": random.set,
        "get_rng_state_all": random.get_all,
        "set_rng_state_all": random.set_all,
        "is_current_stream_capturing": lambda: this.current().captured is not None,
        "host_memory_stats": memory().stats,
        "_sleep": lambda cycles: ops.sleep(cycles / 2e9),
        "empty_cache": lambda: None,
    }
    if this.kind == "cuda":
        found |= of_cuda(this)
        found["cudart"] = lambda: SimpleNamespace(
            cudaHostRegister=memory().register,
            cudaHostUnregister=memory().unregister,
            cudaError=_Error,
        )
    return {(module, name): value for name, value in found.items()}


def _of_accelerator(this: Machine) -> Patches:
    found = {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device(this.kind),  # noqa: ARG005 -- torch's name
        "device_count": lambda: this.devices,
        "current_device_index": lambda: this.device,
        "current_device_idx": lambda: this.device,
        "set_device_index": _use,
        "set_device_idx": _use,
        "device_index": _device,
        "current_stream": _current,
        "set_stream": _set_stream,
        "synchronize": lambda device=None: this.synchronize(device_index(device)),
        "empty_host_cache": memory().empty_host_cache,
        "empty_cache": lambda: None,
    }
    patches: Patches = {(torch.accelerator, name): value for name, value in found.items()}
    patches |= {(torch, "Stream"): Stream, (torch, "Event"): Event}
    c = torch._C
    patches |= {(c, name): memory().empty_host_cache for name in ("_host_emptyCache", "_accelerator_emptyHostCache")}
    patches |= {(c, "_cuda_hasPrimaryContext"): lambda _: True, (c, "_cuda_getDevice"): lambda: this.device}
    return patches


class _Map(mmap.mmap):
    """Host memory that says when it goes."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls, *args, **kwargs)
        if (known := emulated()) is None or getattr(raw, "on", False) or known.forked:
            return made
        where = memory()
        try:
            low = address_of(made)
        except (ValueError, TypeError):  # read-only
            return made
        high, key = low + len(made), id(made)

        def gone(_: object = None) -> None:  # before the memory goes
            if _watched.pop(key, None) is not None:
                where.unmapped(low, high)

        _watched[key] = weakref.ref(made, gone), gone
        return made

    def close(self) -> None:
        if id(self) in _watched:
            _watched[id(self)][1]()
        super().close()

    def __exit__(self, *_: object) -> None:
        self.close()


_watched: dict[int, Any] = {}


class Patched:
    """Puts values in the place of attributes; takes them back."""

    def __init__(self, patches: Patches) -> None:
        self._before: list[tuple[Any, str, object]] = []
        self._slots = Slots(torch.Tensor)
        for (owner, name), value in patches.items():
            self._before.append((owner, name, vars(owner).get(name, self)))
            setattr(owner, name, value)

    def undo(self) -> None:
        for owner, name, value in reversed(self._before):
            if value is self:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._slots.restore()


_tensor_patches: dict[str, Patches] = {}


def patch(this: Machine, _memory: Memory) -> Patched:
    """Put the emulation in the place of torch's names."""
    if this.kind not in _tensor_patches:
        _tensor_patches[this.kind] = of_tensors(this.kind)
    module = getattr(torch, this.kind)
    patches = _tensor_patches[this.kind] | _of_module(this, module) | _of_accelerator(this)
    if this.kind == "cuda":
        patches[_accelerator, "_exchange_capture_mode"] = lambda: exchange
    return Patched(patches | {(mmap, "mmap"): _Map})
