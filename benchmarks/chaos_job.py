"""Train a small model with dropout for a few steps; the job that ``benchmarks.chaos`` kills and resumes.

The last weights depend on the model, the optimizer, the scheduler and the random state of every step before. A resume
that loses one of them ends with another digest. A job of several ranks shards the model with FSDP2.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import secrets
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812 -- the usual name

import bcp
from bcp import _record
from bcp.format.metadata import METADATA_KEY

STEPS = 4
"""Steps of a loop that saves by itself, every second one."""
RUN_STEPS = 8
"""Steps of a loop in a run: the first two of its four checkpoints are deleted in the job."""
SAVE_EVERY = 2
KEPT = 2
GRACE = 5.0
"""Seconds from SIGTERM to the kill."""
STOPPED = 143
"""Exit status of a job that SIGTERM has ended in time."""

RUNS: dict[str, dict[str, Any]] = {
    "run": {},
    "run-lazy": {"save_options": bcp.SaveOptions(snapshot="lazy")},
    "run-standby": {"standby_steps": 1},
    "run-skip": {"save": 1, "while_saving": "skip"},
    "run-hung": {"save": bcp.policies.AtSteps([SAVE_EVERY, RUN_STEPS]), "standby_steps": 1},
}
"""Arguments of :class:`bcp.Run`. The steps of ``run-hung`` hang once SIGTERM has come."""
WAYS = ("sync", "async", "lazy", "overwrite", *RUNS)


@dataclass(frozen=True, slots=True)
class Training:
    """The parts of a training job on one rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    rank: int

    @classmethod
    def begin(cls, rank: int, ranks: int) -> Training:
        """Make a new training; the model is sharded if there are several ranks."""
        torch.manual_seed(1)
        layers = [nn.Embedding(64, 32), nn.Linear(32, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 64)]
        model = nn.Sequential(*layers)
        if ranks > 1:
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        torch.manual_seed(2 + rank)
        return cls(model, optimizer, scheduler, rank)

    def step(self, step: int) -> None:
        """Train one step."""
        tokens = torch.arange(17) * (step + 3 * self.rank) % 64
        F.cross_entropy(self.model(tokens[:-1]), tokens[1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def digest(model: nn.Module) -> str:
    """Return a digest of all weights, gathered by torch."""
    summary = hashlib.sha256()
    for weight in model.state_dict().values():
        whole: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
        summary.update(whole.detach().contiguous().numpy().tobytes())
    return summary.hexdigest()


def committed(out: Path) -> list[Path]:
    """Return the checkpoints whose metadata file exists, oldest first; bcp has no part in this look."""
    return sorted(path.parent for path in out.glob(f"*/{METADATA_KEY}"))


# -- a loop that saves by itself -------------------------------------------------------------------


def resume(out: Path, states: dict[str, Any]) -> None:
    """Load the newest checkpoint that bcp accepts, and print its step; it has to be the newest committed one."""
    found, loaded = committed(out), None
    for path in sorted(out.glob("ckpt-*"), reverse=True):
        try:
            bcp.load(path, states)
        except (bcp.UncommittedError, bcp.NotACheckpointError) as error:
            print(f"passed over {path.name}: {error}", flush=True)
        else:
            loaded = path
            break
    if found and loaded != found[-1]:
        raise SystemExit(f"{found[-1]} is committed, but {loaded} was loaded")
    print(f"resumed from step {states['extra_states']['step']}", flush=True)


def train(training: Training, out: Path, way: str) -> None:
    """Train from the beginning or from the newest checkpoint."""
    extra: dict[str, Any] = {"step": 0, "scheduler": training.scheduler, "rng": torch.get_rng_state()}
    states = {"model": training.model, "optimizer": training.optimizer, "extra_states": extra}
    resume(out, states)
    torch.set_rng_state(extra["rng"])
    pending = None
    for step in range(extra["step"] + 1, STEPS + 1):
        training.step(step)
        if step % SAVE_EVERY == 0:
            if pending is not None:
                pending.wait()
            extra.update(step=step, rng=torch.get_rng_state())
            pending = save(out, step, states, way)
    if pending is not None:
        pending.wait()


def save(out: Path, step: int, states: dict[str, Any], way: str) -> bcp.Pending[bcp.SaveResult] | None:
    """Save the step in one of the ways."""
    if way == "overwrite":
        bcp.save(out / "ckpt-0", states, overwrite=True)
        return None
    path = out / f"ckpt-{step}"
    if way == "sync":
        bcp.save(path, states)
        return None
    return bcp.save(path, states, async_checkpoint=True, snapshot="lazy" if way == "lazy" else "eager")


# -- a loop in a run -------------------------------------------------------------------------------


def train_in_run(training: Training, out: Path, way: str) -> bool:
    """Train in a run from the beginning or from the newest checkpoint; return whether SIGTERM has ended it."""
    states = {
        "model": training.model,
        "optimizer": training.optimizer,
        "extra_states": {"scheduler": training.scheduler},
    }
    preemption, found, stopped = bcp.Preemption(grace_seconds=GRACE), committed(out), False
    arguments: dict[str, Any] = {"save": SAVE_EVERY, "keep": KEPT, "preemption": preemption, **RUNS[way]}
    with bcp.Run(str(out), states, **arguments) as run:
        first = run.resume() + 1
        newest = found[-1].name if found else "step-00000000"
        if newest != f"step-{first - 1:08d}":
            raise SystemExit(f"{newest} is committed, but the run was resumed from step {first - 1}")
        print(f"resumed from step {first - 1}", flush=True)
        for step in range(first, RUN_STEPS + 1):
            if way == "run-hung" and preemption.reason is not None:
                time.sleep(10 * GRACE)
            if way == "run-skip":
                time.sleep(0.05)  # so that some saves end in time for the next one, and some do not
            training.step(step)
            run.maybe_save(step)
            stopped = run.should_stop(step)
            if stopped:
                break
    if first <= RUN_STEPS and training.rank == 0:
        check_remains(out)
    return stopped


def check_remains(out: Path) -> None:
    """Refuse checkpoints beyond those that the run has to keep, and the remains of any other.

    Raises:
        SystemExit: there are some.

    """
    kept = {path.name for path in committed(out)[-KEPT:]}
    folders = {path.name for path in out.iterdir() if path.is_dir()}
    if folders != kept:
        raise SystemExit(f"the run has left the folders {sorted(folders)}, and had to keep {sorted(kept)}")


# -- both ------------------------------------------------------------------------------------------


def repeat_names(rank: int) -> None:
    """Count instead of drawing random names, and leave the time out of them, so that killed runs have the same names.

    The resumed runs draw: an operation's id is never used twice.
    """
    numbers: dict[int, itertools.count[int]] = defaultdict(itertools.count)  # threads draw temporary names in any order

    def counted(nbytes: int | None = None) -> str:
        nbytes = nbytes or 16
        return f"{rank:02x}{next(numbers[nbytes]):0{2 * nbytes - 2}x}"

    secrets.token_hex = counted
    _record._key = lambda watch, kind, name: f"telemetry/{kind}-{name}.arrow"  # noqa: SLF001, ARG005 -- see above


def tear_files_of_aiofiles() -> None:
    """Let aiofiles take the files that ckpt-chaos cuts in half when they are closed; else it refuses their type."""
    from aiofiles.threadpool import wrap  # noqa: PLC0415 -- only in runs that are killed
    from aiofiles.threadpool.binary import AsyncBufferedIOBase  # noqa: PLC0415 -- as above
    from ckpt_chaos.inject import _TornFile  # noqa: PLC0415 -- as above

    wrap.register(_TornFile, AsyncBufferedIOBase)


def main() -> None:
    """Read the command line; join the other ranks if the environment tells of any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--way", choices=WAYS, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "CKPT_CHAOS_WATCH" in os.environ:
        repeat_names(rank)
        tear_files_of_aiofiles()
    if ranks > 1:
        dist.init_process_group("gloo")
    training, stopped = Training.begin(rank, ranks), False
    if options.way in RUNS:
        stopped = train_in_run(training, options.out, options.way)
    else:
        train(training, options.out, options.way)
    if not stopped:
        summary = digest(training.model)
        if rank == 0:
            (options.out / "digest").write_text(summary)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    if stopped:
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
