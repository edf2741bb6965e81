"""A training of one process in a :class:`bcp.Run` at any URL.

``stored_run.py URL OPTIONS STEPS [KILLED]``. OPTIONS are the storage options as JSON. The process kills itself while
the save of step KILLED is on its way. Else it prints the step from which the run was resumed, and a digest of the
weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

import torch
from torch import nn

import bcp

SAVE_EVERY, KEEP = 2, 2


class Training:
    """A training with dropout, whose weights depend on the random state of every step."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self) -> None:
        """Train one step."""
        self.model(torch.rand(4, 8)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        """Return a digest of the weights."""
        weights = torch.cat([weight.detach().flatten() for weight in self.model.parameters()])
        return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def train(url: str, options: dict[str, Any], steps: int, killed: int) -> dict[str, Any]:
    """Train to the last step; return the outcome."""
    training = Training()
    states = {"model": training.model, "optimizer": training.optimizer}
    ways = {
        "save_options": bcp.SaveOptions(storage_options=options),
        "load_options": bcp.LoadOptions(storage_options=options),
    }
    with bcp.Run(url, states, save=SAVE_EVERY, keep=KEEP, **ways) as run:
        first = run.resume()
        for step in range(first + 1, steps + 1):
            training.step()
            save = run.maybe_save(step)
            if step == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if save is not None:
                save.wait()
    return {"resumed": first, "digest": training.digest()}


if __name__ == "__main__":
    kill = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    print(json.dumps(train(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), kill)))  # noqa: T201 -- the outcome
