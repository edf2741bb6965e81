"""A tiny training with Lightning: ``lightning_job.py STRATEGY WORLD FOLDER [word ...]``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from host_side import report, save_options
from lightning.pytorch import LightningModule, Trainer
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import bcp
from bcp.integrations.lightning import BcpCheckpoint

torch.set_num_threads(1)
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
NAME, FOLDER, ASKED = sys.argv[1], sys.argv[2], sys.argv[3:]
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
ALONE = NAME == "auto"
PREEMPTION = bcp.Preemption()


def asked(word: str, default: int = 0) -> int:
    return next((int(text.partition("=")[2]) for text in ASKED if text.startswith(f"{word}=")), default)


class Net(LightningModule):
    """Dropout where one rank draws as the uninterrupted job does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(0.2 if "still" not in ASKED else 0.0), torch.nn.Linear(32, 1)
        )
        self.losses: dict[int, float] = {}
        self.validated: dict[int, float] = {}

    def configure_model(self) -> None:
        if NAME == "fsdp2":
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[0]).squeeze(-1) - batch[1]).square().mean()

    def training_step(self, batch: Any) -> torch.Tensor:
        step = self.global_step + 1
        if step == asked("term"):
            os.kill(os.getpid(), signal.SIGTERM)
            while PREEMPTION.reason is None:  # a thread hears of it
                time.sleep(0.01)
        loss = self.loss(batch)
        assert step not in self.losses
        self.losses[step] = self.all_gather(loss.detach()).mean().item()
        self.log("loss", loss.detach())
        return loss

    def validation_step(self, batch: Any) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        if not self.trainer.sanity_checking:
            self.validated[self.global_step] = loss.item()

    def test_step(self, batch: Any) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.rand(32, 16, generator=made), torch.rand(32, generator=made))
    if "still" in ASKED:  # all batches are one: a position counts the samples of a rank, and has no meaning for others
        data = TensorDataset(*(tensor[:4].repeat(8, *[1] * (tensor.ndim - 1)) for tensor in data.tensors))
    torch.manual_seed(5)
    # Lightning would take a sampler that shuffles
    part = DistributedSampler(data, WORLD, int(os.environ["RANK"]), shuffle=False) if WORLD > 1 else None
    shuffle = None if part else "still" not in ASKED
    loader = StatefulDataLoader(data, batch_size=4 // WORLD, shuffle=shuffle, sampler=part)
    save = BcpCheckpoint(FOLDER, save=4, keep=asked("keep", 3), save_options=save_options(), preemption=PREEMPTION)
    strategy = save.strategy(NAME, **({} if ALONE else {"process_group_backend": "gloo"}))
    trainer = Trainer(
        max_steps=asked("steps", 12),
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        callbacks=[save],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=asked("validate") or None,
        limit_val_batches=1 if asked("validate") else 0,
        deterministic=True,
    )
    net = Net()
    behind = DataLoader(data, batch_size=8, generator=torch.Generator())  # draws none of the training's numbers
    trainer.fit(net, loader, behind, ckpt_path=save.newest())
    tested = (
        trainer.test(net, DataLoader(data, batch_size=32), bcp.latest(FOLDER), verbose=False) if "test" in ASKED else []
    )
    assert save.run is not None
    if trainer.global_rank == 0:
        report(
            losses=net.losses,
            validated=net.validated,
            resumed=save.run.resumed.step,
            passed_over=len(save.run.resumed.passed_over),
            step=trainer.global_step,
            folders=sorted(path.name for path in Path(FOLDER).glob("step-*")),
            tested=tested,
            parameter=type(next(net.parameters())).__name__,
            strategy=type(trainer.strategy).__name__,
        )


main()
