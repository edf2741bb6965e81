"""The job of torchtitan: its debug Llama of two layers, with dropout in the attention, on CPU."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos_hosts.titan_on_cpu import HostLoader, on_cpu  # isort: skip -- replaces parts of torchtitan
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import bcp
from bcp.integrations.torchtitan import BcpCheckpointManager
from benchmarks.chaos_hosts.job import Life
from benchmarks.chaos_job import GRACE, KEPT, RUN_STEPS, SAVE_EVERY

ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def train(out: Path, *, native: bool) -> Life:
    """Train to the end, from the newest checkpoint if there is one.

    torchtitan saves no random states of its own, so its own checkpoints are tried without dropout.
    """
    os.environ.update(ONE)
    logging.getLogger().setLevel(logging.ERROR)
    config = on_cpu(llama3_debugmodel(), dropout=0.0 if native else 0.1)
    config.dataloader = HostLoader.Config()
    config.training.steps = config.lr_scheduler.total_steps = RUN_STEPS
    fields: dict[str, Any] = {"folder": out.name, "interval": SAVE_EVERY, "keep_latest_k": KEPT}
    fields |= {"enable": True, "last_save_model_only": False}
    config.dump_folder = str(out.parent)
    if native:
        config.checkpoint = CheckpointManager.Config(**fields)
    else:
        run = partial(bcp.Run, preemption=bcp.Preemption(grace_seconds=GRACE))
        config.checkpoint = BcpCheckpointManager.Config(run=run, **fields)
    trainer, steps = config.build(), 0
    step = trainer.train_step

    def counted(*args: object) -> None:
        nonlocal steps
        steps += 1
        step(*args)

    trainer.train_step = counted
    trainer.train()
    trainer.close()
    dist.destroy_process_group()
    return Life(trainer.model_parts[0], trainer.step - steps, trainer.step)
