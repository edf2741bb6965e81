"""Save, save in the background, load: the everyday API on one page. Needs no launcher."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- everybody's name for it

import bcp


def build() -> dict[str, Any]:
    """Make what is trained: the states that a checkpoint is made of, as they are."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "extra_states": {"step": 0}}


def train(states: dict[str, Any], steps: int) -> float:
    """Train for some steps and return the last loss."""
    for _ in range(steps):
        generator = torch.Generator().manual_seed(states["extra_states"]["step"])  # data is a function of the step
        x = torch.randn(32, 64, generator=generator)
        loss = F.mse_loss(states["model"](x), x.sum(1, keepdim=True))
        states["optimizer"].zero_grad()
        loss.backward()
        states["optimizer"].step()
        states["extra_states"]["step"] += 1
    return loss.item()


def main(root: Path) -> None:
    """Train, save twice, and let a second training go on from the second checkpoint."""
    torch.manual_seed(0)
    states = build()

    train(states, 10)
    result = bcp.save(root / "step-10", states)  # durable when it returns
    print(f"step-10: {result.nbytes:,} bytes in {result.seconds * 1e3:.0f} ms")

    train(states, 10)
    pending = bcp.save_async(root / "step-20", states)  # returns once the snapshot is safe
    expected = train(states, 10)  # changes the weights while their snapshot is being written
    result = pending.wait()
    print(f"step-20: training stood still for {result.blocking_seconds * 1e3:.0f} of {result.seconds * 1e3:.0f} ms")

    resumed = build()  # as a new process would
    bcp.load(root / "step-20", resumed)  # in place
    assert resumed["extra_states"] == {"step": 20}
    assert train(resumed, 10) == expected
    print(f"after 10 more steps both trainings have a loss of {expected}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
