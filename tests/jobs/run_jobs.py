"""A job of torchrun that trains in a :class:`bcp.Run` and is asked to stop in some situation.

``run_jobs.py FOLDER STEPS [SITUATION]``. Rank 0 writes ``FOLDER/asked.json`` before the signal: the step from which the
run was resumed, and the step in which the signal comes. At the end it writes ``FOLDER/outcome.json``: the first of
these, the last step, whether the run was stopped, and a digest of the weights. A job that comes to the last step
trains once more without bcp, and adds the digest of those weights. The weights depend on the random state of every
rank at every step.
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
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import bcp
from bcp.format.metadata import METADATA_KEY

SITUATIONS = ("step", "eval", "compile", "loader", "one rank", "save", "hang")
SAVE_EVERY = 10
STEPS_BEFORE = 4
"""Steps between the resumption and the signal, but for ``save`` and ``hang``."""
GRACE_SECONDS = 8.0
"""Of the situation ``hang``: its standby snapshot is written when half of them have passed, however long that takes."""
STEP_SECONDS = 0.1
"""Of the step of the signal. Each one behind it takes twice as long: ranks agree slowly where a machine is busy."""

heard = threading.Event()
"""Whether this process has got the signal. torchrun may take its time to pass it on."""


def make_model() -> nn.Module:
    """Return a small sharded model with dropout."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 16))
    fully_shard(model)
    torch.manual_seed(2 + dist.get_rank())
    return model


def hear(process: int, number: int, _: object) -> None:
    """Note the signal; end in a worker of the loader."""
    heard.set()
    if os.getpid() != process:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def digest(model: nn.Module) -> str:
    """Return a digest of all weights, gathered by torch."""
    summary = hashlib.sha256()
    for weight in model.state_dict().values():
        summary.update(weight.full_tensor().detach().contiguous().numpy().tobytes())
    return summary.hexdigest()


def ask_to_stop(situation: str) -> None:
    """Send the signal to one rank, to each, or to torchrun, which passes it on to all ranks; wait until it is here.

    torchrun kills what does not end in time after it, so ranks that are to hang get it from each other.
    """
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if situation == "hang" or (situation == "one rank" and is_last):
        os.kill(os.getpid(), signal.SIGTERM)
    elif situation != "one rank" and dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    if situation != "one rank" or is_last:
        while not heard.wait(0.01):  # the signal's handler runs between two waits
            continue


def disturb(situation: str) -> None:
    """Be asked to stop in the situation."""
    if situation == "eval":
        asking = threading.Timer(0.3, ask_to_stop, (situation,))
        asking.start()
        with torch.no_grad():
            while asking.is_alive():
                torch.rand(64, 64, generator=torch.Generator()) @ torch.ones(64, 64)
    elif situation == "compile":
        with torch.random.fork_rng():
            be_asked_in_compilation(situation)
    else:
        ask_to_stop(situation)


def be_asked_in_compilation(situation: str) -> None:
    """Be asked to stop while the compiler works.

    A first compilation goes before, with imports, tests of the C++ compiler and precompiled headers. They may take
    longer than the 30 s that torchrun leaves after the signal, and so may four C++ compilers at once.
    """
    from torch._dynamo.backends.registry import lookup_backend  # noqa: PLC0415 -- takes seconds, and one job needs it

    compiler = lookup_backend("inductor" if dist.get_world_size() <= 2 else "aot_eager")
    torch.compile(lambda tensor: tensor.exp().sum(), backend=compiler)(torch.ones(8))
    dist.barrier()

    def asked(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        ask_to_stop(situation)
        return compiler(graph, inputs)

    torch.compile(lambda tensor: tensor.sin().cos().sum(), backend=asked)(torch.ones(8))


def hang(held: Path) -> None:
    """Hang on the last rank, in the step, until its job is killed: once the held snapshot is committed."""
    if dist.get_rank() == dist.get_world_size() - 1:
        while not (held / METADATA_KEY).exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def signal_step(situation: str, first: int) -> int:
    """Return the step in which the signal comes, of a run that was resumed from step ``first``; 0 for none."""
    if not situation:
        return 0
    if situation == "save":  # a save begins behind the step before
        return (first // SAVE_EVERY + 1) * SAVE_EVERY + 1
    at = first + STEPS_BEFORE
    return at + (situation == "hang" and at % SAVE_EVERY == 1)  # else the step before it is saved, not held


def slow_upload(graph: bcp.extend.Graph) -> bcp.extend.Graph:
    """Let the upload end a while after the signal."""

    async def wait(part: Any) -> Any:
        while not heard.is_set():  # noqa: ASYNC110 -- of a signal
            await anyio.sleep(0.01)
        await anyio.sleep(STEP_SECONDS)
        return part

    return graph.before("upload", bcp.extend.Stage("slow", wait, workers=100))


def batches(situation: str, first: int, last: int) -> Iterator[Tensor]:
    """Return the inputs of the steps; from forked workers in the situation of that name."""
    inputs = [torch.arange(16.0) * (step + dist.get_rank()) % 7 for step in range(first, last + 1)]
    if situation != "loader":
        return iter(inputs)
    generator = torch.Generator()  # else the loader draws a seed from the random state of training
    loader = DataLoader(inputs, batch_size=None, num_workers=1, multiprocessing_context="fork", generator=generator)  # type: ignore[arg-type]  # a list is a dataset
    return iter(loader)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """Train one step."""
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def undisturbed(steps: int) -> str:
    """Train to the last step without bcp; return the digest of the weights."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches("", 1, steps):
        step_of(model, optimizer, batch)
    return digest(model)


def train(out: Path, steps: int, situation: str) -> dict[str, Any]:
    """Train to the last step, or until the run stops."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {}
    if situation == "save":
        options = {"save_options": bcp.SaveOptions(edit=slow_upload)}
    elif situation == "hang":
        options = {"standby_steps": 1, "preemption": bcp.Preemption(grace_seconds=GRACE_SECONDS)}
    stopped = False
    with bcp.Run(str(out), {"model": model, "optimizer": optimizer}, save=SAVE_EVERY, **options) as run:
        first = step = run.resume()
        at = signal_step(situation, first)
        if dist.get_rank() == 0:
            (out / "asked.json").write_text(json.dumps({"resumed": first, "at": at}))
        for batch in batches(situation, first + 1, steps):
            step += 1
            if step == at:
                disturb(situation)
                if situation == "hang":
                    hang(out / f"step-{step - 1:08d}")
            step_of(model, optimizer, batch)
            time.sleep(STEP_SECONDS * 2 ** (step - at) if 0 < at <= step else 0.01)
            run.maybe_save(step)
            stopped = run.should_stop(step)
            if stopped:
                break
    return {"resumed": first, "last": step, "stopped": stopped, "digest": digest(model)}


def main() -> None:
    """Join the group, train, write the outcome, leave."""
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    situation = sys.argv[3] if len(sys.argv) > 3 else ""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, partial(hear, os.getpid()))
    dist.init_process_group("gloo")
    outcome = train(out, steps, situation)
    if outcome["last"] == steps:
        outcome["undisturbed"] = undisturbed(steps)
    if dist.get_rank() == 0:
        (out / "outcome.json").write_text(json.dumps(outcome))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
