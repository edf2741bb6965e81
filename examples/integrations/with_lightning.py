"""A training with Lightning that bcp saves and resumes: ``with_lightning.py FOLDER STEPS``.

The file may not be called ``lightning.py``: the name would hide the package.
"""

from __future__ import annotations

import json
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torchdata.stateful_dataloader import StatefulDataLoader

from bcp.integrations.lightning import BcpCheckpoint


class Regression(LightningModule):  # type: ignore[misc]
    """A tiny model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:  # noqa: ARG002
        """Return the loss of a batch."""
        loss: torch.Tensor = (self.net(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: str, steps: int) -> None:
    """Train, from the newest checkpoint on."""
    torch.manual_seed(0)  # before the loader, which seeds its order when it is made
    loader = StatefulDataLoader(torch.rand(64, 16), batch_size=8, shuffle=True)
    save = BcpCheckpoint(folder, save=5, keep=3)
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        strategy=save.strategy(),  # "ddp" or "fsdp2" on several devices
        callbacks=[save],
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Regression(), loader, ckpt_path=save.newest())
    if save.run is not None:
        result = {"resumed": save.run.resumed.step, "step": trainer.global_step}
        print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
