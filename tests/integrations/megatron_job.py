"""megatron_job.py [ARGUMENT ...] FOLDER [ARGUMENT ...]: a tiny GPT of megatron-core in 12 steps with a save every 4.

Arguments are those of Megatron. FOLDER stands for ``--save FOLDER``, and the word ``resume`` for ``--load FOLDER``.
``keep=N`` is for ``install``, ``stop=N`` sends SIGTERM in step N, ``look`` reads the tracker at each step.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

warnings.simplefilter("ignore")
torch.set_num_threads(1)

import megatron_stand_in as megatron  # noqa: E402
from host_side import report, save_options  # noqa: E402
from torch import distributed  # noqa: E402

import bcp  # noqa: E402
from bcp.integrations.megatron import install  # noqa: E402
from bcp.integrations.megatron.loop import TRACKER  # noqa: E402

FOLDER = next(word for word in sys.argv[1:] if word.startswith("/"))
WORDS = [word for word in sys.argv[1:] if word != FOLDER]
ASKED = {word.partition("=")[0]: word.partition("=")[2] for word in WORDS if word.split("=")[0] in {"keep", "stop"}}
FLAGS = [word for word in WORDS if word.split("=")[0] not in {"keep", "stop", "resume", "look", "alone"}]
BAD: list[Any] = []
"""Iterations that the tracker named, and that were not committed."""

plain_step = megatron.train_step


def step(iteration: int, trainer: Any) -> None:
    if ASKED.get("stop") == str(iteration) and distributed.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    tracker = Path(FOLDER, TRACKER)
    if tracker.exists() and distributed.get_rank() == 0:
        named = int(tracker.read_text())
        committed = [info.step for info in bcp.Run(FOLDER, {}).list() if info.is_committed]
        if named not in committed:
            BAD.append([iteration, named, committed])
    plain_step(iteration, trainer)


def main() -> None:
    megatron.train_step = step
    install(keep=int(ASKED["keep"]) if "keep" in ASKED else None, save_options=save_options())
    given = ["--train-iters", "12", "--save-interval", "4", "--save", FOLDER]
    given += ["--load", FOLDER] if "resume" in WORDS else []
    with suppress(SystemExit):
        megatron.pretrain([*given, *FLAGS])
    args, final, tracked = megatron.get_args(), megatron.final(), megatron.tracked()
    everybody: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everybody, [megatron.DRAWN, tracked])
    if distributed.get_rank() == 0:
        report(
            losses=megatron.LOSSES,
            drawn=everybody,
            final=final,
            bad=BAD,
            loaded=args.iteration,
            samples=args.consumed_train_samples,
        )
    distributed.destroy_process_group()


main()
