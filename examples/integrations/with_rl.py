"""Train an actor and a critic, each in a process of its own, kill both, and go on from a step that both have.

The driver carries answers and values between them, as in RL on several groups of workers: ``with_rl.py FOLDER STEPS``.
Each world has the cursor of its prompts in the same commit.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
import sys
from multiprocessing.connection import Connection

import torch

import bcp
from bcp.data import Frontier

ROLES = ["actor", "critic"]
PROMPTS = torch.rand(512, 8, generator=torch.Generator().manual_seed(1))


def world(name: str, folder: str, launch: str, driver: Connection) -> None:
    """Be the actor, or the critic: answer, learn what the other one says, and save every 4 steps."""
    torch.manual_seed(len(name))
    model = torch.nn.Linear(8, 8 if name == "actor" else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    frontier = Frontier(range(len(PROMPTS)), epochs=None)
    states = {"model": model, "optimizer": optimizer, "dataloader": frontier}
    role = bcp.Role(name, of=ROLES, launch=launch)
    with bcp.Run(folder, states, save=4, keep=2, role=role) as run:
        driver.send(run.resume())
        for inputs, step in iter(driver.recv, None):
            prompts = [ordinal for _ in range(4) if (ordinal := frontier.pull()) is not None]
            output = model(PROMPTS[prompts] if name == "actor" else inputs)
            driver.send(output.detach())
            loss = (output - driver.recv()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            frontier.ack(*prompts)
            run.maybe_save(step)
            driver.send(loss.item())


def drive(folder: str, steps: int, *, kill_at: int | None = None) -> list[float]:
    """Begin a launch of both worlds; kill them after a step, or let them end. Return the critic's losses."""
    launch, losses = secrets.token_hex(8), list[float]()  # all worlds of a start have one id, and each start another
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in ROLES:
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=world, args=(name, folder, launch, theirs)))
        processes[-1].start()
    actor, critic = pipes.values()
    (start,) = {pipe.recv() for pipe in pipes.values()}  # both go on from the same step
    for step in range(start + 1, steps + 1):
        actor.send((None, step))
        critic.send((answers := actor.recv(), step))
        value = critic.recv()
        actor.send(value.expand_as(answers))
        critic.send(answers.mean(dim=1, keepdim=True))
        losses += [pipe.recv() for pipe in pipes.values()][1:]
        if step == kill_at:
            for process in processes:
                process.kill()
    for process, pipe in zip(processes, pipes.values(), strict=True):
        if kill_at is None:
            pipe.send(None)
        process.join()
    return losses


if __name__ == "__main__":
    folder, steps = sys.argv[1], int(sys.argv[2])
    drive(folder, steps - 1, kill_at=steps - 1)
    print("RESULT", json.dumps({"resumed": steps - len(again := drive(folder, steps)), "losses": again}))
