"""Lets Megatron-core's buffers and optimizers, which ask for CUDA by name, run on the CPU; nothing else is changed.

Megatron allocates on ``torch.cuda.current_device()``, compares ``param.type()`` with names of CUDA types, and uses
streams and CUDA's random numbers. Under :func:`cuda_as_cpu` all of that means the CPU. Tests only: the planner has to
work without it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, Self
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _Stream:
    """A stream or an event on which nothing ever waits."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., None]:
        return _nothing


class _OnCpu(TorchFunctionMode):
    """Rewrites the devices that functions are given, and the names of types that they return."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to:
            args = (
                args[0],
                *(CPU if isinstance(arg, (str, torch.device)) and _is_cuda(arg) else arg for arg in args[1:]),
            )
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """Make CUDA mean the CPU in this thread; autograd on the CPU runs in the calling thread, so backward is covered."""
    plain: dict[str, Callable[..., Any]] = {
        "current_device": lambda *_: CPU,
        "device_count": lambda: 1,
        "default_stream": lambda *_, **__: _Stream(),
        "current_stream": lambda *_, **__: _Stream(),
        "Stream": lambda *_, **__: _Stream(),
        "Event": lambda *_, **__: _Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        **dict.fromkeys(("synchronize", "empty_cache", "set_device"), _nothing),
    }
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    with contextlib.ExitStack() as stack:
        for name, replacement in plain.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        stack.enter_context(mock.patch.object(rng, "_get_cuda_rng_state", plain["get_rng_state"]))
        stack.enter_context(mock.patch.object(rng, "_set_cuda_rng_state", plain["set_rng_state"]))
        stack.enter_context(_OnCpu())
        yield


def _is_cuda(device: object) -> bool:
    """Whether that is a CUDA device, by any of its names."""
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")  # type: ignore[call-overload]


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""
