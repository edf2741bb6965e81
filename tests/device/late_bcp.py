"""What bcp does with memory of the host, without torch: buffers that go back to the pool, and plain copies."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from late_machine import Machine

from bcp.runtime import staging
from bcp.stages import memcpy as plain


def of_bcp(this: Machine) -> dict[tuple[object, str], object]:
    """Watch the pool of staging buffers and plain copies; names that bcp does not have any more are left out."""
    patches: dict[tuple[object, str], object] = {}
    if hasattr(staging.Lease, "give"):
        patches[staging.Lease, "give"] = _given(this, staging.Lease.give)
    if hasattr(staging.StagingPool, "_end"):
        patches[staging.StagingPool, "_end"] = _ended(this, staging.StagingPool._end)
    for name, module in list(sys.modules.items()):
        if name.startswith("bcp.") and getattr(module, "move", None) is plain.move:
            patches[module, "move"] = _moved(this, plain.move)
    return patches


def check_idle(this: Machine, buffer: torch.Tensor) -> None:
    """Record it if a copy that is under way uses a buffer that nobody is said to use."""
    start = buffer.data_ptr()
    this.use_host(start, start + buffer.nbytes, "a staging buffer is given back", write=True)


def _given(this: Machine, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def give(self: Any, buffer: torch.Tensor) -> Any:
        if id(buffer) in self.out:
            check_idle(this, buffer)
        return real(self, buffer)

    return give


def _ended(this: Machine, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def end(self: Any, lease: Any, **kwargs: Any) -> Any:
        for buffer in list(lease.out.values()):
            check_idle(this, buffer)
        return real(self, lease, **kwargs)

    return end


def _moved(this: Machine, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def move(targets: Any, sources: Any, nbytes: Any) -> Any:
        if this.flight:
            for target, source, size in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
                this.use_host(source, source + size, "bcp reads memory", write=False)
                this.use_host(target, target + size, "bcp writes memory", write=True)
        return real(targets, sources, nbytes)

    return move
