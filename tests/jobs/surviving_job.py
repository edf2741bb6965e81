"""A training on several ranks, one of which is killed in a step; the others save what they hold, and end.

Gradients are whole numbers, so that their sum does not depend on the number of ranks. Each step draws a random number,
as dropout does.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

import bcp

SAMPLES = 12
SAVE = 4
PATIENCE = 240.0


def make_states() -> dict[str, Any]:
    """Make the states of step 0."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {"model": model, "optimizer": optimizer, "extra_states": {"step": 0, "schedule": schedule}}


def set_gradients(model: nn.Module, step: int, samples: Sequence[int]) -> None:
    """Set the sum of the gradients of some samples of a step."""
    for number, weight in enumerate(model.parameters()):
        places = torch.arange(weight.numel()).reshape(weight.shape)
        weight.grad = torch.zeros(weight.shape)
        for sample in samples:
            weight.grad += ((places * (sample + 3) + step + number) % 7 - 3).float()


def oracle(steps: int) -> list[torch.Tensor]:
    """Return the weights of an undisturbed training in one process."""
    states = make_states()
    for step in range(1, steps + 1):
        set_gradients(states["model"], step, range(SAMPLES))
        states["optimizer"].step()
        states["extra_states"]["schedule"].step()
    return [weight.detach() for weight in states["model"].parameters()]


def main(rank: int, size: int, port: int, root: Path, node: int, steps: int, victim: int, says: Path) -> None:
    """Train up to a step, in which one rank is killed before the ranks have summed their gradients; -1 for none.

    The rank writes into ``says`` from which step it came, its random numbers, what became of the last step, and its
    weights.
    """
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "WORLD_SIZE": str(size)}
    server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store = dist.PrefixStore(f"{says.name}/{size}", server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    states = make_states()
    torch.manual_seed(rank)
    told: dict[str, Any] = {"drawn": {}}
    tiers = bcp.Tiers(folder=root / f"node-{node}", node=f"n{node}", listen="127.0.0.1", survivors=True)
    run = bcp.Run(root / "run", states, save=SAVE, durable=1000, tiers=tiers)
    try:
        with run:
            told["resumed"], told["hosts"] = run.resume(), run.resumed.hosts
            try:
                train(run, states, steps, victim, told)
            except RuntimeError:
                told["survivors"] = str(run.save_survivors(patience=PATIENCE))
                raise
    finally:
        told["weights"] = [weight.tolist() for weight in states["model"].parameters()]
        (says / f"{rank}").write_text(json.dumps(told))


def train(run: bcp.Run, states: dict[str, Any], steps: int, victim: int, told: dict[str, Any]) -> None:
    """Train from the resumed step on."""
    model, optimizer, extra = states["model"], states["optimizer"], states["extra_states"]
    rank, size = dist.get_rank(), dist.get_world_size()
    assert extra["step"] == run.resumed.step
    for step in range(run.resumed.step + 1, steps + 1):
        extra["step"] = step
        told["drawn"][step] = float(torch.rand(()))
        set_gradients(model, step, range(rank, SAMPLES, size))
        if step == steps and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        extra["schedule"].step()
        run.maybe_save(step)
