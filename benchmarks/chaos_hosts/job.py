"""Train a small model with a trainer of others for 8 steps; the job that ``benchmarks.chaos_hosts`` kills and resumes.

The last weights depend on model, optimizer, scheduler, random states and the position in the data of every step before.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.chaos_job import RUN_STEPS, STOPPED, committed, digest, repeat_names, tear_files_of_aiofiles

HOSTS = {"transformers": "checkpoint", "lightning": "at", "torchtitan": "step"}
"""Trainers, and the names of their own checkpoints before the step. ``with_<host>.py`` beside this file trains."""


class Life(NamedTuple):
    """The end of one process of a job, from ``train(out, native=...)`` of a host's module.

    Attributes:
        model: with its last weights.
        resumed: the step of the checkpoint that it began with, 0 without one.
        step: the last step; before :data:`~benchmarks.chaos_job.RUN_STEPS` if SIGTERM has ended it.
    """

    model: nn.Module
    resumed: int
    step: int


def main() -> None:
    """Read the command line, train, and check that the newest committed checkpoint was taken.

    Raises:
        SystemExit: an older one was taken, or SIGTERM has ended the job.

    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--host", choices=HOSTS, required=True)
    parser.add_argument("--native", action="store_true", help="save as the trainer does without bcp")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    if "CKPT_CHAOS_WATCH" in os.environ:
        repeat_names(0)
        tear_files_of_aiofiles()
    out, found = options.out, committed(options.out)
    if options.native:  # some trainers save the path, and ckpt-chaos compares the sizes of files
        os.chdir(out.parent)
        out = Path(out.name)
    host = importlib.import_module(f"benchmarks.chaos_hosts.with_{options.host}")
    life: Life = host.train(out, native=options.native)
    if not options.native:
        newest = found[-1].name if found else "step-00000000"
        if newest != f"step-{life.resumed:08d}":
            raise SystemExit(f"{newest} is committed, but the run was resumed from step {life.resumed}")
    print(f"resumed from step {life.resumed}", flush=True)
    if life.step < RUN_STEPS:
        sys.exit(STOPPED)
    (out / "digest").write_text(digest(life.model))


if __name__ == "__main__":
    main()
