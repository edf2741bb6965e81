"""What the tests of the public calls share: states to save, gates in front of stages, looks at what is in storage."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from anyio import to_thread
from torch import nn

import bcp
from bcp.format.metadata import Metadata, decode_metadata
from bcp.format.receipt import decode_receipt

MIB = 1 << 20
SECONDS = 60.0
"""How long a test waits for what has to come."""


def entries(root: Path) -> list[str]:
    """Return everything below a directory, directories too, but no recordings."""
    names = (path.relative_to(root) for path in root.rglob("*"))
    return sorted(str(name) for name in names if "telemetry" not in name.parts)


def files(root: Path) -> dict[str, bytes]:
    """Return every file below a directory with its bytes, but no recordings."""
    return {name: (root / name).read_bytes() for name in entries(root) if (root / name).is_file()}


def metadata(root: Path) -> Metadata:
    return decode_metadata((root / "metadata.arrow").read_bytes(), "metadata.arrow")


def values(root: Path) -> dict[tuple[str, str], Any]:
    """Return what the receipts say of the leaves that are not tensors, as JSON data."""
    operation = metadata(root).commit.operation
    receipts = [decode_receipt(file.read_bytes(), file.name) for file in (root / "receipts").glob(f"*{operation}*")]
    return {key: json.loads(text) for receipt in receipts for key, text in receipt.objects.items()}


def flip(file: Path, byte: int, bit: int = 0) -> None:
    """Change one bit of a file; the byte may be counted from the end."""
    data = bytearray(file.read_bytes())
    data[byte] ^= 1 << bit
    file.write_bytes(data)


def model(value: float = 1.0, count: int = 1000) -> dict[str, Any]:
    return {"model": {"w": torch.full((count,), float(value))}}


def training(seed: int = 0, steps: int = 1) -> dict[str, Any]:
    """Return a small network and its AdamW, which has taken so many steps."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(steps):
        train(net, optimizer)
    return {"model": net, "optimizer": optimizer}


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step that is the same for the same parameters."""
    optimizer.zero_grad()
    net(torch.linspace(-1, 1, 32).view(4, 8)).square().sum().backward()
    optimizer.step()


def tensors(states: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of :func:`training`, by name."""
    found = {f"model.{name}": tensor for name, tensor in states["model"].state_dict().items()}
    for index, state in states["optimizer"].state_dict()["state"].items():
        found |= {f"optimizer.{index}.{name}": torch.as_tensor(tensor) for name, tensor in state.items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class Gate:
    """Holds the parts in front of a stage of the save graph until it is opened; to be used as ``edit``."""

    def __init__(self, stage: str = "upload") -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._stage = stage

    def __call__(self, graph: bcp.extend.Graph) -> bcp.extend.Graph:
        return graph.before(self._stage, bcp.extend.Stage("gate", self._wait))

    async def _wait(self, item: Any) -> Any:
        self.reached.set()
        assert await to_thread.run_sync(self.opened.wait, SECONDS, abandon_on_cancel=True)
        return item

    @property
    def options(self) -> bcp.SaveOptions:
        return bcp.SaveOptions(edit=self, part_bytes=MIB)


RUNNERS: list[Callable[[Coroutine[Any, Any, Any]], Any]] = [asyncio.run, lambda work: anyio.run(lambda: work)]
runners = pytest.mark.parametrize("run", RUNNERS, ids=["asyncio", "anyio"])


def loads(path: Path, value: float, count: int = 1000) -> bool:
    """Say whether the checkpoint is the model of that value."""
    target = model(-1, count)
    bcp.load(path, target)
    return bool(target["model"]["w"].eq(value).all())
