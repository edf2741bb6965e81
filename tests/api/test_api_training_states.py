"""The helpers of an ordinary training loop in extra states: after a load, they go on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from alike import exactly_alike
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bcp


class Training:
    """A small mixed-precision training with dropout, two schedulers in a row, an EMA of the weights and counters."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        phases = [LinearLR(self.optimizer, 0.1, total_iters=4), CosineAnnealingLR(self.optimizer, 20)]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.extra: dict[str, Any] = {
            "scheduler": SequentialLR(self.optimizer, phases, milestones=[4]),
            "scaler": self.scaler,
            "ema": AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
            "rng": bcp.RngState(),
            "step": 0,
            "seen": {"tokens": 0, "by source": {"web": [0, 0.0], ("books", 2): None}},
        }

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer, "extra_states": self.extra}

    def step(self) -> list[Any]:
        """Train one step, and return all that it shows."""
        data = torch.randn(32, 8)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (self.net(data) - data.sum(1, keepdim=True)).float().square().mean()
        if self.extra["step"] % 5 == 2:
            loss = loss * float("inf")  # the scaler leaves the step out, and halves the scale
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.extra["scheduler"].step()
        self.extra["ema"].update_parameters(self.net)
        self.extra["step"] += 1
        seen = self.extra["seen"]
        seen["tokens"] += data.numel()
        seen["by source"]["web"][1] += 0.1
        weights = [
            parameter.detach().clone() for module in (self.net, self.extra["ema"]) for parameter in module.parameters()
        ]
        return [loss.item(), self.scaler.get_scale(), self.extra["scheduler"].get_last_lr(), repr(seen), *weights]


def test_schedulers_scaler_average_counters_and_random_states_go_on(tmp_path: Path) -> None:
    training = Training(0)
    for _ in range(7):
        training.step()
    bcp.save(tmp_path, training.states)
    wanted = [training.step() for _ in range(12)]
    resumed = Training(1)
    resumed.step()
    bcp.load(tmp_path, resumed.states)
    assert resumed.extra["step"] == 7
    found = [resumed.step() for _ in range(12)]
    assert exactly_alike(found, wanted)
    assert {row[1] for row in wanted} == {4.0, 8.0}, "the scale shrinks and grows"
    assert len({row[2][0] for row in wanted}) == 12
