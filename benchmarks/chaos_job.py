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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812 -- the usual name

import bcp
from bcp.format.metadata import METADATA_KEY

WAYS = ("sync", "async", "lazy", "overwrite")
STEPS = 4
SAVE_EVERY = 2


def model_of(ranks: int) -> nn.Module:
    """Return the model, sharded if there are several ranks."""
    layers = [nn.Embedding(64, 32), nn.Linear(32, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 64)]
    model = nn.Sequential(*layers)
    if ranks > 1:
        fully_shard(model)
    return model


def committed(out: Path) -> list[Path]:
    """Return the checkpoints whose metadata file exists, oldest first; bcp has no part in this look."""
    return sorted(path.parent for path in out.glob(f"*/{METADATA_KEY}"))


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


def digest(model: nn.Module) -> str:
    """Return a digest of all weights, gathered by torch."""
    summary = hashlib.sha256()
    for weight in model.state_dict().values():
        whole: Tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
        summary.update(whole.detach().contiguous().numpy().tobytes())
    return summary.hexdigest()


def train(out: Path, way: str, rank: int, ranks: int) -> None:
    """Train from the beginning or from the newest checkpoint, and write the digest of the last weights."""
    torch.manual_seed(1)
    model = model_of(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    extra: dict[str, Any] = {"step": 0, "scheduler": scheduler, "rng": torch.get_rng_state()}
    states = {"model": model, "optimizer": optimizer, "extra_states": extra}
    torch.manual_seed(2 + rank)
    extra["rng"] = torch.get_rng_state()
    resume(out, states)
    torch.set_rng_state(extra["rng"])
    pending = None
    for step in range(extra["step"] + 1, STEPS + 1):
        tokens = torch.arange(17) * (step + 3 * rank) % 64
        F.cross_entropy(model(tokens[:-1]), tokens[1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % SAVE_EVERY == 0:
            if pending is not None:
                pending.wait()
            extra.update(step=step, rng=torch.get_rng_state())
            pending = save(out, step, states, way)
    if pending is not None:
        pending.wait()
    summary = digest(model)
    if rank == 0:
        (out / "digest").write_text(summary)


def save(out: Path, step: int, states: dict[str, Any], way: str) -> bcp.Pending[bcp.SaveReport] | None:
    """Save the step in one of the ways."""
    if way == "overwrite":
        bcp.save(out / "ckpt-0", states, overwrite=True)
        return None
    path = out / f"ckpt-{step}"
    if way == "sync":
        bcp.save(path, states)
        return None
    return bcp.save(path, states, async_checkpoint=True, snapshot="lazy" if way == "lazy" else "eager")


def repeat_names(rank: int) -> None:
    """Count instead of drawing random names, so that file events have the same names in every run that is killed.

    The resumed runs draw: an operation's id is never used twice.
    """
    numbers = itertools.count()
    secrets.token_hex = lambda nbytes=None: f"{rank:02x}{next(numbers):0{2 * (nbytes or 16) - 2}x}"


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
    if ranks > 1:
        dist.init_process_group("gloo")
    train(options.out, options.way, rank, ranks)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
