"""The training of the soak: a small FSDP2 model with dropout in a :class:`bcp.Run`.

The last weights depend on the model, the optimizer and the random states of all ranks at every step before.
"""

from __future__ import annotations

import os
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import bcp
from benchmarks.chaos_job import digest
from benchmarks.soak.job import Log
from benchmarks.soak.rules import KEEP, SAVE_EVERY
from benchmarks.soak.store import own_store

__all__ = ["train"]

STEP_SECONDS = 0.02
"""Rest of each step, so that saves end within an interval on a busy machine."""


def model_of(rank: int) -> nn.Module:
    """Return the sharded model; each rank goes on with random numbers of its own."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 32))
    fully_shard(model)
    torch.manual_seed(2 + rank)
    return model


def join(log: Log) -> None:
    """Join the process group. A store that torchrun's agent keeps over restarts gets a prefix for each of them.

    Without it gloo and NCCL read addresses of the life before (pytorch/pytorch#135712).
    """
    ranks = int(os.environ["WORLD_SIZE"])
    store: dist.Store
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=False)
        store = dist.PrefixStore(f"life-{log.life}", agents)
    else:
        meeting = log.folder.parent / f"life-{log.life}"
        meeting.mkdir(exist_ok=True)
        store = own_store(log.rank, meeting)
    dist.init_process_group("gloo", store=store, rank=log.rank, world_size=ranks)


def train(folder: str, log: Log, steps: int) -> None:
    """Train from the newest checkpoint to the last step, and tell the digest of the weights."""
    torch.set_num_threads(1)
    join(log)
    model = model_of(log.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with bcp.Run(folder, {"model": model, "optimizer": optimizer}, save=SAVE_EVERY, keep=KEEP) as run:
        log.tell("resume")
        first = run.resume()
        log.tell("resumed", step=first, passed_over=[[one.step, one.reason] for one in run.resumed.passed_over])
        for step in range(first + 1, steps + 1):
            batch = torch.arange(64.0).reshape(2, 32) * (step + 3 * log.rank) % 7
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_SECONDS)
            log.tell("step", step=step)
            if run.maybe_save(step) is not None:
                log.tell("save", step=step)
            if run.should_stop(step):
                raise SystemExit(f"rank {log.rank} was asked to stop at step {step}")
    log.tell("end", digest=digest(model))
    dist.barrier()
    dist.destroy_process_group()
