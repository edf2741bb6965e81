"""Accelerators that run on the CPU, and late: for tests of order and lifetime.

::

    with accelerators("cuda", devices=2, seed=7) as machine:
        weight = torch.ones(9, device="cuda")       # memory of the host that poses as a device's
        with torch.cuda.stream(torch.cuda.Stream()):
            weight.fill_(2)                         # queued; a thread does it later
            bcp.save(path, {"model": {"w": weight}})
    assert not machine.defects

Copies, kernels and events run in stream order, each after a random delay. Whatever torch does with a posing tensor is
queued on the calling thread's current stream. Work that no event and no wait orders is a defect, found when it is
queued: it does not depend on how threads are scheduled.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from late_bcp import of_bcp
from late_machine import Graph, Machine, machine
from late_machine import _machines as machines
from late_memory import POISON, Memory, as_host, memory
from late_memory import _memories as memories
from late_ops import launch, sleep
from late_streams import Event, Stream
from late_torch import Patched, patch

__all__ = [
    "POISON",
    "Event",
    "Graph",
    "Machine",
    "Stream",
    "accelerators",
    "as_host",
    "launch",
    "machine",
    "memory",
    "sleep",
]

STORES = ("_pools", "_streams", "_side_streams", "_lanes")
"""Names of dicts in modules of bcp that outlive an operation."""


@contextmanager
def accelerators(kind: str = "cuda", devices: int = 2, seed: int = 0, slow: float = 0.002) -> Iterator[Machine]:
    """Emulate accelerators until the block ends.

    Args:
        kind: ``"cuda"`` or ``"xpu"``; of another kind than CUDA ``torch.cuda`` knows nothing.
        devices: how many.
        seed: of the random delays.
        slow: their mean, in seconds, for a slow stream.

    """
    if machines:
        raise RuntimeError("accelerators are emulated already")
    import bcp  # noqa: F401, PLC0415 -- its modules are looked at

    _forget()
    gc.collect()  # what earlier tests left would be freed inside
    this = Machine(kind, devices, seed, slow)
    memories.append(Memory(this))
    machines.append(this)
    patched = [patch(this, memory()), Patched(of_bcp(this))]
    try:
        yield this
    finally:
        if not this.forked:
            this.final = this.defects
            _forget()
            this.close()
        memory().close()
        for each in reversed(patched):
            each.undo()
        memories.pop()
        machines.pop()
        _outlive()


def _outlive() -> None:
    """Let memory that somebody still holds, as a traceback, end later without the emulated driver of its lock."""
    vars(sys.modules["bcp.runtime.staging"])["_mapped"].clear()


def _forget() -> None:
    """Let bcp forget the streams and the buffers that it keeps."""
    for name, module in list(sys.modules.items()):
        if name.startswith(
            (
                "bcp.stages",
                "bcp.runtime.staging",
                "bcp.runtime.device",
                "bcp.runtime.accelerator",
                "bcp._save",
                "bcp._load",
                "bcp._calls",
                "bcp._workflow",
            )
        ):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == name:
                    value.cache_clear()
                elif attribute in STORES and isinstance(value, dict):
                    value.clear()
