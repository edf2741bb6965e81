"""A job of torchrun that trains in a :class:`bcp.Run` and is asked to stop in some situation.

``run_jobs.py FOLDER STEPS [SITUATION STEP]``. At the end rank 0 writes ``FOLDER/outcome.json``: the step from which the
run was resumed, the last step, whether it was stopped, and a digest of the weights. The weights depend on the random
state of every rank at every step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import bcp

SITUATIONS = ("step", "eval", "compile", "loader", "one rank", "save")
SAVE_EVERY = 10
UPLOAD_SECONDS = 1.0
"""Of the save that is in flight when the signal comes."""


def make_model() -> nn.Module:
    """Return a small sharded model with dropout."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 16))
    fully_shard(model)
    torch.manual_seed(2 + dist.get_rank())
    return model


def digest(model: nn.Module) -> str:
    """Return a digest of all weights, gathered by torch."""
    summary = hashlib.sha256()
    for weight in model.state_dict().values():
        summary.update(weight.full_tensor().detach().contiguous().numpy().tobytes())
    return summary.hexdigest()


def ask_to_stop(situation: str) -> None:
    """Send the signal: to one rank, or to torchrun, which passes it on to all ranks."""
    if situation == "one rank":
        if dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
    elif dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)


def disturb(situation: str) -> None:
    """Be asked to stop in the situation."""
    if situation == "eval":
        threading.Timer(0.3, ask_to_stop, (situation,)).start()
        end = time.monotonic() + 1.5
        with torch.no_grad():
            while time.monotonic() < end:
                torch.rand(64, 64, generator=torch.Generator()) @ torch.ones(64, 64)
    elif situation == "compile":
        threading.Timer(0.3, ask_to_stop, (situation,)).start()
        with torch.random.fork_rng():
            torch.compile(lambda tensor: tensor.sin().cos().sum())(torch.ones(8))
    else:
        ask_to_stop(situation)


def slow_upload(graph: bcp.Graph) -> bcp.Graph:
    """Let the upload take a while."""

    async def wait(part: Any) -> Any:
        await anyio.sleep(UPLOAD_SECONDS)
        return part

    return graph.before("upload", bcp.Stage("slow", wait, workers=100))


def batches(situation: str, first: int, last: int) -> Iterator[Tensor]:
    """Return the inputs of the steps; from forked workers in the situation of that name."""
    inputs = [torch.arange(16.0) * (step + dist.get_rank()) % 7 for step in range(first, last + 1)]
    if situation != "loader":
        return iter(inputs)
    generator = torch.Generator()  # else the loader draws a seed from the random state of training
    loader = DataLoader(inputs, batch_size=None, num_workers=1, multiprocessing_context="fork", generator=generator)  # type: ignore[arg-type]  # a list is a dataset
    return iter(loader)


def train(out: Path, steps: int, situation: str, at: int) -> dict[str, Any]:
    """Train to the last step, or until the run stops."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = bcp.SaveOptions(edit=slow_upload) if situation == "save" else bcp.SaveOptions()
    stopped = False
    with bcp.Run(str(out), {"model": model, "optimizer": optimizer}, save=SAVE_EVERY, save_options=options) as run:
        first = step = run.resume()
        for batch in batches(situation, first + 1, steps):
            step += 1
            model(batch).square().sum().backward()
            if step == at:
                disturb(situation)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
            run.maybe_save(step)
            stopped = run.should_stop(step)
            if stopped:
                break
    return {"resumed": first, "last": step, "stopped": stopped, "digest": digest(model)}


def main() -> None:
    """Join the group, train, write the outcome, leave."""
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    situation, at = (sys.argv[3], int(sys.argv[4])) if len(sys.argv) > 3 else ("", 0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    outcome = train(out, steps, situation, at)
    if dist.get_rank() == 0:
        (out / "outcome.json").write_text(json.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
