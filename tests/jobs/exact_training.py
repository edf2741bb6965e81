"""A small training in which everything has a state. It saves once, dies later, and goes on in other processes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import HOST
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812 -- everybody's name for it
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import bcp
from bcp.data import Batch, Source, TokenLoader

SAVED = 8
"""The save comes before the step of this number; so many steps are kept."""
COMMITTED, DEAD = 11, 13
"""Steps before which the save is waited for, and before which all ranks kill themselves."""
EPOCHS, CONTEXT, BATCH, SHARDS, ACCUMULATED = 2, 17, 12, 12, 2
VOCAB, WIDTH = 32, 16


@dataclass(frozen=True)
class Job:
    """What a run does.

    Attributes:
        path: of its log; a save goes below it.
        size: how many ranks it has.
        dies: it saves before step ``SAVED``, and is killed before step ``DEAD``.
        resumes: the checkpoint from which it goes on.
        left_out: which of the states it does not load.
        end: it ends before the step of this number, if the data does not end before.
    """

    path: Path
    size: int = 2
    dies: bool = False
    resumes: Path | None = None
    left_out: str = ""
    end: int | None = None


class Net(nn.Module):
    """Predicts the next token; forgets some of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embedding(tokens), 0.2)
        return self.second(F.dropout(F.gelu(self.first(x)), 0.2))


def sources() -> list[Source]:
    """Return 800 samples of 1 to 30 tokens, which last for about 60 steps with both epochs."""
    made = random.Random(3)  # noqa: S311 -- the same samples in each process
    books, web = (
        [[made.randrange(VOCAB) for _ in range(made.randint(1, 30))] for _ in range(count)] for count in (500, 300)
    )
    return [Source("books", books, weight=2.0), Source("web", web)]


def main(rank: int, port: int, job: Job) -> None:
    """Be one rank of a job."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    multiprocessing.set_forkserver_preload(["bcp.data"])
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.size)
    loader = TokenLoader(
        sources(),
        CONTEXT,
        BATCH,
        reader=rank,
        readers=job.size,
        shards=SHARDS,
        workers=2,
        seed=5,
        epochs=EPOCHS,
    )
    job.path.mkdir(parents=True, exist_ok=True)
    with loader, (job.path / f"{rank}.jsonl").open("w") as log:
        train(job, loader, log)
    dist.barrier()
    dist.destroy_process_group()


def train(job: Job, loader: TokenLoader, log: Any) -> None:
    """Train until the data ends, the job's last step, or death."""
    torch.manual_seed(0)
    model = Net()
    fully_shard(model)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(100 + loader.reader)
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) / (1 + step / 40))
    step = 0
    states: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "dataloader": loader,
        "extra_states": {"step": step, "scheduler": scheduler, "rng": bcp.RngState()},
    }
    if job.resumes:
        step = resume(job, states)
    pending = None
    while step != job.end:
        if job.dies and step == SAVED - 1:
            bcp.prefetch_data_state(step, states, every_steps=SAVED)
        if job.dies and step == SAVED:
            states["extra_states"]["step"] = step
            pending = bcp.save(job.path / "checkpoint", states, async_checkpoint=True)
        if pending and step == COMMITTED:
            pending.wait()
        if job.dies and step == DEAD:
            os.kill(os.getpid(), signal.SIGKILL)
        batches = [next(loader, None) for _ in range(ACCUMULATED)]
        if not ranks_with(batches):
            break
        losses = take(model, optimizer, [batch or padding(job) for batch in batches])
        scheduler.step()
        ids = [sample for batch in batches if batch for window in batch.samples for sample in window]
        print(json.dumps({"step": step, "losses": losses, "samples": ids}), file=log, flush=True)
        step += 1
    print(json.dumps({"step": step, "weights": digest(model)}), file=log, flush=True)


def resume(job: Job, states: dict[str, Any]) -> int:
    """Load what the job does not leave out; return the number of the next step."""
    loaded = {name: state for name, state in states.items() if name != job.left_out}
    extra = {name: state for name, state in states["extra_states"].items() if name != job.left_out}
    bcp.load(job.resumes, loaded | {"extra_states": extra}, strict=not job.left_out)
    return extra["step"]


def take(model: Any, optimizer: AdamW, batches: list[Batch]) -> list[float]:
    """Take one step over several batches; return the losses of this rank."""
    losses = []
    for number, batch in enumerate(batches):
        model.set_requires_gradient_sync(number + 1 == len(batches))
        tokens, targets, real = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.documents[:, 1:] >= 0
        masked = torch.from_numpy(np.random.random(tokens.shape) < 0.1)  # noqa: NPY002 -- the global state is meant
        logits = model(tokens.masked_fill(masked, 0).flatten())
        each = F.cross_entropy(logits, targets.flatten(), reduction="none")
        loss = (each * real.flatten()).sum() / each.numel() * (0.5 + random.random())  # noqa: S311 -- as above
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def padding(job: Job) -> Batch:
    """Return the batch of a reader whose data has ended before that of others."""
    shape = BATCH // job.size, CONTEXT
    return Batch(torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1), ((),) * shape[0], ())


def ranks_with(batches: list[Batch | None]) -> int:
    """Return how many ranks have any batch."""
    count = torch.tensor(int(any(batches)))
    dist.all_reduce(count)
    return int(count)


def digest(model: nn.Module) -> str:
    """Return a digest of this rank's part of the weights."""
    parts = (parameter.to_local().detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(b"".join(parts)).hexdigest()
