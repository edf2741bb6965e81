"""What the ranks of ``ranks4`` do when one of them fails in the middle of a save or a load."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import bcp
from bcp.backends import resolve
from bcp.testing.storage_fakes import FaultyBackend

GUILTY = 2
NEVER = 3600.0
"""Seconds of silence after which a rank is given up: nobody here waits for them."""
Said = tuple[str, str, list[str]]


def state() -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((700_000,), float(n)) for n in range(8)}


def outcome(function: Any) -> Said:
    """Return the type, text and notes of what a call raises."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 -- the test looks at whatever it is
        return type(error).__name__, str(error), list(getattr(error, "__notes__", []))
    return "nothing", "", []


def save(path: Path, operation: str, key: str) -> Said:
    """Save where one rank's storage fails; afterwards save again, for real."""
    fault = OSError(errno.ENOSPC, "No space left on device") if dist.get_rank() == GUILTY else _nothing
    backend = FaultyBackend(resolve(path), operation, fault, key=key)
    result = outcome(
        lambda: bcp.save(backend, {"model": state()}, options=bcp.SaveOptions(part_bytes=1 << 20, timeout=NEVER))
    )
    bcp.save(path, {"model": state()})
    return result


def load(path: Path, operation: str, key: str) -> Said:
    """Load where one rank's storage fails; afterwards load again, for real."""
    bcp.save(path, {"model": state()}, overwrite=True)
    fault = OSError(errno.EIO, "Input/output error") if dist.get_rank() == GUILTY else _nothing
    backend = FaultyBackend(resolve(path), operation, fault, key=key)
    target = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    result = outcome(lambda: bcp.load(backend, {"model": target}, options=bcp.LoadOptions(timeout=NEVER)))
    bcp.load(path, {"model": target})
    assert all(torch.equal(target[name], tensor) for name, tensor in state().items())
    return result


def stage(path: Path, name: str) -> Said:
    """Save with a custom stage that fails on one rank."""

    async def fail(part: bcp.extend.HostPart) -> bcp.extend.HostPart:
        if dist.get_rank() == GUILTY:
            raise RuntimeError("a bug in a stage")
        return part

    options = bcp.SaveOptions(edit=lambda graph: graph.after(name, bcp.extend.Stage("mine", fail)), timeout=NEVER)
    return outcome(lambda: bcp.save(path, {"model": state()}, options=options))


def different_calls(path: Path) -> Said:
    """Save to another path on one rank."""
    own = path / ("b" if dist.get_rank() == GUILTY else "a")
    return outcome(lambda: bcp.save(own, {"model": state()}, options=bcp.SaveOptions(timeout=NEVER)))


async def _nothing(_: str) -> None:
    pass
