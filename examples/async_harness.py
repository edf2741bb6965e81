"""A training loop that is itself asynchronous: saves are tasks of a task group, and training goes on beside them."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
from anyio import to_thread
from torch import nn

import bcp


def build() -> dict[str, Any]:
    """Make what is trained."""
    model = nn.Linear(128, 128)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "extra_states": {"step": 0}}


def train_step(states: dict[str, Any]) -> None:
    """Do one step."""
    generator = torch.Generator().manual_seed(states["extra_states"]["step"])
    states["optimizer"].zero_grad()
    states["model"](torch.randn(16, 128, generator=generator)).square().mean().backward()
    states["optimizer"].step()
    states["extra_states"]["step"] += 1


async def train(states: dict[str, Any], steps: int, root: Path) -> None:
    """Train, and save every 10 steps. Returns when the last save is durable; if one fails, training fails with it."""
    async with anyio.create_task_group() as tg:
        for step in range(1, steps + 1):
            await to_thread.run_sync(train_step, states)  # keeps the event loop free
            if step % 10 == 0:
                # start() comes back when the snapshot is safe; the save itself goes on as a child of tg.
                await tg.start(partial(bcp.asave, root / f"step-{step}", states))
                print(f"step {step}: snapshot is safe, training goes on")
    print("all saves are durable")


async def main(root: Path) -> None:
    """Train for 30 steps, then see what the second checkpoint holds."""
    torch.manual_seed(0)
    trained = build()
    await train(trained, 30, root)

    states = build()
    result = await bcp.aload(root / "step-20", states)
    print(f"loaded step {states['extra_states']['step']}: {result.nbytes:,} bytes")
    for _ in range(10):
        train_step(states)
    assert torch.equal(states["model"].weight, trained["model"].weight)
    print("10 steps later it equals the training that went on")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        anyio.run(main, Path(directory))
