"""An RL-like loop that is killed five times: no prompt is lost, and none is trained twice.

Rollouts complete out of order. A step trains on those that are complete, acknowledges their prompts, and a checkpoint
has model and frontier of one step. After each SIGKILL the job goes on with another number of readers. The model counts
how often it was trained on each prompt, so that its last weights prove the claim.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import torch
from local_ranks import LocalRanks
from torch import distributed as dist
from torch import nn

import bcp
from bcp.data import Frontier

PROMPTS = [f"What is {number} + {number}?" for number in range(736)]
READERS = [2, 4, 1, 3, 2, 4]
"""Of each run; all but the last are killed."""
IN_FLIGHT, SAVE_EVERY = 48, 4


class Model(nn.Module):
    """Stands for a policy: one weight per prompt, and each training on a prompt adds 1 to it."""

    def __init__(self) -> None:
        """Be untrained."""
        super().__init__()
        self.trained: torch.Tensor
        self.register_buffer("trained", torch.zeros(len(PROMPTS), dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Progress:
    """The position of a run after a step.

    Attributes:
        step: number of the step.
        trained: sum of the model's weights.
        saved: sum of the weights in the newest checkpoint.
    """

    step: int
    trained: int
    saved: int


def resume(root: Path, states: dict[str, Any]) -> None:
    """Load the newest checkpoint that was committed, if there is one. A save that was killed has left another."""
    for path in sorted(root.glob("step-*"), reverse=True):
        try:
            bcp.load(path, states)
        except (bcp.UncommittedError, bcp.NotACheckpointError):
            continue
        return


def train(rank: int, size: int, pipe: Connection, root: Path, seed: int) -> None:
    """Be one rank of a run, until the model was trained on all prompts."""
    rollouts = Random(f"{seed}/{rank}")  # noqa: S311 -- stands for how long each rollout takes
    model, frontier = Model(), Frontier(PROMPTS, reader=rank, readers=size)
    states: dict[str, Any] = {"model": model, "dataloader": frontier, "extra_states": {"step": 0}}
    resume(root, states)
    step, flying, saved = states["extra_states"]["step"], list[int](), int(model.trained.sum())
    pipe.send(Progress(step, saved, saved))
    while model.trained.sum() < len(PROMPTS):
        while len(flying) < IN_FLIGHT and (ordinal := frontier.pull()) is not None:
            flying.append(ordinal)
        rollouts.shuffle(flying)
        complete = [flying.pop() for _ in range(min(rollouts.randint(0, 8), len(flying)))]
        gradient = torch.zeros_like(model.trained)
        gradient[complete] = 1
        dist.all_reduce(gradient)
        model.trained += gradient
        frontier.ack(*complete)
        step += 1
        states["extra_states"]["step"] = step
        trained = int(model.trained.sum())
        if step % SAVE_EVERY == 0 or trained == len(PROMPTS):
            bcp.save(root / f"step-{step:06d}", states)
            saved = trained
        pipe.send(Progress(step, trained, saved))


def run(number: int, root: Path) -> list[Progress]:
    """Start a run, kill all but the last one at some step, and return its progress."""
    ranks = LocalRanks(train, READERS[number], root / f"meeting-{number}", root, number)
    steps = Random(number).randint(10, 20) if number < len(READERS) - 1 else None  # noqa: S311 -- any step will do
    progress: list[Progress] = []
    try:
        while len(progress) != steps:
            progress.append(ranks.pipes[0].recv())
    except EOFError:  # the run has ended by itself
        assert steps is None
    else:
        ranks.kill()
    expected = 0 if steps is None else -signal.SIGKILL
    assert ranks.join() == [expected] * READERS[number]
    return progress


def row(values: Sequence[object]) -> str:
    """Return a line of the table."""
    return "  ".join(f"{value!s:>16}" for value in values)


def main(root: Path) -> None:
    """Run and kill the job, print the table, and look at the weights of the last checkpoint."""
    print(row(["readers", "from step", "trained before", "killed at step", "trained", "in a checkpoint"]))
    for number, readers in enumerate(READERS):
        first, *_, last = run(number, root)
        end = last.step if number < len(READERS) - 1 else "-"
        print(row([readers, first.step, first.trained, end, last.trained, last.saved]), flush=True)
    model, frontier = Model(), Frontier(PROMPTS)
    resume(root, {"model": model, "dataloader": frontier})
    lost, twice = int((model.trained == 0).sum()), int((model.trained > 1).sum())
    print(f"{len(READERS) - 1} kills, {len(PROMPTS)} prompts: {lost} lost, {twice} trained twice")
    assert (model.trained == 1).all()
    assert frontier.pull() is None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
