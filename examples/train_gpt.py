"""Train a small GPT on the standard library's sources, with checkpoints that survive crashes and new layouts.

Run it under torchrun, on CPU::

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py --out run --dp 4
    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py --out run --dp 2 --tp 2

The second command goes on from the newest checkpoint of the first, on another layout. SIGTERM ends a run with a
checkpoint of its last step.

The dataloader is part of the checkpoint. The order of its samples depends on the seed alone, so runs of any layout see
the same data, and their losses differ by no more than the order in which float32 numbers are added up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import signal
import sysconfig
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
from gpt import GPT, Config, parallelise
from torch.nn import functional as F  # noqa: N812 -- everybody's name for it
from torch.optim.lr_scheduler import LambdaLR

import bcp
from bcp.data import Batch, SampleId, Source, TokenLoader

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 10
SHARDS = 8
"""Virtual shards of the data: fixed for a run, and divisible by every number of data-parallel ranks it will have."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="where losses and checkpoints go")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks (FSDP2)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--kill-at-save", type=int, metavar="N", help="rank 1 kills itself in the middle of save N")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a global batch; a multiple of --dp")
    parser.add_argument("--workers", type=int, default=1, help="processes per rank that read ahead")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


# -- data -------------------------------------------------------------------------------------


def paragraphs(pattern: str) -> list[np.ndarray[Any, Any]]:
    """Return the paragraphs of some of the standard library's sources, as bytes, in the order of the files' names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob(pattern))
    texts = [text + b"\n\n" for file in files for text in file.read_bytes().split(b"\n\n")]
    return [np.frombuffer(text, np.uint8) for text in texts]


def make_loader(args: argparse.Namespace, reader: int) -> TokenLoader:
    """Return the loader of one data-parallel rank; ranks of one tensor-parallel group have the same."""
    return TokenLoader(
        [Source("modules", paragraphs("*.py"), weight=2.0), Source("asyncio", paragraphs("asyncio/*.py"), weight=1.0)],
        context=Config().context + 1,  # the last token of a window is a target only
        batch=args.batch,
        reader=reader,
        readers=args.dp,
        shards=SHARDS,
        workers=args.workers,
        seed=args.seed,
    )


def gather_samples(batch: Batch, group: dist.ProcessGroup) -> list[SampleId]:
    """Return the ids of the samples that begin in the batches of all readers, for the log."""
    readers: list[Any] = [None] * group.size()
    dist.all_gather_object(readers, [sample for window in batch.samples for sample in window], group=group)
    return [sample for samples in readers for sample in samples]


# -- checkpoints ------------------------------------------------------------------------------


def kill_before_upload(graph: bcp.extend.Pipeline[Any, Any]) -> bcp.extend.Pipeline[Any, Any]:
    """Edit a save graph so that the process dies, as by a power cut, when its first part is about to be written."""

    async def die(_part: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    return graph.before("upload", bcp.extend.Stage("die", die))


def save_options(args: argparse.Namespace) -> bcp.SaveOptions:
    """Return the usual options, unless this rank is to die in one of its saves."""
    if args.kill_at_save is None or dist.get_rank() != 1:
        return bcp.SaveOptions()
    numbers = itertools.count(1)
    return bcp.SaveOptions(
        edit=lambda graph: kill_before_upload(graph) if next(numbers) == args.kill_at_save else graph
    )


# -- training ---------------------------------------------------------------------------------


def log(file: TextIO | None, **record: object) -> None:
    """Append one record to the run's log, on the rank that has one."""
    if file is not None:
        print(json.dumps(record), file=file, flush=True)


def log_save(file: TextIO | None, result: bcp.SaveResult) -> None:
    """Append the costs of a save."""
    log(file, saved=Path(result.path).name, blocking_seconds=result.blocking_seconds, seconds=result.seconds)


def rate(step: int, steps: int) -> float:
    """Return the fraction of the learning rate at a step: a linear warm-up under a cosine."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (1 + math.cos(math.pi * step / steps)) / 2


def train(args: argparse.Namespace, file: TextIO | None) -> None:
    """Train from the beginning or from the newest checkpoint, with a save in the background every few steps."""
    torch.manual_seed(args.seed)  # the same weights on every rank, before they are cut
    model = GPT(Config())
    mesh = parallelise(model, dp=args.dp, tp=args.tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)  # TP mixes meshes
    scheduler = LambdaLR(optimizer, lambda step: rate(step, args.steps))
    loader = make_loader(args, reader=mesh["dp"].get_local_rank())
    states = {"model": model, "optimizer": optimizer, "dataloader": loader, "extra_states": {"scheduler": scheduler}}

    with bcp.Run(
        str(args.out / "checkpoints"),
        states,
        save=args.save_every,
        save_options=save_options(args),
        on_commit=lambda _, result: log_save(file, result),
    ) as run:
        first = run.resume()
        log(file, resumed=first)
        for step in range(first, args.steps):
            bcp.prefetch_data_state(step, states, every_steps=args.save_every)  # workers get ready for the save
            batch = next(loader)
            tokens, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            samples = gather_samples(batch, mesh["dp"].get_group())
            log(file, step=step, loss=mean.item() / dist.get_world_size(), samples=samples)
            run.maybe_save(step + 1)
            if run.should_stop(step + 1):
                break
    loader.close()


def main() -> None:
    """Join the group, train, leave."""
    args = arguments()
    torch.set_num_threads(1)  # one thread adds numbers up in one order
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo")
    args.out.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        with (args.out / "log.jsonl").open("a") as file:
            train(args, file)
    else:
        train(args, None)
    dist.barrier()  # also lets gloo's threads finish: one that still holds a tensor at interpreter exit aborts
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
