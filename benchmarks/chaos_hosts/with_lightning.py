"""The job of Lightning: a small net with dropout, and a dataloader that keeps its position."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import bcp
from bcp.integrations.lightning import BcpCheckpoint
from benchmarks.chaos_hosts.job import Life
from benchmarks.chaos_job import GRACE, KEPT, RUN_STEPS, SAVE_EVERY


class Net(LightningModule):
    """Two layers, and a learning rate that changes at each step."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(dropout), torch.nn.Linear(32, 1))
        self.steps = 0

    def training_step(self, batch: Any) -> Any:
        """Return the loss of a batch."""
        self.steps += 1
        return (self.net(batch[0]).squeeze(-1) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        """Return AdamW and a scheduler."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(out: Path, *, native: bool) -> Life:
    """Train to the end, from the newest checkpoint if there is one.

    Lightning saves no random states of its own, so its own checkpoints are tried without dropout. An epoch of 6 batches
    ends between two saves.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.rand(24, 16, generator=made), torch.rand(24, generator=made))
    torch.manual_seed(2)
    module, loader = Net(0.0 if native else 0.2), StatefulDataLoader(data, batch_size=4, shuffle=True)
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"max_steps": RUN_STEPS, "accelerator": "cpu", "devices": 1, "deterministic": True}
    if native:
        save = ModelCheckpoint(
            dirpath=str(out),
            filename="at-{step}",
            every_n_train_steps=SAVE_EVERY,
            save_top_k=KEPT,
            monitor="step",
            mode="max",
            save_last=True,
        )
        trainer = Trainer(callbacks=[save], default_root_dir=str(out.parent), **options)
        trainer.fit(module, loader, ckpt_path="last")
    else:
        own = BcpCheckpoint(str(out), save=SAVE_EVERY, keep=KEPT, preemption=bcp.Preemption(grace_seconds=GRACE))
        trainer = Trainer(strategy=own.strategy(), callbacks=[own], enable_checkpointing=False, **options)
        trainer.fit(module, loader, ckpt_path=own.newest())
    return Life(module, trainer.global_step - module.steps, trainer.global_step)
