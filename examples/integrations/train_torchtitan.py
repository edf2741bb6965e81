"""torchtitan with checkpoints of bcp, on any number of GPUs at each restart.

Start it, kill it, and start it again on another number of GPUs::

    torchrun --nproc-per-node 8 train_torchtitan.py outputs/run-7 1000
    torchrun --nproc-per-node 4 train_torchtitan.py outputs/run-7 1000
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger

from bcp.data import Source, TokenLoader
from bcp.integrations.torchtitan import BcpCheckpointManager

DOCUMENTS = [[(number * token) % 2000 for token in range(10 + number % 90)] for number in range(1000)]
"""Tokens of 1000 documents. Pass a sequence that reads yours from files."""


class PackedDocuments(TokenLoader, BaseDataLoader):  # type: ignore[misc]  # torchtitan is untyped here
    """Windows of tokens in torchtitan's form. The number of readers may change at a restart."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """The order of the data."""

        seed: int = 0

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        TokenLoader.__init__(
            self,
            [Source("documents", DOCUMENTS)],
            context=seq_len + 1,
            batch=local_batch_size * dp_world_size,
            reader=dp_rank,
            readers=dp_world_size,
            shards=96,  # all planned numbers of readers divide it
            seed=config.seed,
        )

    def __next__(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:  # type: ignore[override]
        """Return inputs and targets of the next batch."""
        tokens = TokenLoader.__next__(self).tokens
        return {"input": tokens[:, :-1]}, tokens[:, 1:]


def make_config(folder: str, steps: int) -> Any:
    """Return the config of the job: take your own model in place of the debug model."""
    config = llama3_debugmodel()
    config.dump_folder, config.training.steps = folder, steps
    config.dataloader = PackedDocuments.Config()
    config.checkpoint = BcpCheckpointManager.Config(enable=True, interval=2, keep_latest_k=3)
    return config


def main(config: Any) -> Any:
    """Train until the last step, or until a scheduler stops the job."""
    init_logger()
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()  # waits for the running save
    return trainer


if __name__ == "__main__":
    main(make_config(sys.argv[1], steps=int(sys.argv[2])))
